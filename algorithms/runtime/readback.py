"""Results of steps on their way to the host. Each is read a fixed number of steps after the step that wrote it.

Reading waits for that step alone, through an event, while the next one already runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Tag = TypeVar("Tag")


@dataclass(frozen=True)
class StepResult:
    """One step's table on the host, see `Step.table`."""

    rows: list[list[int]]
    logprobs: list[list[float]]

    def of(self, row: int) -> tuple[list[int], list[float], bool]:
        """Emitted tokens, their log-probabilities, and whether the target gave a usable logit."""
        *_, num_accepted, valid = self.rows[row]
        emitted = num_accepted + 1
        return self.rows[row][:emitted], self.logprobs[row][:emitted], bool(valid)


class Readback(Generic[Tag]):
    """First in, first out; `behind` results stay in flight. Buffers are reused, so a result is read once."""

    def __init__(self, behind: int, max_batch: int, max_depth: int, device: torch.device) -> None:
        self._behind, self._emit, self._cuda = behind, max_depth + 1, device.type == "cuda"
        shape = (behind + 1, max_batch, 2 * self._emit + 2)
        self._buffers = torch.empty(shape, dtype=torch.int64, pin_memory=self._cuda)
        self._next = 0
        self._pending: deque[tuple[Tensor, Any, Tag]] = deque()

    @property
    def num_pending(self) -> int:
        """Results in flight."""
        return len(self._pending)

    def push(self, table: Tensor, tag: Tag) -> None:
        """Start copying `table [rows, 2 (D + 1) + 2]` to the host."""
        place = self._buffers[self._next, : table.shape[0]]
        self._next = (self._next + 1) % len(self._buffers)
        place.copy_(table, non_blocking=True)
        event = None
        if self._cuda:
            event = torch.cuda.Event()
            event.record()
        self._pending.append((place, event, tag))

    def due(self) -> Iterator[tuple[StepResult, Tag]]:
        """Results that are due, oldest first."""
        while len(self._pending) > self._behind:
            place, event, tag = self._pending.popleft()
            if event is not None:
                event.synchronize()
            bits = place[:, self._emit : 2 * self._emit].to(torch.int32)
            rows = torch.cat([place[:, : self._emit], place[:, 2 * self._emit :]], 1).tolist()
            yield StepResult(rows, bits.view(torch.float32).tolist()), tag

    def drop(self) -> None:
        """Forget what is in flight."""
        self._pending.clear()
