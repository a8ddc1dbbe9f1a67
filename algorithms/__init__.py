"""Speculative decoding algorithms, one drafter a file, over the shared runtime."""
