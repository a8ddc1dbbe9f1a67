"""Results of the target in steps without a draft, until the drafter observes them.

In such a step the drafter does not run. Hidden states and features of the committed tokens are stored in up to
`COLUMNS` columns per slot. Before a draft, and when the columns are full, the drafter observes all of them in one pass.
"""

from dataclasses import replace

import torch
from torch import Tensor

from algorithms.algorithm import Batch, Observation, Resources

COLUMNS = 32  # steps without a draft between two observations, at most


class DeferredObservation:
    """Tokens of each request that the drafter has not seen."""

    def __init__(self, num_features: int, resources: Resources) -> None:
        """`num_features` is the number of the algorithm's target layers."""
        self._width = resources.target.config.hidden_size
        shape = (resources.max_batch, COLUMNS, (1 + num_features) * self._width)
        self._kept = torch.zeros(shape, dtype=resources.dtype, device=resources.device)
        self._counts = torch.zeros(resources.max_batch, dtype=torch.int64, device=resources.device)
        self._columns = torch.arange(COLUMNS, device=resources.device)

    def keep(self, batch: Batch, hidden: Tensor, features: list[Tensor]) -> None:
        """Append the one token of each active slot; [B, 1, hidden] each."""
        counts, joined = self._counts[batch.slots], torch.cat([hidden, *features], -1)
        self._kept[batch.slots].scatter_(1, counts[:, None, None].expand(joined.shape), joined)
        counts += batch.active

    def take(self, batch: Batch) -> Observation:
        """All that is kept of the slots of `batch`; nothing is kept afterwards."""
        counts = self._counts[batch.slots].clone()
        self._counts[batch.slots].zero_()
        start = batch.lengths - counts
        positions = (start[:, None] + self._columns).clamp(max=batch.history.shape[1] - 2)
        hidden, *features = (part.contiguous() for part in self._kept[batch.slots].split(self._width, -1))
        return Observation(
            batch=replace(batch, lengths=start),
            tokens=batch.history.gather(1, positions),
            next_tokens=batch.history.gather(1, positions + 1),
            features=features,
            hidden=hidden,
            positions=positions,
            counts=counts.int(),
            drafts_stale=True,
        )

    def move(self, source: int, target: int) -> None:
        """Copy slot `source` over slot `target`."""
        for tensor in (self._kept, self._counts):
            tensor[target] = tensor[source]

    def clear(self, slots: int | slice) -> None:
        """Keep nothing of `slots`."""
        self._counts[slots].zero_()
