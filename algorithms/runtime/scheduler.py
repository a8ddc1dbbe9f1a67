"""Which request runs in which row and on which pages, and when it ends. No tensors and no clock.

Requests wait in a queue, first in, first out. A request is admitted when a row is free and the pages for its whole life
are: a running request can then never be stopped by a full pool.

All but the last token of a prompt is prefilled, in chunks of so many tiles per step. Prompts enter a chunk in the order
of the queue, so at most one of them is begun and unfinished after a step, and nobody overtakes it. While all rows are
taken, the prompts of the next few requests may be prefilled ahead, so that these run as soon as a row is free.

The rows of running requests are always 0 … n - 1. Behind them wait, in rows of the state too, requests that hold pages
and do not run yet. When a running request leaves, the first of those with a complete prompt takes its place, or else
the last running one, and the caller moves its tensors as `RowMove` says.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from algorithms.runtime.request import Completion, EngineError, Request
from specdec_kernels.checks import expect_at_least

ABORTED = "aborted"
FAILED = "error"
Decode = Callable[[Sequence[int]], str]


class OutOfPages(RuntimeError):
    """The allocator has fewer free pages than were asked for; nothing was taken."""


class PageAllocator:
    """Hands out page numbers 0 … num_pages - 1. Raises ValueError unless `num_pages` is at least 1."""

    def __init__(self, num_pages: int) -> None:
        expect_at_least("num_pages", num_pages, 1)
        self.num_pages = num_pages
        self._free = list(reversed(range(num_pages)))
        self._owned = [False] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, or raise OutOfPages and take none."""
        expect_at_least("count", count, 0)
        if count > len(self._free):
            raise OutOfPages(f"asked for {count} pages, {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owned[page] = True
        return pages

    def release(self, pages: list[int]) -> None:
        """Give pages back. A page that is not owned raises ValueError before anything is released."""
        if len(set(pages)) != len(pages):
            raise ValueError(f"pages released twice in one call: {pages}")
        unowned = [page for page in pages if not (0 <= page < self.num_pages and self._owned[page])]
        if unowned:
            raise ValueError(f"pages not owned by anyone: {unowned}")
        for page in pages:
            self._owned[page] = False
        self._free.extend(pages)


@dataclass
class Running:
    """A request that holds pages. `admitted_ms` is the caller's clock, in milliseconds, when there was a row for it to
    run in; `num_prefilled` counts the prompt tokens that steps have been told to prefill."""

    request: Request
    completion: Completion
    pages: list[int]
    row: int
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
        """Committed tokens behind the last one, which is not in the cache yet (L)."""
        return len(self.request.prompt_ids) + len(self.completion.token_ids) - 1


class RowMove(NamedTuple):
    """What row `source` holds now belongs in row `target`, and row `source` is padding. The two are equal where the
    request in that row has left."""

    source: int
    target: int


class Piece(NamedTuple):
    """What one step prefills of a prompt: `num_tokens` tokens from position `start` on. `start` is 0 for a request that
    has just been admitted, and only for that. A prompt of one token has a piece without tokens, which takes a tile."""

    running: Running
    start: int
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt is complete with this."""
        return self.start + self.num_tokens == len(self.running.request.prompt_ids) - 1


def tiles_of(num_tokens: int, tile: int) -> int:
    """Tiles that a piece of `num_tokens` fills; one at least, so that a chunk has no more prompts than tiles."""
    return max(1, -(-num_tokens // tile))


class Scheduler:
    """Queue, rows and pages of one engine.

    `overshoot` counts the positions behind a request's end that steps still write, and that its pages must hold.
    `decode` gives the text of token ids, for stop strings. Up to `max_batch` requests run at a time, and prompts of
    up to `ahead` requests more may be prefilled while all rows are taken.
    """

    def __init__(
        self,
        max_batch: int,
        num_pages: int,
        page_size: int,
        overshoot: int,
        decode: Decode,
        ahead: int = 0,
    ) -> None:
        self._max_batch, self._page_size, self._overshoot, self._decode = max_batch, page_size, overshoot, decode
        self._ahead = ahead
        self._allocator = PageAllocator(num_pages)
        self._waiting: deque[Request] = deque()
        self._rows: list[Running] = []
        self._held: deque[Running] = deque()
        self._ids: set[int] = set()

    @property
    def rows(self) -> Sequence[Running]:
        """The running requests; entry i is in row i."""
        return self._rows

    @property
    def begun(self) -> Running | None:
        """The request whose prompt is prefilled in part."""
        return self._held[-1] if self._held and not self._held[-1].is_complete else None

    @property
    def held(self) -> Sequence[Running]:
        """The requests that hold pages and do not run yet, in the order of the queue."""
        return self._held

    @property
    def admitted(self) -> list[Running]:
        """The requests that hold pages."""
        return [*self._rows, *self._held]

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether no request waits, is prefilled or runs."""
        return not self._waiting and not self._rows and not self._held

    @property
    def num_pages(self) -> int:
        return self._allocator.num_pages

    @property
    def num_free_pages(self) -> int:
        return self._allocator.num_free

    def pages_for(self, request: Request) -> int:
        """Pages that hold the request to its end."""
        return -(-(request.max_length + self._overshoot) // self._page_size)

    def check(self, request: Request) -> None:
        """Raise EngineError if the pool could never hold the request."""
        if self.pages_for(request) > self.num_pages:
            raise EngineError(
                f"request {request.id}: needs {self.pages_for(request)} pages of {self._page_size} tokens, the KV pool "
                f"has {self.num_pages}; raise runtime.num_pages or lower sampling.max_new_tokens"
            )

    def submit(self, request: Request) -> None:
        """Queue a request. Raises EngineError if it can never run here, or if one of its id waits or runs."""
        self.check(request)
        if request.id in self._ids:
            raise EngineError(f"request {request.id}: a request of this id is already here")
        self._ids.add(request.id)
        self._waiting.append(request)

    @property
    def num_startable(self) -> int:
        """Requests that there are rows for, and whose prompts are not complete."""
        return min(self._max_batch - len(self._rows), len(self._waiting) + (self.begun is not None))

    def worth_a_chunk(self, tile: int, tiles: int) -> bool:
        """Whether to prefill now what there is no row for: once it fills a chunk of `tiles` of `tile` tokens, once
        nobody else could join it, or once no request waits with a complete prompt. Nobody waits for it before that, and
        one short prompt costs a step nearly as much as several."""
        if not self._held or not self._held[0].is_complete:
            return True
        room = self._max_batch + self._ahead - len(self._rows) - len(self._held)
        if room >= len(self._waiting):
            return True
        wanted = sum(tiles_of(len(request.prompt_ids) - 1, tile) for request in islice(self._waiting, room))
        if self.begun is not None:
            wanted += tiles_of(self.begun.num_unfilled, tile)
        return wanted >= tiles

    def admit(self, now_ms: float, tile: int, tiles: int, ahead: bool = False) -> list[Piece]:
        """What the next step prefills, in the order of the queue: the prompt that is begun, then waiting ones, until
        rows, pages or the `tiles` of `tile` tokens run out. A tile holds tokens of one prompt. With `ahead` prompts
        are prefilled for which there is no row yet. `start` comes before this, and once more when the chunk is
        prefilled, for the requests whose prompts are complete with it."""
        pieces: list[Piece] = []
        if (begun := self.begun) is not None:
            pieces.append(_next_piece(begun, tiles * tile))
            tiles -= tiles_of(pieces[-1].num_tokens, tile)
        most = self._max_batch + (self._ahead if ahead else 0)
        while tiles > 0 and self.begun is None and self._waiting and len(self._rows) + len(self._held) < most:
            request = self._waiting[0]
            if self.pages_for(request) > self._allocator.num_free:
                break
            self._waiting.popleft()
            pages = self._allocator.allocate(self.pages_for(request))
            running = Running(request, Completion(request.id), pages, self._free_row(), now_ms)
            self._held.append(running)
            pieces.append(_next_piece(running, tiles * tile))
            tiles -= tiles_of(pieces[-1].num_tokens, tile)
        return pieces

    def _free_row(self) -> int:
        """The first row behind the running requests that nobody waits in."""
        taken = {running.row for running in self._held}
        return next(row for row in range(len(self._rows), self._max_batch + self._ahead) if row not in taken)

    def start(self, now_ms: float) -> list[RowMove]:
        """Let requests with complete prompts run, in the order of the queue, while rows are free. A request whose
        prompt is begun moves up to the row behind them. Returns the moves, which are to be made in this order."""
        moves: list[RowMove] = []
        while self._held and len(self._rows) < self._max_batch:
            first, row = self._held[0], len(self._rows)
            if first.row != row:
                moves.append(RowMove(first.row, row))
            if not first.is_complete:
                self._place(first, row, now_ms)
                break
            self._rows.append(self._first_held(row, now_ms))
        return moves

    def _first_held(self, row: int, now_ms: float) -> Running:
        """Take the first request that waits with a complete prompt, for `row`."""
        running = self._held.popleft()
        self._place(running, row, now_ms)
        return running

    def _place(self, running: Running, row: int, now_ms: float) -> None:
        """Give a request that waits a row to run in. Its clock starts when there is one."""
        if running.row >= self._max_batch:
            running.admitted_ms = now_ms
        running.row = row

    def advance(
        self,
        running: Running,
        emitted: Sequence[int],
        logprobs: Sequence[float],
        now_ms: float,
        top: Sequence[Sequence[tuple[int, float]]] = (),
    ) -> RowMove | None:
        """Append the tokens of one step, up to the first that ends the request; the move if one does.

        `finish_reason` stays empty while the request goes on. `num_truncated` counts the emitted tokens past the end.
        """
        request, completion = running.request, running.completion
        elapsed_ms = now_ms - running.admitted_ms
        if not completion.token_ids:
            completion.ttft_ms = elapsed_ms
        completion.emitted_at_ms.append(elapsed_ms)
        completion.accepted_counts.append(len(emitted) - 1)
        kept, completion.finish_reason = self._end_of(request, completion.token_ids, emitted)
        completion.token_ids += emitted[:kept]
        if request.sampling.logprobs:
            completion.logprobs += logprobs[:kept]
        if most := request.sampling.top_logprobs:
            completion.top_logprobs += [
                [pair for pair in likeliest[:most] if pair[1] > -math.inf] for likeliest in top[:kept]
            ]
        completion.num_truncated = len(emitted) - kept
        return self._retire(running, now_ms) if completion.finish_reason else None

    def abort(self, request_id: int, now_ms: float) -> tuple[Completion, RowMove | None] | None:
        """End a request where it stands: what it has so far, and the move if it had a row. None if it is not here."""
        for request in self._waiting:
            if request.id == request_id:
                self._waiting.remove(request)
                self._ids.remove(request_id)
                return Completion(request_id, finish_reason=ABORTED), None
        for running in self.admitted:
            if running.request.id == request_id:
                running.completion.finish_reason = ABORTED
                return running.completion, self._retire(running, now_ms)
        return None

    def fail(self, running: Running, message: str, now_ms: float) -> RowMove:
        """End a request that cannot go on: it keeps what it has, with finish reason `error` and the message."""
        running.completion.finish_reason, running.completion.error = FAILED, message
        return self._retire(running, now_ms)

    def clear(self) -> None:
        """Drop all requests; every page is free again."""
        for running in self.admitted:
            self._allocator.release(running.pages)
        self._rows.clear()
        self._held.clear()
        self._waiting.clear()
        self._ids.clear()

    def _end_of(self, request: Request, written: Sequence[int], emitted: Sequence[int]) -> tuple[int, str]:
        """How many of the `emitted` tokens belong to the answer behind `written`, and why it ends with them; the reason
        is empty if it goes on."""
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

    def _retire(self, running: Running, now_ms: float) -> RowMove:
        """Give row and pages back, and complete the answer: its text has no stop token and no stop string."""
        completion, ids = running.completion, running.completion.token_ids
        text = self._decode(ids[:-1] if completion.finish_reason == "stop_token" else ids)
        completion.text = text[: _first_stop(running.request, text)]
        completion.total_ms = now_ms - running.admitted_ms
        self._allocator.release(running.pages)
        self._ids.remove(running.request.id)
        if running in self._held:
            self._held.remove(running)
            return RowMove(running.row, running.row)
        if self._held and self._held[0].is_complete:
            source = self._held[0].row
            self._rows[running.row] = self._first_held(running.row, now_ms)
            return RowMove(source, running.row)
        last = self._rows.pop()
        move = RowMove(last.row, running.row)
        if last is not running:
            self._rows[running.row] = last
            last.row = running.row
        return move


def _next_piece(running: Running, most: int) -> Piece:
    """The next tokens of a prompt, `most` at most."""
    piece = Piece(running, running.num_prefilled, min(running.num_unfilled, most))
    running.num_prefilled += piece.num_tokens
    return piece


def _first_stop(request: Request, text: str) -> int | None:
    """Where the first stop string begins in `text`, if any does."""
    found = [at for at in (text.find(stop) for stop in request.sampling.stop_strings) if at >= 0]
    return min(found, default=None)
