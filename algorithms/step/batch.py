"""The running batch on the device: tensors of fixed address and shape, one slot per request.

Slots 0 to n - 1 are in use, so a step runs on views of the first n. A step that is captured for more slots passes over
the padding, whose `active` is 0. After the slots of running requests come the slots of requests whose prompts are
prefilled ahead, the dummy slot, where padding writes, and the blank slot, where nothing writes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from algorithms.algorithm import Batch, Observation, Resources
from algorithms.engine.request import Request
from algorithms.engine.transfers import Arrays, Fields, Staging
from algorithms.step.constraints import ConstraintState
from algorithms.step.sampling_params import MAX_BAD_WORD, MAX_FORBIDDEN, SamplingNeeds, SamplingParams
from specdec_kernels import SamplingTensors, apply_penalties, keep_last

_ALIGNED = 32  # slots are allocated in multiples of this, so that kernels see one alignment of every tensor
_DUMMY_KINDS = 32
"""Number of distinct random tokens, each of which then occurs as often as frequent tokens of real prompts."""
_MOVES_AHEAD = 12  # moves that may be queued during the steps in flight: a few for each
LENGTH, LAST_TOKEN, SEED = range(3)  # fields of the int64 numbers of requests
ACTIVE, TOP_K, TEMPERATURE, TOP_P, MIN_P = range(5)  # fields of the 32-bit numbers; the last three are float32 bits
_FIRST_FLOAT = TEMPERATURE


def write_numbers(arrays: Arrays, column: int, sampling: SamplingParams, length: int, last: int) -> None:
    """Put the numbers of one request, which is not active yet, in `column` of what `number_fields` names."""
    longs, words = arrays["longs"], arrays["words"]
    longs[:, column] = length, last, sampling.seed
    words[:_FIRST_FLOAT, column] = 0, sampling.top_k
    words[_FIRST_FLOAT:].view(np.float32)[:, column] = sampling.temperature, sampling.top_p, sampling.min_p


def number_fields(count: int) -> Fields:
    """Fields of `count` requests for `BatchState.enter`, besides pages and tokens."""
    return {"longs": ((3, count), torch.int64), "words": ((5, count), torch.int32)}


class PenaltyState:
    """State of penalties and logit bias for each slot; allocated with the first request that has any."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        def full(value: float) -> Tensor:
            return torch.full((slots,), value, dtype=torch.float32, device=device)

        self.repetition, self.presence, self.frequency = full(1.0), full(0.0), full(0.0)
        self.output_counts = torch.zeros((slots, vocab), dtype=torch.int32, device=device)
        self.prompt_seen = torch.zeros((slots, vocab), dtype=torch.bool, device=device)
        self.bias = torch.zeros((slots, vocab), dtype=torch.float32, device=device)

    def of(self, slots: slice | Tensor) -> tuple[Tensor, ...]:
        """What `apply_penalties` takes of `slots`: counts, marks, repetition, presence, frequency, bias."""
        state = (self.output_counts, self.prompt_seen, self.repetition, self.presence, self.frequency, self.bias)
        return tuple(each[slots] for each in state)

    def fill(self, slot: int, request: Request) -> None:
        """Put a request into `slot`, numbers by `fill_`: the host waits for the copy of `tensor[slot] = number`."""
        sampling, device = request.sampling, self.bias.device
        prompt = torch.tensor(request.prompt_ids, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        self.repetition[slot].fill_(sampling.repetition_penalty)
        self.presence[slot].fill_(sampling.presence_penalty)
        self.frequency[slot].fill_(sampling.frequency_penalty)
        for tensor in (self.output_counts, self.prompt_seen, self.bias):
            tensor[slot].zero_()
        self.prompt_seen[slot].index_fill_(0, prompt, True)
        for token, bias in sampling.logit_bias.items():
            self.bias[slot, token].fill_(bias)


class ForbiddenState:
    """What each slot must not emit, see `specdec_kernels.forbid_tokens`; allocated when a request has any."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.words = torch.full((slots, MAX_FORBIDDEN, MAX_BAD_WORD), -1, dtype=torch.int64, device=device)
        self.until = torch.zeros((slots, MAX_FORBIDDEN), dtype=torch.int64, device=device)

    def fill(self, slot: int, request: Request) -> None:
        """Put a request into `slot`: its sequences end in the last column."""
        pinned = self.words.is_cuda
        words = torch.full(self.words.shape[1:], -1, dtype=torch.int64, pin_memory=pinned)
        until = torch.zeros(self.until.shape[1:], dtype=torch.int64, pin_memory=pinned)
        for place, (word, allowed) in enumerate(request.forbidden):
            words[place, MAX_BAD_WORD - len(word) :] = torch.tensor(word)
            until[place] = allowed
        self.words[slot].copy_(words, non_blocking=True)
        self.until[slot].copy_(until, non_blocking=True)


class BatchState:
    """Tensors for up to `max_batch` running requests and `ahead` waiting ones, of `max_pages` pages and `context`
    positions; see `Batch`. Numbers of one width are one tensor, so that requests move in a few operations."""

    def __init__(
        self, max_batch: int, ahead: int, max_pages: int, context: int, vocab: int, device: torch.device
    ) -> None:
        self.max_batch, self.dummy_slot, self._device, self._vocab = max_batch, max_batch + ahead, device, vocab
        self._num_slots = self.dummy_slot + 2
        slots = -(-self._num_slots // _ALIGNED) * _ALIGNED
        self._longs = torch.zeros((3, slots), dtype=torch.int64, device=device)
        self._words = torch.zeros((5, slots), dtype=torch.int32, device=device)
        self._pages = torch.zeros((self._num_slots, max_pages), dtype=torch.int32, device=device)
        self._history = torch.zeros((self._num_slots, context), dtype=torch.int64, device=device)
        self._moves = Staging({"slots": ((2, self._num_slots), torch.int64)}, device, _MOVES_AHEAD)
        self._padding = torch.zeros_like(self._words)
        self._padding[TOP_P].view(torch.float32).fill_(1.0)  # greedy, no filter
        self._words.copy_(self._padding)
        self.page_table, self.history = self._pages[:max_batch], self._history[:max_batch]
        self.lengths, self.last_tokens = self._longs[LENGTH, :max_batch], self._longs[LAST_TOKEN, :max_batch]
        self.active = self._words[ACTIVE, :max_batch]
        self.penalties: PenaltyState | None = None
        self.forbidden: ForbiddenState | None = None
        self.constraints: ConstraintState | None = None

    def make_room(self, needs: SamplingNeeds, num_nodes: int, max_depth: int) -> None:
        """Allocate what `needs` require for each slot and its draft, unless it is there already."""
        if needs.penalised and self.penalties is None:
            self.penalties = PenaltyState(self._num_slots, self._vocab, self._device)
        if needs.forbids and self.forbidden is None:
            self.forbidden = ForbiddenState(self._num_slots, self._device)
        if needs.constrained and self.constraints is None:
            self.constraints = ConstraintState(self.max_batch, num_nodes, max_depth, self._vocab, self._device)

    def fill(self, slot: int, request: Request, needs: SamplingNeeds) -> None:
        """Put what steps made for `needs` read of a request into `slot`; there is room for it."""
        if needs.penalised:
            assert self.penalties is not None
            self.penalties.fill(slot, request)
        if needs.forbids:
            assert self.forbidden is not None
            self.forbidden.fill(slot, request)
        if request.continuation:
            known = torch.tensor(request.continuation, pin_memory=self._history.is_cuda)
            self._history[slot, len(request.prompt_ids) :][: len(known)].copy_(known, non_blocking=True)

    def enter(self, slots: Tensor, values: Mapping[str, Tensor]) -> None:
        """Put the numbers and pages of requests into `slots` [P] int64, padding into the dummy slot. `values` holds
        what `number_fields(P)` names, and `pages` [P, max_pages] int32, past a request's own any pages."""
        self._longs.index_copy_(1, slots, values["longs"])
        self._words.index_copy_(1, slots, values["words"])
        self._pages.index_copy_(0, slots, values["pages"])

    def activate(self, slots: Tensor, complete: Tensor) -> None:
        """Let requests in `slots` [P] int64 take part in steps where `complete` [P] int32 is 1."""
        self._words[ACTIVE].index_copy_(0, slots, complete)

    def write_text(self, slots: Tensor, positions: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Put the first `counts` [S] int32 of `tokens` [S, n] at `positions` [S, n] int64 of `slots` [S] int64."""
        inside = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
        self._history[torch.where(inside, slots[:, None], self.dummy_slot), positions] = tokens

    def rearrange(self, moves: Sequence[tuple[int, int]]) -> None:
        """Move slot `source` to slot `target`, for each (source, target) in order, and make `source` padding; where the
        two are equal, that is all. However many moves there are, they are a few operations."""
        origin = list(range(self._num_slots))
        for source, target in moves:
            origin[target] = origin[source]
            origin[source] = self._num_slots - 1
        changed = [slot for slot, source in enumerate(origin) if source != slot]
        self._moves.arrays()["slots"][:, : len(changed)] = changed, [origin[slot] for slot in changed]
        self._moves.send()
        targets, sources = self._moves.tensors["slots"][:, : len(changed)]
        held = [tensor for state in (self.penalties, self.forbidden) if state for tensor in vars(state).values()]
        for tensor, dim in (
            (self._longs, 1),
            (self._words, 1),
            *((each, 0) for each in (self._pages, self._history, *held)),
        ):
            tensor.index_copy_(dim, targets, tensor.index_select(dim, sources))

    def fill_dummy(self, num_slots: int, length: int, num_pages: int, generator: torch.Generator) -> None:
        """Let slots 0 … num_slots - 1 hold requests of `length` random tokens of `generator` (of the CPU), each with
        pages of its own while `num_pages` are enough, to time steps before there are requests. `reset` ends that."""
        text = torch.randint(_DUMMY_KINDS, (num_slots, length + 1), generator=generator).to(self._device)
        self._history[:num_slots, : length + 1] = text
        self.last_tokens[:num_slots] = text[:, length]
        pages = torch.arange(self._pages[:num_slots].numel(), dtype=torch.int32, device=self._device) % num_pages
        self._pages[:num_slots] = pages.view_as(self._pages[:num_slots])
        self.lengths[:num_slots].fill_(length)
        self.active[:num_slots].fill_(1)

    def reset(self) -> None:
        self.clear(slice(None))
        for tensor in (self._pages, self._history):
            tensor.zero_()

    def clear(self, slots: slice) -> None:
        """Make `slots` padding, which is greedy: a step samples and filters nothing for it."""
        self._words[:, slots] = self._padding[:, slots]
        self._longs[:, slots].zero_()
        if self.forbidden is not None:
            self.forbidden.words[slots].fill_(-1)

    def batch(self, start: int, stop: int, max_length: int) -> Batch:
        """Slots start … stop - 1 as views."""
        slots = slice(start, stop)
        return self._batch(slots, self.lengths[slots], self.active[slots], max_length)

    def tiles(self, slots: Tensor, lengths: Tensor, counts: Tensor, max_length: int) -> Batch:
        """Tiles of prompts: tile i is `counts[i]` tokens of slot `slots[i]` from position `lengths[i]` on."""
        return self._batch(slots, lengths, (counts > 0).to(torch.int32), max_length)

    def _batch(self, slots: slice | Tensor, lengths: Tensor, active: Tensor, max_length: int) -> Batch:
        longs, words = self._longs[:, slots], self._words[:, slots]
        temperature, top_p, min_p = words[_FIRST_FLOAT:].view(torch.float32).unbind(0)
        return Batch(
            lengths=lengths,
            last_tokens=longs[LAST_TOKEN],
            page_table=self._pages[slots],
            history=self._history[slots],
            active=active,
            sampling=SamplingTensors(temperature, words[TOP_K], top_p, min_p, longs[SEED]),
            slots=slots,
            max_length=max_length,
        )


class SlotStore:
    """One vector that a drafter stores for each slot, [max_batch + 1, size]; the last one is the dummy slot."""

    def __init__(self, size: int, resources: Resources) -> None:
        self._vectors = torch.zeros((resources.max_batch + 1, size), dtype=resources.dtype, device=resources.device)
        self._impl = resources.impl

    def read(self, slots: slice | Tensor) -> Tensor:
        """[B, size]: the vectors of these slots."""
        return self._vectors[slots]

    def keep_last(self, seen: Observation, values: Tensor) -> None:
        """Keep the entry of `values [B, n, size]` at each request's last observed position. A padding slot keeps what
        it has. A prompt of one token, of which nothing is observed, starts from zeros."""
        if (prompts := seen.prompts) is not None:
            last = values.flatten(0, 1)[prompts.last]
            self._vectors[prompts.slots] = torch.where((prompts.counts > 0)[:, None], last, 0.0)
            return
        keep_last(self._vectors[seen.batch.slots], values.contiguous(), seen.counts, impl=self._impl)

    def move(self, source: int, target: int) -> None:
        self._vectors[target] = self._vectors[source]


@dataclass(frozen=True)
class DraftAdjustment:
    """Penalties, logit bias and forbidden single tokens on logits of drafts, for `slots` whose last tokens have the
    positions `lengths` [B]. Tokens of a draft's own path are not counted; the target decides in any case."""

    penalties: PenaltyState | None
    forbidden: ForbiddenState | None
    slots: slice | Tensor
    lengths: Tensor
    vocab_size: int
    impl: str

    def __call__(self, logits: Tensor, depth: int, vocabulary: Tensor | None = None) -> None:
        """Change the logits [B, T, V_d] of drafts, after `depth` tokens or more behind the last one, in place.
        `vocabulary` [V_d] int64 is added to an id of the drafter to give the target's."""
        known = None
        if vocabulary is not None:
            known = vocabulary + torch.arange(len(vocabulary), device=vocabulary.device)
        if self.penalties is not None:
            self._penalise(logits, self.penalties, known)
        if self.forbidden is not None:
            self._forbid(logits, self.forbidden, depth, known)

    def _penalise(self, logits: Tensor, state: PenaltyState, known: Tensor | None) -> None:
        rows, width, _ = logits.shape
        counts, seen, *factors, bias = state.of(self.slots)
        if known is not None:
            counts, seen, bias = (each.index_select(1, known) for each in (counts, seen, bias))
        # Tokens outside of the vocabulary are not counted, so no column has a path.
        tokens = self.lengths.new_full((rows, width), -1)
        mask = tokens.new_zeros(rows, width, -(-width // 64))
        repetition, presence, frequency = factors
        apply_penalties(logits, tokens, mask, counts, seen, repetition, presence, frequency, bias, impl=self.impl)

    def _forbid(self, logits: Tensor, state: ForbiddenState, depth: int, known: Tensor | None) -> None:
        words, until = state.words[self.slots], state.until[self.slots]
        last, is_single = words[..., -1], words[..., -2] < 0
        applies = is_single & (last >= 0) & (last < self.vocab_size) & (self.lengths[:, None] + depth + 1 < until)
        # The last column takes what does not apply.
        hidden = torch.zeros(len(words), self.vocab_size + 1, dtype=torch.bool, device=logits.device)
        hidden.scatter_(1, torch.where(applies, last, self.vocab_size), True)
        hidden = hidden[:, :-1] if known is None else hidden.index_select(1, known)
        logits.masked_fill_(hidden[:, None], -torch.inf)
