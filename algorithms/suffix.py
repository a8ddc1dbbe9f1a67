"""Suffix drafting: what followed the longest suffix of the request most often is likely to follow it again.

propose   The end of the request is looked up in the texts of requests. The longest matches vote for what followed them,
          and their continuations are merged into one tree by frequency. Long matches are trusted further than short
          ones.

Rules of matches and trees: `specdec_kernels.texts`. Source: SuffixDecoding (arXiv 2411.04975). `algorithms.ngram` reads
the same texts and prefers what followed last.
"""

from __future__ import annotations

from dataclasses import dataclass

from algorithms.runtime.lookup import Lookup


class Suffix(Lookup):
    """Trees of the most frequent continuations."""

    name = "suffix"
    order = "frequent"
    tells_strength = True

    @dataclass
    class Config(Lookup.Config):
        name: str = "suffix"
