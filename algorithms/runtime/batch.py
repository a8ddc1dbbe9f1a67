"""The running batch on the device: tensors of fixed address and shape, one row per request.

The rows in use are always 0 … n - 1, so a step runs on views of the first n rows. Rows past n are inactive, and a step
that is captured for more rows than are in use passes over them. Behind the rows of running requests there are
rows in which requests wait whose prompts are prefilled ahead, the spare row, which takes what padding writes, and the
blank row, which nothing writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from algorithms.runtime.algorithm import Batch, Observation, Resources
from algorithms.runtime.constraints import ConstraintState
from algorithms.runtime.request import Request
from algorithms.runtime.sampling_params import MAX_BAD_WORD, MAX_FORBIDDEN, SamplingNeeds, SamplingParams
from algorithms.runtime.staging import Arrays, Fields, Staging
from specdec_kernels import SamplingTensors, keep_last

_ALIGNED = 32
"""Rows are a multiple of this many, so that kernels see one alignment of every tensor."""
PRETENDED_TOKENS = 256
"""Committed tokens of a request that is pretended to time steps."""
_PRETENDED_KINDS = 32
"""How many different tokens these are: a token stands as often in its text as frequent ones do."""
_MOVES_AHEAD = 12
"""Moves that may be queued behind the steps in flight: a few for each."""
LENGTH, LAST_TOKEN, SEED = range(3)
"""Rows of the int64 numbers of requests."""
ACTIVE, TOP_K, TEMPERATURE, TOP_P, MIN_P = range(5)
"""Rows of the 32-bit numbers; the last three are float32 bits."""
_FIRST_FLOAT = TEMPERATURE
_NEUTRAL = SamplingParams()
"""Sampling parameters of padding: greedy, no filter."""


def write_numbers(arrays: Arrays, column: int, sampling: SamplingParams, length: int, last: int, active: bool) -> None:
    """Put the numbers of one request in `column` of what `number_fields` names."""
    longs, words = arrays["longs"], arrays["words"]
    longs[:, column] = length, last, sampling.seed
    words[:_FIRST_FLOAT, column] = active, sampling.top_k
    words[_FIRST_FLOAT:].view(np.float32)[:, column] = sampling.temperature, sampling.top_p, sampling.min_p


def number_fields(count: int) -> Fields:
    """What `BatchState.enter` takes of `count` requests, besides pages and text."""
    return {"longs": ((3, count), torch.int64), "words": ((5, count), torch.int32)}


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
        """Put a request into `row`. Numbers enter by `fill_`: `tensor[row] = number` is a copy that the host waits
        for."""
        sampling, device = request.sampling, self.bias.device
        prompt = torch.tensor(request.prompt_ids, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        self.repetition[row].fill_(sampling.repetition_penalty)
        self.presence[row].fill_(sampling.presence_penalty)
        self.frequency[row].fill_(sampling.frequency_penalty)
        for tensor in (self.output_counts, self.prompt_seen, self.bias):
            tensor[row].zero_()
        self.prompt_seen[row].index_fill_(0, prompt, True)
        for token, bias in sampling.logit_bias.items():
            self.bias[row, token].fill_(bias)


class ForbiddenState:
    """The token sequences that each row must not write, see `specdec_kernels.forbid_tokens`; allocated when the first
    request has any."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.words = torch.full((rows, MAX_FORBIDDEN, MAX_BAD_WORD), -1, dtype=torch.int64, device=device)
        self.until = torch.zeros((rows, MAX_FORBIDDEN), dtype=torch.int64, device=device)

    def fill(self, row: int, request: Request) -> None:
        """Put a request into `row`: its sequences end in the last column."""
        pinned = self.words.is_cuda
        words = torch.full(self.words.shape[1:], -1, dtype=torch.int64, pin_memory=pinned)
        until = torch.zeros(self.until.shape[1:], dtype=torch.int64, pin_memory=pinned)
        for place, (word, allowed) in enumerate(request.forbidden):
            words[place, MAX_BAD_WORD - len(word) :] = torch.tensor(word)
            until[place] = allowed
        self.words[row].copy_(words, non_blocking=True)
        self.until[row].copy_(until, non_blocking=True)

    def clear(self, rows: slice) -> None:
        """Let `rows` forbid nothing."""
        self.words[rows].fill_(-1)


