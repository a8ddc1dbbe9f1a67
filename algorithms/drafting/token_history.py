"""Token histories of a run's requests on the device: the engine writes them, drafters look up in them.

A drafter gets them in `bind`: `self._histories = TokenHistories.of(resources, num_kept)`. The engine writes every
committed token, keeps the histories of the latest `num_kept` ended requests, and empties the store in `reset`.
Drafters of a run with equal arguments share one store.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from algorithms.algorithm import Batch, Observation, Resources
from specdec_kernels import HistoryStore, insert_histories


class TokenHistories:
    """The histories of all batch slots, of the latest `num_kept` requests that have ended, and a corpus."""

    def __init__(self, resources: Resources, num_kept: int, corpus: Sequence[int]) -> None:
        slots = resources.max_batch + 1  # the last one is the dummy slot of padding
        self.arguments = num_kept, tuple(corpus)
        self.store = HistoryStore.create(slots, num_kept, resources.context, resources.device, corpus)
        self._slots = torch.arange(slots, device=resources.device)
        self._impl = resources.impl

    @classmethod
    def of(cls, resources: Resources, num_kept: int, corpus: Sequence[int] = ()) -> TokenHistories:
        """The run's histories, with the tokens of `corpus` from the beginning; ValueError if they are too many."""
        for histories in resources.histories:
            if histories.arguments == (num_kept, tuple(corpus)):
                return histories
        resources.histories.append(cls(resources, num_kept, corpus))
        return resources.histories[-1]

    def slots(self, batch: Batch) -> Tensor:
        """[B] int64: the slots of `batch`, as `match_histories` takes them."""
        return self._slots[batch.slots]

    def begin(self, history: Tensor, length: int) -> None:
        """Write `length` tokens of new requests into the first slots, one for each row of `history`."""
        slots = self._slots[: len(history)]
        start, counts = torch.zeros_like(slots), torch.full_like(slots, length, dtype=torch.int32)
        insert_histories(self.store, history, slots, start, counts, length, impl=self._impl)

    def observe(self, seen: Observation) -> None:
        """Write the committed tokens, and the last token after them."""
        batch, width, prompts = seen.batch, seen.tokens.shape[1], seen.prompts
        history, slots, start, counts = batch.history, self._slots[batch.slots], batch.lengths, seen.counts
        if prompts is not None:
            history, slots, start, counts = history[prompts.last // width], prompts.slots, prompts.start, prompts.counts
            width = prompts.width
        insert_histories(self.store, history, slots, start, counts, width, impl=self._impl)
