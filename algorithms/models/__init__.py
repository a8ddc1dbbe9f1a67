"""Decoder-only transformers as plain modules: they know weights and shapes, never caches."""
