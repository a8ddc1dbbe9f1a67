"""The store of texts, and the drafts that matching returns."""

from __future__ import annotations

from typing import NamedTuple

import torch

MAX_CONTEXT, MAX_WINDOW, MAX_STAMP = 1 << 24, 63, (1 << 32) - 1
MAX_TEXTS = 512
"""Bounds of the fields of a match's rank, and of what one program compares."""
WEIGHT_STEPS = 8
"""A match shorter than the longest by more than this has no weight."""
CONFIDENCE_STEPS = 1024
"""Confidence is rounded down to this part of a vote."""


class SuffixDraft(NamedTuple):
    """Draft trees of a batch: node 0 is the last token; unused nodes have parent -2 and must never be linked."""

    tokens: torch.Tensor
    """[B, N] int64; 0 at unused nodes."""
    parents: torch.Tensor
    """[B, N] int32."""
    strength: torch.Tensor
    """[B] float32: the sum of the confidence of all drafts."""
    confidence: torch.Tensor
    """[B, N] float32: how likely the path to each draft is taken to be; 1 at node 0, 0 at unused nodes."""


class SuffixStore(NamedTuple):
    """Texts of requests. A row of the engine writes into one text; texts without a row are kept until they are the
    oldest and room is needed."""

    tokens: torch.Tensor
    """[S, context] int32."""
    lengths: torch.Tensor
    """[S] int32: tokens held."""
    stamps: torch.Tensor
    """[S] int64: running number of the request, 0 for no text."""
    owners: torch.Tensor
    """[S] int32: the row that writes into the text, or -1."""
    slots: torch.Tensor
    """[R] int32: the text of each row, or -1."""
    clock: torch.Tensor
    """[1] int64: requests so far."""

    @classmethod
    def create(cls, rows: int, texts: int, context: int, device: torch.device | str) -> SuffixStore:
        """An empty store for `rows` running requests of up to `context` tokens, and `texts` that have ended.

        Raises ValueError for sizes out of range.
        """
        if rows < 1 or texts < 0 or rows + texts > MAX_TEXTS:
            raise ValueError(f"rows + texts: expected 1 to {MAX_TEXTS} together, got {rows} and {texts}")
        if not 1 <= context < MAX_CONTEXT:
            raise ValueError(f"context: expected 1 to {MAX_CONTEXT - 1}, got {context}")
        size = rows + texts
        return cls(
            torch.zeros(size, context, dtype=torch.int32, device=device),
            torch.zeros(size, dtype=torch.int32, device=device),
            torch.zeros(size, dtype=torch.int64, device=device),
            torch.full((size,), -1, dtype=torch.int32, device=device),
            torch.full((rows,), -1, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
        )

    def clear(self) -> None:
        """Forget every text, in place."""
        for tensor in (self.lengths, self.stamps, self.clock):
            tensor.zero_()
        self.owners.fill_(-1)
        self.slots.fill_(-1)

    def move_row(self, source: int, target: int) -> None:
        """The request of row `source` now lives in row `target`; the text of `target` is an ended one."""
        rows = torch.arange(len(self.slots), device=self.slots.device)
        moved = self.slots[source].clone()
        own = torch.arange(len(self.owners), device=self.owners.device)
        self.owners.copy_(torch.where(own == self.slots[target], -1, self.owners))
        self.owners.copy_(torch.where(own == moved, torch.full_like(self.owners, target), self.owners))
        self.slots.copy_(torch.where(rows == target, moved, torch.where(rows == source, -1, self.slots)))
