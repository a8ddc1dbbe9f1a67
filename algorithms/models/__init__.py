"""Decoder-only transformers as plain modules: they know weights and shapes, and of caches only the memory of a kind of
layer."""
