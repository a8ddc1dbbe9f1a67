"""The history store, and the drafts that matching returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.checks import expect_between

MAX_CONTEXT, MAX_NGRAM, MAX_HISTORIES, MAX_AGE = 1 << 24, 63, 1 << 16, (1 << 16) - 1
"""Bounds of the fields of a match's rank. Histories older than `MAX_AGE` requests count as equally old."""
ORDERS = ("latest", "frequent")  # orders of drafts, see `specdec_kernels.history`
MAX_SHORTFALL = 8  # a match shorter than the longest by more than this has no weight
FULL_SHARE = 1 << 16
"""The share of a draft without better siblings; the weight of the longest match where candidates vote."""
MAX_BETTER_SIBLINGS = 3  # better siblings that lower a share, at most
PROB_UNIT = 1024  # path probabilities are rounded down to this part of a share
MIN_PROB_UNIT = 1024
"""The least path probability is a multiple of this part of one, so that kernel and definition agree exactly."""


class MatchOptions(NamedTuple):
    """Settings of `match_histories`; `least` is the least path probability in parts of `MIN_PROB_UNIT`."""

    num_nodes: int
    order: str
    max_ngram: int
    max_candidates: int
    least: int
    shared: bool


class HistoryDraft(NamedTuple):
    """Draft trees of a batch: node 0 is the last token; unused nodes have parent -2 and must never be linked."""

    tokens: Tensor  # [B, N] int64; 0 at unused nodes
    parents: Tensor  # [B, N] int32; parents come before children
    expected_accepted: Tensor  # [B] float32: sum of the path probabilities of all drafts
    path_probs: Tensor  # [B, N] float32: estimate for the path to each node; 1 at node 0, 0 at unused nodes


class HistoryStore(NamedTuple):
    """Histories of R batch slots, of K finished requests, and of a corpus: H in all."""

    tokens: Tensor  # [H, context] int32
    lengths: Tensor  # [H] int32: tokens held
    stamps: Tensor  # [H] int64: running number of the request, 0 before the first one and for a corpus
    of_slot: Tensor  # [R] int32: history of each batch slot
    ring: Tensor  # [R + K] int32: the K kept histories from entry `clock` on, oldest first; the rest is stale
    clock: Tensor  # [1] int64: requests started so far

    @classmethod
    def create(
        cls, slots: int, kept: int, context: int, device: torch.device | str, corpus: Sequence[int] = ()
    ) -> HistoryStore:
        """An empty store for `slots` requests of up to `context` tokens and `kept` finished ones. The tokens of
        `corpus` are cut into histories of `context` tokens. Memory: 4 bytes a token. Raises ValueError for sizes out of
        range."""
        expect_between("context", context, 1, MAX_CONTEXT - 1)
        parts = -(-len(corpus) // context)
        size = slots + kept + parts
        if slots < 1 or kept < 0 or size > MAX_HISTORIES:
            given = f"{slots} slots, {kept} kept histories and {parts} of a corpus"
            raise ValueError(f"histories: expected 1 or more slots and {MAX_HISTORIES} histories at most, got {given}")
        store = cls(
            torch.zeros(size, context, dtype=torch.int32, device=device),
            torch.zeros(size, dtype=torch.int32, device=device),
            torch.zeros(size, dtype=torch.int64, device=device),
            torch.zeros(slots, dtype=torch.int32, device=device),
            torch.zeros(slots + kept, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
        )
        store.clear()
        if parts:
            words = torch.tensor(corpus, dtype=torch.int32, device=device)
            store.tokens[slots + kept :].view(-1)[: len(corpus)] = words
            store.lengths[slots + kept :] = context
            store.lengths[-1] = len(corpus) - (parts - 1) * context
        return store

    @property
    def num_kept(self) -> int:
        """K."""
        return len(self.ring) - len(self.of_slot)

    def clear(self) -> None:
        """Empty every history outside of the corpus, in place."""
        self.lengths[: len(self.ring)].zero_()
        self.stamps.zero_()
        self.clock.zero_()
        numbers = torch.arange(len(self.ring), dtype=torch.int32, device=self.of_slot.device)
        self.of_slot.copy_(numbers[: len(self.of_slot)])
        self.ring.copy_(numbers.roll(-len(self.of_slot)))

    def move_slot(self, source: int, target: int) -> None:
        """The request of batch slot `source` moves to `target`, which has the history of a finished request."""
        moved = self.of_slot[source].clone()
        self.of_slot[source].copy_(self.of_slot[target])
        self.of_slot[target].copy_(moved)
