"""The running batch: device tensors of fixed address and shape, filled from the front.

The rows in use are always 0 … n - 1, so a step runs on views of the first n rows. When a request leaves, the last row
takes its place. Rows past n are inactive, and a step that is captured for more rows than are in use passes over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from algorithms.runtime.algorithm import Batch
from algorithms.runtime.request import Request


@dataclass(frozen=True)
class SamplingState:
    """Sampling parameters of each row, [B] each; neutral values switch a filter off."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor

    @classmethod
    def neutral(cls, rows: int, device: torch.device) -> SamplingState:
        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        return cls(
            temperature=full(0.0, torch.float32),
            top_k=full(0, torch.int32),
            top_p=full(1.0, torch.float32),
            min_p=full(0.0, torch.float32),
            seeds=full(0, torch.int64),
        )

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def rows(self, rows: slice) -> SamplingState:
        return SamplingState(*(tensor[rows] for tensor in self.tensors()))


class PenaltyState:
    """What penalties and logit bias need of each row; allocated when the first request asks for any of them."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        def full(value: float) -> Tensor:
            return torch.full((rows,), value, dtype=torch.float32, device=device)

        self.repetition, self.presence, self.frequency = full(1.0), full(0.0), full(0.0)
        self.output_counts = torch.zeros((rows, vocab), dtype=torch.int32, device=device)
        self.prompt_seen = torch.zeros((rows, vocab), dtype=torch.bool, device=device)
        self.bias = torch.zeros((rows, vocab), dtype=torch.float32, device=device)

    def tensors(self) -> list[Tensor]:
        return list(vars(self).values())

    def fill(self, row: int, request: Request) -> None:
        sampling = request.sampling
        self.repetition[row] = sampling.repetition_penalty
        self.presence[row] = sampling.presence_penalty
        self.frequency[row] = sampling.frequency_penalty
        for tensor in (self.output_counts, self.prompt_seen, self.bias):
            tensor[row] = 0
        self.prompt_seen[row, torch.tensor(request.prompt_ids, device=self.bias.device)] = True
        for token, bias in sampling.logit_bias.items():
            self.bias[row, token] = bias


class BatchState:
    """Per-request tensors for up to `max_batch` requests of up to `max_pages` pages and `context` positions."""

    def __init__(self, max_batch: int, max_pages: int, context: int, vocab: int, device: torch.device) -> None:
        self._device, self._vocab = device, vocab
        self.lengths = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.last_tokens = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.active = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self.page_table = torch.zeros((max_batch, max_pages), dtype=torch.int32, device=device)
        # One column more than positions: where a commit puts what it has no place for.
        self.history = torch.zeros((max_batch, context + 1), dtype=torch.int64, device=device)
        self.sampling = SamplingState.neutral(max_batch, device)
        self.penalties: PenaltyState | None = None

    @property
    def max_batch(self) -> int:
        return self.lengths.shape[0]

    def need_penalties(self) -> None:
        """Make room for penalties, unless there is."""
        if self.penalties is None:
            self.penalties = PenaltyState(self.max_batch, self._vocab, self._device)

    def fill(self, row: int, request: Request, pages: Sequence[int]) -> None:
        """Put a request into `row`; its last prompt token becomes the root."""
        prompt = torch.tensor(request.prompt_ids, dtype=torch.int64)
        self.lengths[row], self.last_tokens[row], self.active[row] = len(prompt) - 1, request.prompt_ids[-1], 1
        self.history[row, : len(prompt)] = prompt.to(self._device)
        # Entries past the request's pages are page 0: never read, but a valid address.
        self.page_table[row] = 0
        self.page_table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32).to(self._device)
        tensors, params = self.sampling, request.sampling
        tensors.temperature[row], tensors.seeds[row] = params.temperature, params.seed
        tensors.top_k[row], tensors.top_p[row], tensors.min_p[row] = params.top_k, params.top_p, params.min_p
        if self.penalties is not None:
            self.penalties.fill(row, request)

    def move(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`."""
        tensors = [self.lengths, self.last_tokens, self.page_table, self.history, *self.sampling.tensors()]
        for tensor in tensors + (self.penalties.tensors() if self.penalties else []):
            tensor[target] = tensor[source]

    def clear(self, row: int) -> None:
        """Make `row` padding."""
        self.active[row] = 0
        self.lengths[row] = 0

    def batch(self, start: int, stop: int, max_length: int) -> Batch:
        """Rows start … stop - 1 as views."""
        rows = slice(start, stop)
        return Batch(
            lengths=self.lengths[rows],
            last_tokens=self.last_tokens[rows],
            page_table=self.page_table[rows],
            history=self.history[rows],
            active=self.active[rows],
            sampling=self.sampling.rows(rows),
            rows=rows,
            max_length=max_length,
        )
