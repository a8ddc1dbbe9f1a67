"""Attention over the paged KV cache: the cache, the mixer of inference, and the backends."""
