"""Results of steps on their way to the host. Each is read a fixed number of steps after the step that wrote it.

Reading waits for that step alone, through an event, while the next one already runs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

Tag = TypeVar("Tag")


class RowResult(NamedTuple):
    """What one step says about one request."""

    tokens: list[int]
    """Emitted: the accepted drafts and the bonus token."""
    logprobs: list[float]
    valid: bool
    """Whether the target gave a usable logit for the bonus token, which has no meaning otherwise."""
    num_drafted: int
    ran_out: bool
    """Whether the accepted path ends where nothing was drafted."""
    top: list[list[tuple[int, float]]]
    """The likeliest tokens in the place of each, with their log-probabilities; empty where no step reports them."""

    def without_bonus(self) -> RowResult:
        """The accepted drafts alone."""
        return self._replace(tokens=self.tokens[:-1], logprobs=self.logprobs[:-1], top=self.top[:-1])


@dataclass(frozen=True)
class StepResult:
    """One step's table on the host, see `Step.table`: a list per request."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    figures: list[list[int]]
    top_tokens: list[list[list[int]]]
    top_logprobs: list[list[list[float]]]

    @classmethod
    def of_table(cls, table: np.ndarray[Any, Any], num_top: int = 0) -> StepResult:
        """Of `table [rows, 2 (D + 1) + 4 + 2 (D + 1) n]` int64 with `num_top` = n."""
        emit = (table.shape[1] - 4) // (2 * (1 + num_top))
        tokens, logprobs, figures, top = np.split(table, [emit, 2 * emit, 2 * emit + 4], axis=1)
        top = top.reshape(len(table), 2, emit, -1) if top.shape[1] else np.zeros((len(table), 2, 0, 0), np.int64)
        return cls(
            tokens.tolist(),
            _floats(logprobs).tolist(),
            figures.tolist(),
            top[:, 0].tolist(),
            _floats(top[:, 1]).tolist(),
        )

    def of(self, row: int) -> RowResult:
        """What the step says about the request in `row`."""
        num_accepted, valid, num_drafted, ran_out = self.figures[row]
        emitted = num_accepted + 1
        tokens, logprobs = self.tokens[row][:emitted], self.logprobs[row][:emitted]
        both = zip(self.top_tokens[row][:emitted], self.top_logprobs[row][:emitted], strict=True)
        top = [list(zip(ids, values, strict=True)) for ids, values in both]
        return RowResult(tokens, logprobs, bool(valid), num_drafted, bool(ran_out), top)


def _floats(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Float32 numbers whose bits stand in int64."""
    return bits.astype(np.int32).view(np.float32)


class Readback(Generic[Tag]):
    """First in, first out; `behind` results stay in flight. Buffers are reused, so a result is read once."""

    def __init__(self, behind: int, max_batch: int, max_depth: int, device: torch.device, num_top: int = 0) -> None:
        """`num_top` likeliest tokens of each emitted one are part of the tables, whose D is at most `max_depth`."""
        cuda, size = device.type == "cuda", max_batch * (2 * (max_depth + 1) * (1 + num_top) + 4)
        self._behind, self._num_top = behind, num_top
        self._buffers = [torch.empty(size, dtype=torch.int64, pin_memory=cuda) for _ in range(behind + 1)]
        self._choices = [torch.empty(2, dtype=torch.int32, pin_memory=cuda) for _ in range(behind + 1)]
        self._events = [torch.cuda.Event() for _ in self._buffers] if cuda else []
        self._next = 0
        self._pending: deque[tuple[int, torch.Size, bool, Tag]] = deque()
        self.choice: tuple[int, int] | None = None
        """The latest choice of a size that was read; None before the first."""
        self.waited_ms = 0.0
        """Time that the host has waited for steps."""

    @property
    def num_pending(self) -> int:
        """Results in flight."""
        return len(self._pending)

    def push(self, table: Tensor, tag: Tag, choice: Tensor | None = None) -> None:
        """Start copying `table [rows, 2 (D + 1) (1 + num_top) + 4]` to the host, and with it the `choice` [2] int32 of
        a size."""
        place = self._next
        self._next = (place + 1) % len(self._buffers)
        self._buffers[place][: table.numel()].view(table.shape).copy_(table, non_blocking=True)
        if choice is not None:
            self._choices[place].copy_(choice, non_blocking=True)
        if self._events:
            self._events[place].record()
        self._pending.append((place, table.shape, choice is not None, tag))

    def in_flight(self) -> Iterator[tuple[StepResult, Tag]]:
        """What is in flight, oldest first, which stays there; waits for it."""
        for place, shape, _, tag in self._pending:
            yield self._read(place, shape), tag

    def _read(self, place: int, shape: torch.Size) -> StepResult:
        began = time.perf_counter()
        if self._events:
            self._events[place].synchronize()
        self.waited_ms += (time.perf_counter() - began) * 1e3
        return StepResult.of_table(self._buffers[place][: shape.numel()].view(shape).numpy(), self._num_top)

    def due(self, all_of_them: bool = False) -> Iterator[tuple[StepResult, Tag]]:
        """Results that are due, oldest first; or whatever is in flight."""
        while len(self._pending) > (0 if all_of_them else self._behind):
            place, shape, chosen, tag = self._pending.popleft()
            result = self._read(place, shape)
            if chosen:
                self.choice = (int(self._choices[place][0]), int(self._choices[place][1]))
            yield result, tag

    def drop(self) -> None:
        """Forget what is in flight."""
        self._pending.clear()
