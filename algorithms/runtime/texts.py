"""The texts of a run's requests on the device: written here, read by drafters that look up what was written before.

A drafter asks for them in `attach`: `self._texts = Texts.of(resources, kept)`. From then on the engine writes every
committed token of prompts and answers into the text of its request, keeps the texts of as many requests that have
ended, however they ended, and empties the store in `forget`. Drafters of a run that ask for the same texts read one
store.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from algorithms.runtime.algorithm import Batch, Observation, Resources
from specdec_kernels import TextStore, insert_texts


class Texts:
    """The texts of all rows, of the latest `kept` requests that have ended, and of a corpus."""

    def __init__(self, resources: Resources, kept: int, corpus: Sequence[int]) -> None:
        rows = resources.max_batch + 1  # prompts that are padding name the row behind the last
        self.wanted = kept, tuple(corpus)
        self.store = TextStore.create(rows, kept, resources.context, resources.device, corpus)
        self._rows = torch.arange(rows, device=resources.device)
        self._impl = resources.impl

    @classmethod
    def of(cls, resources: Resources, kept: int, corpus: Sequence[int] = ()) -> Texts:
        """The run's texts with `kept` ended requests, and with the tokens of `corpus` from the beginning. Raises
        ValueError if they are too many."""
        for texts in resources.texts:
            if texts.wanted == (kept, tuple(corpus)):
                return texts
        resources.texts.append(cls(resources, kept, corpus))
        return resources.texts[-1]

    def rows(self, batch: Batch) -> Tensor:
        """[B] int64: the rows of `batch`, as matching asks for them."""
        return self._rows[batch.rows]

    def begin(self, history: Tensor, length: int) -> None:
        """Write `length` tokens of new requests in the first rows, one for each row of `history`."""
        rows = self._rows[: len(history)]
        start, counts = torch.zeros_like(rows), torch.full_like(rows, length, dtype=torch.int32)
        insert_texts(self.store, history, rows, start, counts, length, impl=self._impl)

    def observe(self, seen: Observation) -> None:
        """Write the committed tokens, and the last token behind them."""
        batch, width, prompts = seen.batch, seen.tokens.shape[1], seen.prompts
        text, rows, start, counts = batch.history, self._rows[batch.rows], batch.lengths, seen.counts
        if prompts is not None:
            text, rows, start, counts = text[prompts.last // width], prompts.rows, prompts.start, prompts.counts
            width = prompts.width
        insert_texts(self.store, text, rows, start, counts, width, impl=self._impl)