class BatchState:
    """Tensors for up to `max_batch` running requests and `ahead` waiting ones, of up to `max_pages` pages and `context`
    positions; see `Batch`.

    Numbers of one width lie in one tensor, so that a request enters, moves and leaves in a few operations.
    """

    def __init__(
        self, max_batch: int, ahead: int, max_pages: int, context: int, vocab: int, device: torch.device
    ) -> None:
        self.max_batch, self.spare_row, self._device, self._vocab = max_batch, max_batch + ahead, device, vocab
        self._num_rows = self.spare_row + 2
        rows = -(-self._num_rows // _ALIGNED) * _ALIGNED
        self._longs = torch.zeros((3, rows), dtype=torch.int64, device=device)
        self._words = torch.zeros((5, rows), dtype=torch.int32, device=device)
        self._pages = torch.zeros((self._num_rows, max_pages), dtype=torch.int32, device=device)
        self._texts = torch.zeros((self._num_rows, context), dtype=torch.int64, device=device)
        self._moves = Staging({"rows": ((2, self._num_rows), torch.int64)}, device, _MOVES_AHEAD)
        self._padding = torch.zeros_like(self._words)
        host = np.zeros((5, 1), np.int32)
        write_numbers({"longs": np.zeros((3, 1), np.int64), "words": host}, 0, _NEUTRAL, 0, 0, False)
        self._padding.copy_(torch.from_numpy(host))
        self._words.copy_(self._padding)
        self.page_table, self.history = self._pages[:max_batch], self._texts[:max_batch]
        self.lengths, self.last_tokens = self._longs[LENGTH, :max_batch], self._longs[LAST_TOKEN, :max_batch]
        self.active = self._words[ACTIVE, :max_batch]
        self.penalties: PenaltyState | None = None
        self.forbidden: ForbiddenState | None = None
        self.constraints: ConstraintState | None = None

    def make_room(self, needs: SamplingNeeds, num_nodes: int, max_depth: int) -> None:
        """Allocate what `needs` ask of each row, and of each of the `num_nodes` nodes in `max_depth` levels of its
        draft, unless it is there already."""
        if needs.penalised and self.penalties is None:
            self.penalties = PenaltyState(self._num_rows, self._vocab, self._device)
        if needs.forbids and self.forbidden is None:
            self.forbidden = ForbiddenState(self._num_rows, self._device)
        if needs.constrained and self.constraints is None:
            self.constraints = ConstraintState(self.max_batch, num_nodes, max_depth, self._vocab, self._device)

    def fill(self, row: int, request: Request, needs: SamplingNeeds) -> None:
        """Put what steps made for `needs` read of a request into `row`; there is room for it."""
        if needs.penalised:
            assert self.penalties is not None
            self.penalties.fill(row, request)
        if needs.forbids:
            assert self.forbidden is not None
            self.forbidden.fill(row, request)

    def enter(self, rows: Tensor, values: Mapping[str, Tensor]) -> None:
        """Put the numbers and pages of requests into `rows` [P] int64, entries of padding into the spare row.

        `values` holds what `number_fields(P)` names, and `pages` [P, max_pages] int32: the entries past the pages of a
        request are any pages.
        """
        self._longs.index_copy_(1, rows, values["longs"])
        self._words.index_copy_(1, rows, values["words"])
        self._pages.index_copy_(0, rows, values["pages"])

    def activate(self, rows: Tensor, complete: Tensor) -> None:
        """Let requests in `rows` [P] int64 take part in steps where `complete` [P] int32 is 1; the others are
        padding."""
        self._words[ACTIVE].index_copy_(0, rows, complete)

    def write_text(self, rows: Tensor, positions: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Put the first `counts` [S] int32 columns of `tokens` [S, n] int64 at `positions` [S, n] int64 of `rows` [S]
        int64."""
        inside = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
        self._texts[torch.where(inside, rows[:, None], self.spare_row), positions] = tokens

    def rearrange(self, moves: Sequence[tuple[int, int]]) -> None:
        """Move row `source` to row `target`, for each (source, target) in turn, and make `source` padding; where the
        two are equal, that is all. However many moves there are, they are a few operations."""
        origin = list(range(self._num_rows))
        for source, target in moves:
            origin[target] = origin[source]
            origin[source] = self._num_rows - 1
        changed = [row for row, source in enumerate(origin) if source != row]
        self._moves.arrays()["rows"][:, : len(changed)] = changed, [origin[row] for row in changed]
        self._moves.send()
        targets, sources = self._moves.tensors["rows"][:, : len(changed)]
        held = [tensor for state in (self.penalties, self.forbidden) if state for tensor in vars(state).values()]
        for tensor, dim in (
            (self._longs, 1),
            (self._words, 1),
            *((each, 0) for each in (self._pages, self._texts, *held)),
        ):
            tensor.index_copy_(dim, targets, tensor.index_select(dim, sources))

    def pretended_length(self, longest: int) -> int:
        """Tokens of a pretended request: what is typical of a context of `longest` positions."""
        return min(PRETENDED_TOKENS, longest // 2)

    def pretend(self, num_rows: int, length: int, num_pages: int, generator: torch.Generator) -> None:
        """Let rows 0 … num_rows - 1 hold requests of `length` tokens drawn by `generator` (of the CPU), each with pages
        of its own while `num_pages` are enough, to time steps before there are requests. `reset` ends that."""
        text = torch.randint(_PRETENDED_KINDS, (num_rows, length + 1), generator=generator).to(self._device)
        self._texts[:num_rows, : length + 1] = text
        self.last_tokens[:num_rows] = text[:, length]
        pages = torch.arange(self._pages[:num_rows].numel(), dtype=torch.int32, device=self._device) % num_pages
        self._pages[:num_rows] = pages.view_as(self._pages[:num_rows])
        self.lengths[:num_rows].fill_(length)
        self.active[:num_rows].fill_(1)

    def reset(self) -> None:
        """No request, and no trace of one."""
        self.clear(slice(None))
        for tensor in (self._pages, self._texts):
            tensor.zero_()

    def clear(self, rows: slice) -> None:
        """Make `rows` padding, which is greedy: a step draws and filters nothing for it."""
        self._words[:, rows] = self._padding[:, rows]
        self._longs[:, rows].zero_()
        if self.forbidden is not None:
            self.forbidden.clear(rows)

    def batch(self, start: int, stop: int, max_length: int) -> Batch:
        """Rows start … stop - 1 as views."""
        rows = slice(start, stop)
        return Batch(
            lengths=self.lengths[rows],
            last_tokens=self.last_tokens[rows],
            page_table=self.page_table[rows],
            history=self.history[rows],
            active=self.active[rows],
            sampling=_sampling(self._longs[:, rows], self._words[:, rows]),
            rows=rows,
            max_length=max_length,
        )

    def tiles(self, rows: Tensor, lengths: Tensor, counts: Tensor, max_length: int) -> Batch:
        """Tiles of prompts as a batch: tile i is `counts[i]` tokens of row `rows[i]` from position `lengths[i]` on."""
        longs, words = self._longs[:, rows], self._words[:, rows]
        return Batch(
            lengths=lengths,
            last_tokens=longs[LAST_TOKEN],
            page_table=self._pages[rows],
            history=self._texts[rows],
            active=(counts > 0).to(torch.int32),
            sampling=_sampling(longs, words),
            rows=rows,
            max_length=max_length,
        )


def _sampling(longs: Tensor, words: Tensor) -> SamplingTensors:
    """Sampling parameters of the columns of the numbers."""
    temperature, top_p, min_p = words[_FIRST_FLOAT:].view(torch.float32).unbind(0)
    return SamplingTensors(temperature, words[TOP_K], top_p, min_p, longs[SEED])


class RowStore:
    """What a drafter remembers of each running request between two steps: one vector per row, [max_batch + 1, size];
    the last one is the spare row."""

    def __init__(self, size: int, resources: Resources) -> None:
        self._rows = torch.zeros((resources.max_batch + 1, size), dtype=resources.dtype, device=resources.device)
        self._impl = resources.impl

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
        keep_last(self._rows[seen.batch.rows], values.contiguous(), seen.counts, impl=self._impl)

    def move(self, source: int, target: int) -> None:
        """Copy the vector of row `source` to row `target`."""
        self._rows[target] = self._rows[source]
