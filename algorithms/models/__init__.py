"""Decoder-only transformers as plain modules: they know weights and shapes, and no cache but the memory of their kinds of
layers."""
