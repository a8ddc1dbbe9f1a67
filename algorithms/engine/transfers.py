"""What the host sends to the device, and the results of steps on their way back.

Sent arrays are named, of fixed shape, and go in one copy from pinned memory. The device's tensors keep their addresses,
so work on them can be captured in a CUDA graph. The host waits for a copy only where it is several ahead of the device.
A result is read a fixed number of steps after the step that wrote it: reading waits for that step alone.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from algorithms.engine.request import Draft, SlotResult
from algorithms.parallel.heartbeat import wait_for

NUM_BUFFERS = 3  # a copy is queued after the steps in flight, which are fewer than this
_ALIGNED_BYTES = 128

Fields = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # name to shape and dtype
Arrays = dict[str, "np.ndarray[Any, Any]"]


class Staging:
    """Device tensors of `fields` in one allocation, and host buffers of the same layout."""

    def __init__(self, fields: Fields, device: torch.device, num_buffers: int = NUM_BUFFERS) -> None:
        """`num_buffers` is how many sends the host may be ahead of the device."""
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in fields.items()}
        # Every field begins at one alignment, so that kernels are compiled for one.
        rooms = [-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES for size in sizes.values()]

        def views(memory: Tensor) -> dict[str, Tensor]:
            parts = zip(fields.items(), memory.split(rooms), strict=True)
            return {name: part[: sizes[name]].view(dtype).view(shape) for (name, (shape, dtype)), part in parts}

        self._cuda = device.type == "cuda"
        self._memory = torch.zeros(sum(rooms), dtype=torch.uint8, device=device)
        self._hosts = [torch.zeros(sum(rooms), dtype=torch.uint8, pin_memory=self._cuda) for _ in range(num_buffers)]
        self._arrays: list[Arrays] = [
            {name: part.numpy() for name, part in views(host).items()} for host in self._hosts
        ]
        self._copied = [torch.cuda.Event() for _ in self._hosts] if self._cuda else []
        self._next = 0
        self.tensors = views(self._memory)
        """The arrays of the last `send`, by name."""

    def arrays(self) -> Arrays:
        """The buffer that the next `send` copies, to be written to; it holds what was sent from it last."""
        if self._cuda:
            self._copied[self._next].synchronize()
        return self._arrays[self._next]

    def send(self) -> None:
        """Copy the buffer to the device, after the work that is queued there."""
        self._memory.copy_(self._hosts[self._next], non_blocking=True)
        if self._cuda:
            self._copied[self._next].record()
        self._next = (self._next + 1) % len(self._hosts)


Tag = TypeVar("Tag")


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
    def of_table(cls, table: np.ndarray[Any, Any], widths: Mapping[str, int]) -> StepResult:
        """Of `Step.table` and `Step.widths`."""
        ends = accumulate(widths.values(), initial=table.shape[1] - sum(widths.values()))
        table, *further, _ = np.split(table, list(ends), axis=1)
        found = {name: columns.copy() for name, columns in zip(widths, further, strict=True)}
        emit = (table.shape[1] - 4) // 2
        tokens, logprobs, figures = np.split(table, [emit, 2 * emit], axis=1)
        no_top = np.zeros((len(table), 2, 0, 0), np.int64)
        top = found["top"].reshape(len(table), 2, emit, -1) if "top" in found else no_top
        return cls(
            tokens.tolist(),
            _floats(logprobs).tolist(),
            figures.tolist(),
            top[:, 0].tolist(),
            _floats(top[:, 1]).tolist(),
            drafts=found.get("drafts"),
            path=found.get("path"),
            path_probs=_floats(found["path_probs"]) if "path_probs" in found else None,
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

    def __init__(self, num_in_flight: int, size: int, device: torch.device) -> None:
        """Tables have up to `size` entries."""
        cuda = device.type == "cuda"
        self._num_in_flight = num_in_flight
        self._buffers = [torch.empty(size, dtype=torch.int64, pin_memory=cuda) for _ in range(num_in_flight + 1)]
        self._events = [torch.cuda.Event() for _ in self._buffers] if cuda else []
        self._next = 0
        self._pending: deque[tuple[int, Tensor, Mapping[str, int], Tag]] = deque()
        self.waited_ms = 0.0
        """Time that the host has waited for steps."""

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def push(self, table: Tensor, widths: Mapping[str, int], tag: Tag) -> None:
        """Start copying `table` to the host, see `StepResult.of_table`."""
        place = self._next
        self._next = (place + 1) % len(self._buffers)
        held = self._buffers[place][: table.numel()].view(table.shape)
        held.copy_(table, non_blocking=True)
        if self._events:
            self._events[place].record()
        self._pending.append((place, held, widths, tag))

    def in_flight(self) -> Iterator[tuple[StepResult, Tag]]:
        """Results in flight, oldest first, which stay there; waits for them."""
        return map(self._read, self._pending)

    def _read(self, pending: tuple[int, Tensor, Mapping[str, int], Tag]) -> tuple[StepResult, Tag]:
        place, held, widths, tag = pending
        began = time.perf_counter()
        if self._events:
            wait_for(self._events[place])
        self.waited_ms += (time.perf_counter() - began) * 1e3
        return StepResult.of_table(held.numpy(), widths), tag

    def due(self, all_of_them: bool = False) -> Iterator[tuple[StepResult, Tag]]:
        """Results that are due, oldest first; or all in flight."""
        while len(self._pending) > (0 if all_of_them else self._num_in_flight):
            yield self._read(self._pending.popleft())

    def drop(self) -> None:
        self._pending.clear()
