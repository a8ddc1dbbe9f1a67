"""The running batch on the device: tensors of fixed address and shape, one row per request.

The rows in use are always 0 … n - 1, so a step runs on views of the first n rows. Rows past n are inactive, and a step
that is captured for more rows than are in use passes over them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from algorithms.runtime.algorithm import Batch, Observation, Resources
from algorithms.runtime.request import Request
from specdec_kernels import SamplingTensors

_NEUTRAL = ((0.0, torch.float32), (0, torch.int32), (1.0, torch.float32), (0.0, torch.float32), (0, torch.int64))
"""Sampling parameters of padding, in the order of `SamplingTensors`: greedy, no filter."""
_ALIGNED = 16


def upload(columns: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Lists as int64 tensors on `device`, by one copy that the host does not wait for."""
    # Every list begins at a multiple of 128 bytes, so that kernels see one alignment.
    starts = [0]
    for column in columns:
        starts.append(starts[-1] + -(-len(column) // _ALIGNED) * _ALIGNED)
    packed = [0] * starts[-1]
    for start, column in zip(starts, columns, strict=False):
        packed[start : start + len(column)] = column
    host = torch.tensor(packed, dtype=torch.int64, pin_memory=device.type == "cuda")
    values = host.to(device, non_blocking=True)
    return [values[start : start + len(column)] for start, column in zip(starts, columns, strict=False)]


class PenaltyState:
    """What penalties and logit bias need of each row; allocated when the first request asks for any of them."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        def full(value: float) -> Tensor:
            return torch.full((rows,), value, dtype=torch.float32, device=device)

        self.repetition, self.presence, self.frequency = full(1.0), full(0.0), full(0.0)
        self.output_counts = torch.zeros((rows, vocab), dtype=torch.int32, device=device)
        self.prompt_seen = torch.zeros((rows, vocab), dtype=torch.bool, device=device)
        self.bias = torch.zeros((rows, vocab), dtype=torch.float32, device=device)

    def fill(self, row: int, request: Request) -> None:
        """Put a request into `row`."""
        sampling, (prompt,) = request.sampling, upload([request.prompt_ids], self.bias.device)
        self.repetition[row].fill_(sampling.repetition_penalty)
        self.presence[row].fill_(sampling.presence_penalty)
        self.frequency[row].fill_(sampling.frequency_penalty)
        for tensor in (self.output_counts, self.prompt_seen, self.bias):
            tensor[row].zero_()
        self.prompt_seen[row].index_fill_(0, prompt, True)
        for token, bias in sampling.logit_bias.items():
            self.bias[row, token].fill_(bias)


class BatchState:
    """Tensors for up to `max_batch` requests of up to `max_pages` pages and `context` positions; see `Batch`.

    Numbers enter by `fill_`: on a GPU, `tensor[row] = number` is a copy that the host waits for.
    """

    def __init__(self, max_batch: int, max_pages: int, context: int, vocab: int, device: torch.device) -> None:
        def full(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full((max_batch, *shape), value, dtype=dtype, device=device)

        self.max_batch, self._device, self._vocab = max_batch, device, vocab
        self.lengths, self.last_tokens = full(0, torch.int64), full(0, torch.int64)
        self.active = full(0, torch.int32)
        self.page_table = full(0, torch.int32, max_pages)
        self.history = full(0, torch.int64, context)
        self._sampling = [full(value, dtype) for value, dtype in _NEUTRAL]
        self.penalties: PenaltyState | None = None

    def need_penalties(self) -> None:
        """Make room for penalties, unless there is room already."""
        if self.penalties is None:
            self.penalties = PenaltyState(self.max_batch, self._vocab, self._device)

    def fill(self, row: int, request: Request, pages: Sequence[int]) -> None:
        """Put a request into `row`; its last prompt token becomes the last token of the row, which stays padding."""
        # Entries past the request's pages are page 0: never read, but a valid address.
        table = [*pages, *[0] * (self.page_table.shape[1] - len(pages))]
        prompt, table_row = upload([request.prompt_ids, table], self._device)
        self.last_tokens[row].fill_(request.prompt_ids[-1])
        self.history[row, : len(prompt)] = prompt
        self.page_table[row] = table_row
        params = request.sampling
        values = (params.temperature, params.top_k, params.top_p, params.min_p, params.seed)
        for tensor, value in zip(self._sampling, values, strict=True):
            tensor[row].fill_(value)
        if self.penalties is not None:
            self.penalties.fill(row, request)

    def activate(self, row: int, length: int) -> None:
        """Let steps run on `row`, whose prompt is in the cache but for its last token, at position `length`."""
        self.lengths[row].fill_(length)
        self.active[row].fill_(1)

    def move(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`; whether `target` is padding stays as it is."""
        tensors = [self.lengths, self.last_tokens, self.page_table, self.history, *self._sampling]
        for tensor in tensors + (list(vars(self.penalties).values()) if self.penalties else []):
            tensor[target] = tensor[source]

    def clear(self, rows: int | slice) -> None:
        """Make `rows` padding, which is greedy: a step draws and filters nothing for it."""
        self.active[rows].zero_()
        self.lengths[rows].zero_()
        for tensor, (value, _) in zip(self._sampling, _NEUTRAL, strict=True):
            tensor[rows].fill_(value)

    def batch(self, start: int, stop: int, max_length: int) -> Batch:
        """Rows start … stop - 1 as views."""
        rows = slice(start, stop)
        return Batch(
            lengths=self.lengths[rows],
            last_tokens=self.last_tokens[rows],
            page_table=self.page_table[rows],
            history=self.history[rows],
            active=self.active[rows],
            sampling=SamplingTensors(*(tensor[rows] for tensor in self._sampling)),
            rows=rows,
            max_length=max_length,
        )

    def tiles(self, rows: Tensor, lengths: Tensor, counts: Tensor, max_length: int) -> Batch:
        """Tiles of prompts as a batch: tile i is `counts[i]` tokens of row `rows[i]` from position `lengths[i]` on."""
        return Batch(
            lengths=lengths,
            last_tokens=self.last_tokens[rows],
            page_table=self.page_table[rows],
            history=self.history[rows],
            active=(counts > 0).to(torch.int32),
            sampling=SamplingTensors(*(tensor[rows] for tensor in self._sampling)),
            rows=rows,
            max_length=max_length,
        )


class RowStore:
    """What a drafter remembers of each running request between two steps: one vector per row, [max_batch, size]."""

    def __init__(self, size: int, resources: Resources) -> None:
        self._rows = torch.zeros((resources.max_batch, size), dtype=resources.dtype, device=resources.device)

    def rows(self, rows: slice | Tensor) -> Tensor:
        """[B, size]: the vectors of these rows."""
        return self._rows[rows]

    def keep_last(self, seen: Observation, values: Tensor) -> None:
        """Keep the entry of `values [B, n, size]` at each request's last observed position.

        A padding row keeps what it has. A prompt of one token, of which nothing is observed, starts from zeros.
        """
        if (prompts := seen.prompts) is not None:
            last = values.flatten(0, 1)[prompts.last]
            self._rows[prompts.rows] = torch.where((prompts.counts > 0)[:, None], last, 0.0)
            return
        counts = seen.counts.long()
        index = (counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, values.shape[-1])
        last = values.gather(1, index).squeeze(1)
        self._rows[seen.batch.rows] = torch.where((counts > 0)[:, None], last, self._rows[seen.batch.rows])

    def move(self, source: int, target: int) -> None:
        """Copy the vector of row `source` to row `target`."""
        self._rows[target] = self._rows[source]
