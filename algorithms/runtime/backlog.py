"""What the target computed in steps without a draft, until the drafter observes it.

In such a step the drafter does not run at all, not even to observe. Hidden states and features of the committed tokens
are kept in up to `COLUMNS` columns per request. Before a draft, and when the columns are full, the drafter observes all
of them in one pass, whose cost is that of one step for as many tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from algorithms.runtime.algorithm import Batch, Observation, Resources

COLUMNS = 32
"""Steps without a draft between two observations, at most."""


class Backlog:
    """Tokens of each request that the drafter has not seen."""

    def __init__(self, num_features: int, resources: Resources) -> None:
        """`num_features` target layers are captured."""
        self._width = resources.target.config.hidden_size
        shape = (resources.max_batch, COLUMNS, (1 + num_features) * self._width)
        self._kept = torch.zeros(shape, dtype=resources.dtype, device=resources.device)
        self._counts = torch.zeros(resources.max_batch, dtype=torch.int64, device=resources.device)
        self._columns = torch.arange(COLUMNS, device=resources.device)

    def keep(self, batch: Batch, hidden: Tensor, features: list[Tensor]) -> None:
        """Put the one token of each active row behind the others; [B, 1, hidden] each."""
        counts, joined = self._counts[batch.rows], torch.cat([hidden, *features], -1)
        self._kept[batch.rows].scatter_(1, counts[:, None, None].expand(joined.shape), joined)
        counts += batch.active

    def take(self, batch: Batch) -> Observation:
        """All that is kept of the rows of `batch`; nothing is kept afterwards."""
        counts = self._counts[batch.rows].clone()
        self._counts[batch.rows].zero_()
        start = batch.lengths - counts
        positions = (start[:, None] + self._columns).clamp(max=batch.history.shape[1] - 2)
        hidden, *features = (part.contiguous() for part in self._kept[batch.rows].split(self._width, -1))
        return Observation(
            batch=replace(batch, lengths=start),
            tokens=batch.history.gather(1, positions),
            next_tokens=batch.history.gather(1, positions + 1),
            features=features,
            hidden=hidden,
            positions=positions,
            counts=counts.int(),
            altered=True,
        )

    def move(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`."""
        for tensor in (self._kept, self._counts):
            tensor[target] = tensor[source]

    def clear(self, rows: int | slice) -> None:
        """Keep nothing of `rows`."""
        self._counts[rows].zero_()
