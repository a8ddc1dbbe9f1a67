"""The store of texts, and the drafts that matching returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specdec_kernels.checks import expect_between

MAX_CONTEXT, MAX_WINDOW, MAX_TEXTS, MAX_AGE = 1 << 24, 63, 1 << 16, (1 << 16) - 1
"""Bounds of the fields of a match's rank. Texts older than `MAX_AGE` requests count as equally old."""
ORDERS = ("latest", "frequent")
"""Orders of drafts, see `specdec_kernels.texts`."""
WEIGHT_STEPS = 8
"""A match shorter than the longest by more than this has no weight."""
FULL_SHARE = 1 << 16
"""The share of a draft without better siblings; that of the longest match where matches vote."""
MAX_SIBLINGS = 3
"""Better siblings that lower a share, at most."""
CONFIDENCE_STEPS = 1024
"""Confidence is rounded down to this part of a share."""
LEAST_STEPS = 1024
"""The least confidence is a multiple of one part in so many, so that kernel and definition agree exactly."""


class TextDraft(NamedTuple):
    """Draft trees of a batch: node 0 is the last token; unused nodes have parent -2 and must never be linked."""

    tokens: torch.Tensor
    """[B, N] int64; 0 at unused nodes."""
    parents: torch.Tensor
    """[B, N] int32; parents come before children."""
    strength: torch.Tensor
    """[B] float32: the sum of the confidence of all drafts."""
    confidence: torch.Tensor
    """[B, N] float32: how likely the path to each draft is taken to be; 1 at node 0, 0 at unused nodes."""


class TextStore(NamedTuple):
    """Texts of R rows, K texts that are kept without a row, and those of a corpus: S in all."""

    tokens: torch.Tensor
    """[S, context] int32."""
    lengths: torch.Tensor
    """[S] int32: tokens held."""
    stamps: torch.Tensor
    """[S] int64: running number of the request, 0 before the first one and for a corpus."""
    slots: torch.Tensor
    """[R] int32: the text of each row."""
    queue: torch.Tensor
    """[R + K] int32, a ring: the K kept texts from entry `clock` on, the oldest first; the other entries are stale."""
    clock: torch.Tensor
    """[1] int64: requests so far."""

    @classmethod
    def create(
        cls, rows: int, kept: int, context: int, device: torch.device | str, corpus: Sequence[int] = ()
    ) -> TextStore:
        """An empty store for `rows` requests of up to `context` tokens, and the texts of `kept` that have ended.

        The tokens of `corpus` are cut into texts of `context` tokens. Memory: 4 bytes a token. Raises ValueError for
        sizes out of range.
        """
        expect_between("context", context, 1, MAX_CONTEXT - 1)
        pieces = -(-len(corpus) // context)
        if rows < 1 or kept < 0 or rows + kept + pieces > MAX_TEXTS:
            given = f"{rows} rows, {kept} kept texts and {pieces} texts of a corpus"
            raise ValueError(f"texts: expected 1 or more rows and {MAX_TEXTS} texts in all at most, got {given}")
        size = rows + kept + pieces
        store = cls(
            torch.zeros(size, context, dtype=torch.int32, device=device),
            torch.zeros(size, dtype=torch.int32, device=device),
            torch.zeros(size, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.zeros(rows + kept, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
        )
        store.clear()
        if pieces:
            text = torch.tensor(corpus, dtype=torch.int32, device=device)
            store.tokens[rows + kept :].view(-1)[: len(corpus)] = text
            whole = torch.full((pieces,), context, dtype=torch.int32)
            whole[-1] = len(corpus) - (pieces - 1) * context
            store.lengths[rows + kept :] = whole.to(device)
        return store

    @property
    def num_kept(self) -> int:
        """K."""
        return len(self.queue) - len(self.slots)

    def clear(self) -> None:
        """Forget every text but those of the corpus, in place."""
        self.lengths[: len(self.queue)].zero_()
        self.stamps.zero_()
        self.clock.zero_()
        numbers = torch.arange(len(self.queue), dtype=torch.int32, device=self.slots.device)
        self.slots.copy_(numbers[: len(self.slots)])
        self.queue.copy_(numbers.roll(-len(self.slots)))

    def move_row(self, source: int, target: int) -> None:
        """The request of row `source` now lives in row `target`, whose text is that of an ended request."""
        moved = self.slots[source].clone()
        self.slots[source].copy_(self.slots[target])
        self.slots[target].copy_(moved)
