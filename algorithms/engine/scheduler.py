"""Which request runs in which slot and on which pages, and when it ends. No tensors and no clock.

Requests wait first in, first out. A request is admitted when a slot is free and the pages for its whole life are, so a
full pool never stops a running request. All but the last token of a prompt is prefilled, in batches of a fixed number
of tiles, in the order of the queue: at most one prompt is partly prefilled after a step. While all slots are taken, the
prompts of the next few requests may be prefilled ahead.

Running requests are in slots 0 to n - 1, in front of the admitted ones that do not run yet. When one leaves, the first
of these with a complete prompt takes its slot, else the last running one, and the caller moves tensors as `SlotMove`
says.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from algorithms.engine.request import Completion, EngineError, Request, SlotResult
from specdec_kernels.checks import expect_at_least

ABORTED = "aborted"
FAILED = "error"
Decode = Callable[[Sequence[int]], str]


@dataclass
class Running:
    """A request that holds pages. `admitted_ms` is the caller's clock, in milliseconds, when there was a slot for it to
    run in; `num_prefilled` counts the prompt tokens that steps were given to prefill."""

    request: Request
    completion: Completion
    pages: list[int]
    slot: int
    admitted_ms: float
    num_prefilled: int = 0

    @property
    def num_unfilled(self) -> int:
        """Prompt tokens that are still to be prefilled; the last one never is."""
        return len(self.request.prompt_ids) - 1 - self.num_prefilled

    @property
    def is_complete(self) -> bool:
        """Whether its prompt is prefilled, so that it can run."""
        return self.num_unfilled == 0

    @property
    def length(self) -> int:
        """Committed tokens without the last one, which is not in the cache yet (L)."""
        return len(self.request.prompt_ids) + len(self.completion.token_ids) - 1


class SlotMove(NamedTuple):
    """Slot `source` moves to slot `target` and becomes padding. They are equal where its request has left."""

    source: int
    target: int


class PrefillSegment(NamedTuple):
    """Tokens of a prompt that one step prefills: `num_tokens` from position `start` on, which is 0 exactly for a
    request that has just been admitted. A prompt of one token has a segment without tokens, which takes a tile."""

    running: Running
    start: int
    num_tokens: int

    @property
    def is_last(self) -> bool:
        return self.start + self.num_tokens == len(self.running.request.prompt_ids) - 1


def tiles_of(num_tokens: int, tile: int) -> int:
    """Tiles of a segment of `num_tokens`: at least one, so that a batch has no more prompts than tiles."""
    return max(1, -(-num_tokens // tile))


class Scheduler:
    """Queue, slots and pages of one engine. `overshoot` counts the positions past a request's end that steps still
    write, and that its pages must hold. `decode` gives the text of token ids, for stop strings. Up to `max_batch`
    requests run at a time, and prompts of up to `ahead` requests more may be prefilled while all slots are taken."""

    def __init__(
        self, max_batch: int, num_pages: int, page_size: int, overshoot: int, decode: Decode, ahead: int = 0
    ) -> None:
        self._max_batch, self._page_size, self._overshoot, self._decode = max_batch, page_size, overshoot, decode
        self._ahead = ahead
        expect_at_least("num_pages", num_pages, 1)
        self.num_pages = num_pages
        self._free = list(reversed(range(num_pages)))
        self.waiting: deque[Request] = deque()
        self.running: list[Running] = []
        """Entry i is in slot i."""
        self.held: deque[Running] = deque()
        """The requests that hold pages and do not run yet, in the order of the queue."""
        self._ids: set[int] = set()

    @property
    def begun(self) -> Running | None:
        """The request whose prompt is prefilled in part."""
        return self.held[-1] if self.held and not self.held[-1].is_complete else None

    @property
    def admitted(self) -> list[Running]:
        return [*self.running, *self.held]

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running and not self.held

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    def pages_for(self, request: Request) -> int:
        return -(-(request.max_length + self._overshoot) // self._page_size)

    def check(self, request: Request) -> None:
        """Raise EngineError if the pool could never hold the request."""
        if self.pages_for(request) > self.num_pages:
            raise EngineError(
                f"request {request.id}: needs {self.pages_for(request)} pages of {self._page_size} tokens, the KV pool "
                f"has {self.num_pages}; raise runtime.num_pages or lower sampling.max_new_tokens"
            )

    def submit(self, request: Request) -> None:
        """Queue a request. Raises EngineError if it can never run here, or if its id is already waiting or running."""
        self.check(request)
        if request.id in self._ids:
            raise EngineError(f"request {request.id}: a request of this id is already here")
        self._ids.add(request.id)
        self.waiting.append(request)

    @property
    def num_startable(self) -> int:
        """Requests that there are slots for, and whose prompts are not complete."""
        return min(self._max_batch - len(self.running), len(self.waiting) + (self.begun is not None))

    @property
    def next_prompt(self) -> int:
        """Tokens of the prompt that is prefilled next; 0 where none waits."""
        if self.begun is not None:
            return len(self.begun.request.prompt_ids)
        return len(self.waiting[0].prompt_ids) if self.waiting else 0

    def prefill_ahead_pays(self, tile: int, tiles: int) -> bool:
        """Whether to prefill prompts without a slot: they fill `tiles` of `tile` tokens, no other request could join,
        or none waits with a complete prompt. One short prompt costs a step nearly as much as several."""
        if not self.held or not self.held[0].is_complete:
            return True
        room = self._max_batch + self._ahead - len(self.running) - len(self.held)
        if room >= len(self.waiting):
            return True
        wanted = sum(tiles_of(len(request.prompt_ids) - 1, tile) for request in islice(self.waiting, room))
        if self.begun is not None:
            wanted += tiles_of(self.begun.num_unfilled, tile)
        return wanted >= tiles

    def admit(self, now_ms: float, tile: int, tiles: int, ahead: bool = False) -> list[PrefillSegment]:
        """The segments that the next step prefills, in the order of the queue: the partly prefilled prompt, then
        waiting ones, until slots, pages or the `tiles` of `tile` tokens run out. A tile has tokens of one prompt. With
        `ahead` also prompts without a slot are prefilled. Call `start` before, and again after the prefill."""
        segments: list[PrefillSegment] = []
        if (begun := self.begun) is not None:
            segments.append(_next_segment(begun, tiles * tile))
            tiles -= tiles_of(segments[-1].num_tokens, tile)
        most = self._max_batch + (self._ahead if ahead else 0)
        while tiles > 0 and self.begun is None and self.waiting and len(self.running) + len(self.held) < most:
            request = self.waiting[0]
            if (count := self.pages_for(request)) > len(self._free):
                break
            self.waiting.popleft()
            pages = [self._free.pop() for _ in range(count)]
            taken = {running.slot for running in self.held}
            slot = next(slot for slot in range(len(self.running), self._max_batch + self._ahead) if slot not in taken)
            running = Running(request, Completion(request.id), pages, slot, now_ms)
            self.held.append(running)
            segments.append(_next_segment(running, tiles * tile))
            tiles -= tiles_of(segments[-1].num_tokens, tile)
        return segments

    def start(self, now_ms: float) -> list[SlotMove]:
        """Let requests with complete prompts run, in the order of the queue, while slots are free. A request whose
        prompt is begun moves up to the slot after them. Returns the moves, which are to be made in this order."""
        moves: list[SlotMove] = []
        while self.held and len(self.running) < self._max_batch:
            first, slot = self.held[0], len(self.running)
            if first.slot != slot:
                moves.append(SlotMove(first.slot, slot))
            if not first.is_complete:
                self._place(first, slot, now_ms)
                break
            self.running.append(self._first_held(slot, now_ms))
        return moves

    def _first_held(self, slot: int, now_ms: float) -> Running:
        running = self.held.popleft()
        self._place(running, slot, now_ms)
        return running

    def _place(self, running: Running, slot: int, now_ms: float) -> None:
        """Give a request that waits a slot to run in. Its clock starts when there is one."""
        if running.slot >= self._max_batch:
            running.admitted_ms = now_ms
        running.slot = slot

    def advance(self, running: Running, result: SlotResult, now_ms: float) -> SlotMove | None:
        """Append the tokens of one step, up to the first that ends the request; the move if one does. `finish_reason`
        stays empty while the request goes on. `num_truncated` counts the emitted tokens past the end."""
        request, completion, emitted = running.request, running.completion, result.tokens
        elapsed_ms = now_ms - running.admitted_ms
        if not completion.token_ids:
            completion.ttft_ms = elapsed_ms
        completion.emitted_at_ms.append(elapsed_ms)
        completion.accepted_counts.append(len(emitted) - 1)
        completion.drafted_counts.append(result.num_drafted)
        completion.ran_out.append(result.ran_out)
        kept, completion.finish_reason = self._end_of(request, completion.token_ids, emitted)
        completion.token_ids += emitted[:kept]
        if request.sampling.logprobs:
            completion.logprobs += result.logprobs[:kept]
        if most := request.sampling.top_logprobs:
            completion.top_logprobs += [
                [pair for pair in listed[:most] if pair[1] > -math.inf] for listed in result.top[:kept]
            ]
        completion.num_truncated = len(emitted) - kept
        return self._retire(running, now_ms) if completion.finish_reason else None

    def abort(self, request_id: int, now_ms: float) -> tuple[Completion, SlotMove | None] | None:
        """End a request now: its completion so far, and the move if it had a slot. None if it is not here."""
        for request in self.waiting:
            if request.id == request_id:
                self.waiting.remove(request)
                self._ids.remove(request_id)
                return Completion(request_id, finish_reason=ABORTED), None
        for running in self.admitted:
            if running.request.id == request_id:
                running.completion.finish_reason = ABORTED
                return running.completion, self._retire(running, now_ms)
        return None

    def fail(self, running: Running, message: str, now_ms: float) -> SlotMove:
        """End a request that cannot go on: it keeps what it has, with finish reason `error` and the message."""
        running.completion.finish_reason, running.completion.error = FAILED, message
        return self._retire(running, now_ms)

    def clear(self) -> None:
        """Drop all requests; every page is free again."""
        for running in self.admitted:
            self._free += running.pages
        self.running.clear()
        self.held.clear()
        self.waiting.clear()
        self._ids.clear()

    def _end_of(self, request: Request, written: Sequence[int], emitted: Sequence[int]) -> tuple[int, str]:
        """How many `emitted` tokens belong to the output after `written`, and why it ends then; empty: it goes on."""
        left = request.sampling.max_new_tokens - len(written)
        ends = request.ends
        for index, token in enumerate(emitted[:left], start=1):
            if token in ends:
                return index, "stop_token"
            if request.sampling.stop_strings:
                text = self._decode([*written, *emitted[:index]])
                if _first_stop(request, text) is not None:
                    return index, "stop_string"
        return (left, "length") if left <= len(emitted) else (len(emitted), "")

    def _retire(self, running: Running, now_ms: float) -> SlotMove:
        """Give slot and pages back, and complete the answer: its text has no stop token and no stop string."""
        completion, ids = running.completion, running.completion.token_ids
        text = self._decode(ids[:-1] if completion.finish_reason == "stop_token" else ids)
        completion.text = text[: _first_stop(running.request, text)]
        completion.total_ms = now_ms - running.admitted_ms
        self._free += running.pages
        self._ids.remove(running.request.id)
        if running in self.held:
            self.held.remove(running)
            return SlotMove(running.slot, running.slot)
        if self.held and self.held[0].is_complete:
            source = self.held[0].slot
            self.running[running.slot] = self._first_held(running.slot, now_ms)
            return SlotMove(source, running.slot)
        last = self.running.pop()
        move = SlotMove(last.slot, running.slot)
        if last is not running:
            self.running[running.slot] = last
            last.slot = running.slot
        return move


def _next_segment(running: Running, most: int) -> PrefillSegment:
    segment = PrefillSegment(running, running.num_prefilled, min(running.num_unfilled, most))
    running.num_prefilled += segment.num_tokens
    return segment


def _first_stop(request: Request, text: str) -> int | None:
    """The index in `text` where the first stop string begins, or None."""
    found = [at for at in (text.find(stop) for stop in request.sampling.stop_strings) if at >= 0]
    return min(found, default=None)
