"""Drafting by n-grams: what followed the last tokens of the request most recently is likely to follow them again.

propose   The last tokens of the request are looked up in the texts of requests, the most tokens that are found. What
          followed them is merged into one tree: the latest continuation first, others beside it, shorter matches last.

Rules of matches and trees: `specdec_kernels.texts`. `algorithms.suffix` reads the same texts and prefers what followed
most often.
"""

from __future__ import annotations

from dataclasses import dataclass

from algorithms.runtime.lookup import Lookup


class NGram(Lookup):
    """Trees of the latest continuations."""

    name = "ngram"
    order = "latest"

    @dataclass
    class Config(Lookup.Config):
        name: str = "ngram"
