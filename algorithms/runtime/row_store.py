"""What a drafter remembers of each running request between two steps: one vector a row of the engine's state."""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.runtime.algorithm import Observation, Resources


class RowStore:
    """[max_batch, size], at a fixed address."""

    def __init__(self, size: int, resources: Resources) -> None:
        self._rows = torch.zeros((resources.max_batch, size), dtype=resources.dtype, device=resources.device)

    def rows(self, rows: slice) -> Tensor:
        return self._rows[rows]

    def keep_last(self, seen: Observation, values: Tensor) -> None:
        """Keep the entry of `values [B, n, size]` at each row's last observed position.

        A padding row keeps what it has; a prompt of one token, of which nothing is observed, starts from zeros.
        """
        counts = seen.counts.long()
        index = (counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, values.shape[-1])
        last = values.gather(1, index).squeeze(1)
        kept = torch.zeros_like(last) if seen.is_prefill else self._rows[seen.rows]
        self._rows[seen.rows] = torch.where((counts > 0)[:, None], last, kept)

    def move(self, source: int, target: int) -> None:
        self._rows[target] = self._rows[source]
