"""Tokens per step, from what a drafter would draft behind every token of known text.

Under greedy decoding the text does not depend on the drafts. So one dense pass gives for every position r how many of
the drafts behind r the target would accept, and decoding visits r = start - 1 (the last prompt token),
r + accepted(r) + 1, and so on. Drafts behind the end of a text are not counted, though an engine may accept them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Tally:
    """Counts pooled over sequences for drafts of `draft_len` tokens."""

    draft_len: int
    tokens: int = 0
    steps: int = 0

    def add(self, leading: list[int], start: int, length: int) -> None:
        """One text: `leading[r]` right drafts behind position r, of a continuation at `start` … `length` - 1."""
        last = start - 1
        while last < length - 1:
            accepted = min(leading[last], self.draft_len, length - 1 - last)
            self.steps += 1
            last += accepted + 1
        self.tokens += length - start

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / max(self.steps, 1)


def leading_hits(hits: Tensor) -> Tensor:
    """How many entries before the first False of `hits [..., K]`: `[...]` int64."""
    return hits.long().cumprod(-1).sum(-1)


def add_batch(tally: Tally, leading: Tensor, starts: Tensor, lengths: Tensor) -> None:
    """Add rows of `leading [B, T]`, `starts [B]`, `lengths [B]`."""
    table = torch.cat([starts[:, None], lengths[:, None], leading], dim=1).tolist()
    for start, length, *row in table:
        tally.add(row, start, length)
