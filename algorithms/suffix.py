"""Suffix drafting (SuffixDecoding, arXiv 2411.04975): what followed the longest suffix most often is likely to follow
it again.

propose   The `max_candidates` best matches of the history's suffix (longest first, then latest) vote for what
          followed them. Their continuations are merged into one tree by frequency. Rules: `specdec_kernels.history`.
"""

from dataclasses import dataclass

from algorithms.drafting.lookup import Lookup


class Suffix(Lookup):
    """Trees of the most frequent continuations."""

    name = "suffix"
    order = "frequent"

    @dataclass
    class Config(Lookup.Config):
        name: str = "suffix"
