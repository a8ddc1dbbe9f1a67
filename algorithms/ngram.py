"""Drafting by n-grams: what followed the last tokens most recently is likely to follow them again.

propose   The longest suffix of the history that occurred before is looked up in the token histories. Its
          continuations are merged into one tree, the latest first, shorter matches last. Rules:
          `specdec_kernels.history`.
"""

from dataclasses import dataclass

from algorithms.drafting.lookup import Lookup


class NGram(Lookup):
    """Trees of the latest continuations."""

    name = "ngram"
    order = "latest"

    @dataclass
    class Config(Lookup.Config):
        name: str = "ngram"
