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

from algorithms.engine.request import Draft
from algorithms.parallel.heartbeat import wait_for

Tag = TypeVar("Tag")


class SlotResult(NamedTuple):
    """The result of one step for one request."""

    tokens: list[int]  # emitted: the accepted drafts and the bonus token
    logprobs: list[float]
    valid: bool  # whether the target gave a usable logit for the bonus token, which has no meaning otherwise
    num_drafted: int
    ran_out: bool  # whether the accepted path ends where nothing was drafted
    top: list[list[tuple[int, float]]]
    """The most likely tokens at the place of each, with their log-probabilities; empty where no step reports them."""

    def without_bonus(self) -> SlotResult:
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
    drafts: np.ndarray[Any, Any] | None = None  # [B, 4 N]: `Step.drafts`, where a request reports its drafts
    path: np.ndarray[Any, Any] | None = None
    """[B, D + 1]: accepted nodes, -1 after the last, where adaptive draft length needs them."""
    path_probs: np.ndarray[Any, Any] | None = None
    """[B, N] float32: `DraftTree.path_probs`, with `path`, where the drafter gives them."""

    @classmethod
    def of_table(
        cls, table: np.ndarray[Any, Any], num_top: int = 0, num_evidence: int = 0, num_drafts: int = 0
    ) -> StepResult:
        """Of `table [B, 2 (D + 1) (1 + num_top) + 4 + num_drafts + num_evidence]` int64."""
        end = table.shape[1] - num_evidence
        table, drafts, evidence = np.split(table, [end - num_drafts, end], axis=1)
        emit = (table.shape[1] - 4) // (2 * (1 + num_top))
        tokens, logprobs, figures, top = np.split(table, [emit, 2 * emit, 2 * emit + 4], axis=1)
        top = top.reshape(len(table), 2, emit, -1) if top.shape[1] else np.zeros((len(table), 2, 0, 0), np.int64)
        return cls(
            tokens.tolist(),
            _floats(logprobs).tolist(),
            figures.tolist(),
            top[:, 0].tolist(),
            _floats(top[:, 1]).tolist(),
            drafts=drafts.copy() if num_drafts else None,
            path=evidence[:, :emit].copy() if num_evidence else None,
            path_probs=_floats(evidence[:, emit:]) if num_evidence > emit else None,
        )

    def drafts_of(self, slot: int) -> list[Draft]:
        """The drafted tokens of the request in `slot`; empty where the step reports none."""
        if self.drafts is None:
            return []
        tokens, parents, *bits = self.drafts[slot].reshape(4, -1)
        logprobs, probs = (_floats(each).tolist() for each in bits)
        nodes = [node for node in range(1, len(tokens)) if parents[node] >= 0]
        place = {0: -1} | {node: index for index, node in enumerate(nodes)}
        on_path, path = {0}, 0
        for token in self.tokens[slot][: self.figures[slot][0]]:
            path = next(node for node in nodes if parents[node] == path and tokens[node] == token)
            on_path.add(path)
        return [
            Draft(
                int(tokens[node]),
                place[int(parents[node])],
                node in on_path,
                logprobs[node] if logprobs[node] > -np.inf else None,
                probs[node] if probs[node] >= 0 else None,
            )
            for node in nodes
        ]

    def of(self, slot: int) -> SlotResult:
        num_accepted, valid, num_drafted, ran_out = self.figures[slot]
        emitted = num_accepted + 1
        tokens, logprobs = self.tokens[slot][:emitted], self.logprobs[slot][:emitted]
        both = zip(self.top_tokens[slot][:emitted], self.top_logprobs[slot][:emitted], strict=True)
        top = [list(zip(ids, values, strict=True)) for ids, values in both]
        return SlotResult(tokens, logprobs, bool(valid), num_drafted, bool(ran_out), top)


def _floats(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Float32 numbers from their bits in int64."""
    return bits.astype(np.int32).view(np.float32)


class Readback(Generic[Tag]):
    """First in, first out; `num_in_flight` results stay in flight. Buffers are reused, so a result is read once."""

    def __init__(self, num_in_flight: int, size: int, device: torch.device, num_top: int = 0) -> None:
        """Tables have up to `size` entries. For `num_top` see `StepResult.of_table`."""
        cuda = device.type == "cuda"
        self._num_in_flight, self._num_top = num_in_flight, num_top
        self._buffers = [torch.empty(size, dtype=torch.int64, pin_memory=cuda) for _ in range(num_in_flight + 1)]
        self._events = [torch.cuda.Event() for _ in self._buffers] if cuda else []
        self._next = 0
        self._pending: deque[tuple[int, torch.Size, int, int, Tag]] = deque()
        self.waited_ms = 0.0
        """Time that the host has waited for steps."""

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def push(self, table: Tensor, tag: Tag, num_evidence: int = 0, num_drafts: int = 0) -> None:
        """Start copying `table` to the host, see `StepResult.of_table`."""
        place = self._next
        self._next = (place + 1) % len(self._buffers)
        self._buffers[place][: table.numel()].view(table.shape).copy_(table, non_blocking=True)
        if self._events:
            self._events[place].record()
        self._pending.append((place, table.shape, num_evidence, num_drafts, tag))

    def in_flight(self) -> Iterator[tuple[StepResult, Tag]]:
        """Results in flight, oldest first, which stay there; waits for them."""
        for place, shape, num_evidence, num_drafts, tag in self._pending:
            yield self._read(place, shape, num_evidence, num_drafts), tag

    def _read(self, place: int, shape: torch.Size, num_evidence: int, num_drafts: int) -> StepResult:
        began = time.perf_counter()
        if self._events:
            wait_for(self._events[place])
        self.waited_ms += (time.perf_counter() - began) * 1e3
        table = self._buffers[place][: shape.numel()].view(shape).numpy()
        return StepResult.of_table(table, self._num_top, num_evidence, num_drafts)

    def due(self, all_of_them: bool = False) -> Iterator[tuple[StepResult, Tag]]:
        """Results that are due, oldest first; or all in flight."""
        while len(self._pending) > (0 if all_of_them else self._num_in_flight):
            place, shape, num_evidence, num_drafts, tag = self._pending.popleft()
            yield self._read(place, shape, num_evidence, num_drafts), tag

    def drop(self) -> None:
        self._pending.clear()
