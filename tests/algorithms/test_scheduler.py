"""The scheduler under random traffic: no page is lost or shared, rows stay dense, requests run in their order, and each
prompt is prefilled once, in order and in chunks."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from algorithms.runtime.request import Completion, EngineError, Request
from algorithms.runtime.sampling_params import SamplingParams
from algorithms.runtime.scheduler import ABORTED, RowMove, Running, Scheduler
from tests.algorithms.toy import spell

STOP = 9
OVERSHOOT = 3


def request(number: int, prompt: int = 5, new_tokens: int = 4, **sampling: object) -> Request:
    params = SamplingParams(max_new_tokens=new_tokens, **sampling)  # type: ignore[arg-type]
    return Request(number, tuple(range(prompt)), params, stop_token_ids=frozenset({STOP}))


class Traffic(RuleBasedStateMachine):
    """Submits, admits, advances and aborts in any order, and keeps its own list of what must be so."""

    @initialize(
        max_batch=st.integers(1, 5),
        num_pages=st.integers(4, 24),
        page_size=st.sampled_from([1, 3, 8]),
        tile=st.integers(1, 6),
        num_tiles=st.integers(1, 4),
    )
    def start(self, max_batch: int, num_pages: int, page_size: int, tile: int, num_tiles: int) -> None:
        self.scheduler = Scheduler(max_batch, num_pages, page_size, OVERSHOOT, spell, tile, num_tiles)
        self.max_batch, self.num_pages, self.tile, self.num_tiles = max_batch, num_pages, tile, num_tiles
        self.waiting: list[int] = []
        self.admitted: list[int] = []
        self.rows: list[int] = []
        """Ids by row, moved as the scheduler says: what an engine's tensors would hold."""
        self.begun: list[int] = []
        """The id of the request whose prompt is prefilled in part, if there is one."""
        self.prefilled: dict[int, int] = {}
        self.next_id = 0
        self.now_ms = 0.0

    @rule(prompt=st.integers(1, 12), new_tokens=st.integers(1, 9))
    def submit(self, prompt: int, new_tokens: int) -> None:
        asked = request(self.next_id, prompt, new_tokens)
        self.next_id += 1
        if self.scheduler.pages_for(asked) > self.num_pages:
            with pytest.raises(EngineError, match=rf"request {asked.id}: needs .* raise runtime.num_pages"):
                self.scheduler.submit(asked)
        else:
            self.scheduler.submit(asked)
            self.waiting.append(asked.id)
            with pytest.raises(EngineError, match="already here"):
                self.scheduler.submit(asked)

    @rule()
    def admit(self) -> None:
        self.now_ms += 1
        pieces, move = self.scheduler.admit(self.now_ms)
        ids, before, begun = [piece.running.request.id for piece in pieces], list(self.rows), self.begun
        fresh = ids[len(begun) :]
        assert ids == begun + self.waiting[: len(fresh)], "a request overtook another"
        self.waiting = self.waiting[len(fresh) :]
        self.admitted += fresh
        self.begun = []
        assert sum(-(-piece.num_tokens // self.tile) for piece in pieces) <= self.num_tiles, "more than a chunk"
        for running, start, count in pieces:
            asked = running.request
            assert len(running.pages) == self.scheduler.pages_for(asked)
            assert start == self.prefilled.get(asked.id, 0), "a token is prefilled twice, late or never"
            assert count > 0 or len(asked.prompt_ids) == 1
            self.prefilled[asked.id] = start + count
            if start + count == len(asked.prompt_ids) - 1:
                assert running.row == len(self.rows) and not self.begun
                self.rows.append(asked.id)
            else:
                assert running.row == self.max_batch - 1 and not self.begun
                self.begun = [asked.id]
        assert self.rows[: len(before)] == before, "a running request was displaced"
        completed = bool(begun) and self.begun != begun
        moved = completed and len(before) < self.max_batch - 1
        assert move == (RowMove(self.max_batch - 1, len(before)) if moved else None)
        if not self.rows and not self.begun:
            assert not self.waiting, "the pool is empty, and still nothing was admitted"

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), emitted=st.lists(st.integers(0, STOP), min_size=1, max_size=4))
    def advance(self, data: st.DataObject, emitted: list[int]) -> None:
        running = self.scheduler.rows[data.draw(st.integers(0, len(self.rows) - 1))]
        before = len(running.completion.token_ids)
        self.now_ms += 1
        move = self.scheduler.advance(running, emitted, [0.0] * len(emitted), self.now_ms)
        completion, limit = running.completion, running.request.sampling.max_new_tokens
        kept = completion.token_ids[before:]
        assert kept == emitted[: len(kept)] and len(kept) + completion.num_truncated == len(emitted)
        ends = kept[-1] == STOP or len(completion.token_ids) == limit
        assert ends == (move is not None) == bool(completion.finish_reason) and STOP not in kept[:-1]
        self.follow(move, running)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        victim = data.draw(st.integers(0, self.next_id))
        running = next((r for r in self.scheduler.admitted if r.request.id == victim), None)
        got = self.scheduler.abort(victim, self.now_ms)
        assert (got is not None) == (victim in self.waiting + self.rows + self.begun)
        if got is not None:
            completion, move = got
            assert (completion.request_id, completion.finish_reason) == (victim, ABORTED)
            assert (move is None) == (running is None)
            if running is None:
                self.waiting.remove(victim)
            if victim in self.begun:
                assert move == RowMove(self.max_batch - 1, self.max_batch - 1)
                self.begun, move = [], None
            self.follow(move, running)
            assert self.scheduler.abort(victim, self.now_ms) is None

    def follow(self, move: RowMove | None, left: Running | None) -> None:
        if move is not None:
            assert left is not None and self.rows[move.target] == left.request.id
            assert move.source == len(self.rows) - 1
            self.rows[move.target] = self.rows[move.source]
            self.rows.pop()

    @rule()
    def clear(self) -> None:
        self.scheduler.clear()
        self.rows, self.waiting, self.begun = [], [], []
        assert self.scheduler.idle and self.scheduler.num_free_pages == self.num_pages

    @invariant()
    def rows_are_dense(self) -> None:
        rows = self.scheduler.rows
        assert [running.request.id for running in rows] == self.rows
        assert [running.row for running in rows] == list(range(len(rows)))
        assert len(rows) + len(self.begun) <= self.max_batch
        assert self.scheduler.num_waiting == len(self.waiting)
        assert self.scheduler.idle == (not self.rows and not self.waiting and not self.begun)
        begun = self.scheduler.begun
        assert self.begun == ([] if begun is None else [begun.request.id])

    @invariant()
    def running_requests_have_all_of_their_prompts(self) -> None:
        for running in self.scheduler.rows:
            assert self.prefilled[running.request.id] == len(running.request.prompt_ids) - 1

    @invariant()
    def every_page_is_free_or_owned_once(self) -> None:
        owned = [page for running in self.scheduler.admitted for page in running.pages]
        assert len(set(owned)) == len(owned)
        assert self.scheduler.num_free_pages + len(owned) == self.num_pages

    @invariant()
    def requests_run_in_their_order(self) -> None:
        assert self.admitted == sorted(self.admitted)

    @invariant()
    def lengths_are_the_text(self) -> None:
        for running in self.scheduler.rows:
            text = [*running.request.prompt_ids, *running.completion.token_ids]
            assert running.length == len(text) - 1 < running.request.max_length

    def teardown(self) -> None:
        """Whatever happened, what is left is served to the end."""
        while not self.scheduler.idle:
            before = sum(self.prefilled.values())
            self.admit()
            assert self.rows or sum(self.prefilled.values()) > before, "a request starves"
            while self.scheduler.rows:
                running = self.scheduler.rows[0]
                self.follow(self.scheduler.advance(running, [1], [0.0], self.now_ms), running)
        assert self.scheduler.num_free_pages == self.num_pages


TestTraffic = Traffic.TestCase


def one(asked: Request) -> tuple[Scheduler, Running]:
    scheduler = Scheduler(1, 8, 4, OVERSHOOT, spell)
    scheduler.submit(asked)
    (piece,), _ = scheduler.admit(10.0)
    return scheduler, piece.running


def test_what_lies_past_the_end_is_counted() -> None:
    scheduler, running = one(request(0))
    completion = running.completion
    assert scheduler.advance(running, [1, 2], [0.0, 0.0], 12.0) is None
    assert (completion.finish_reason, completion.num_truncated, completion.ttft_ms) == ("", 0, 2.0)
    assert scheduler.advance(running, [STOP, 3, 3], [0.0] * 3, 15.0) == RowMove(0, 0)
    assert (completion.token_ids, completion.finish_reason, completion.num_truncated) == ([1, 2, 9], "stop_token", 2)
    assert completion.accepted_counts == [1, 2] and completion.emitted_at_ms == [2.0, 5.0]
    assert (completion.text, completion.ttft_ms, completion.total_ms) == (spell([1, 2]), 2.0, 5.0)


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason", "text"),
    [
        ({}, [1, 2, 3, 4], "length", "1234"),
        ({"stop_strings": ("23",)}, [1, 2, 3], "stop_string", "1"),
        ({"stop_strings": ("23", "12")}, [1, 2], "stop_string", ""),
        ({"stop_strings": ("7",)}, [1, 2, 3, 4], "length", "1234"),
        ({"stop_strings": ("1234",)}, [1, 2, 3, 4], "stop_string", ""),
    ],
)
def test_endings(sampling: dict, tokens: list[int], reason: str, text: str) -> None:
    """A stop string may begin in one token and end in the next; the first of several counts."""
    scheduler, running = one(request(0, **sampling))
    scheduler.advance(running, [1, 2, 3, 4, 5], [0.0] * 5, 11.0)
    completion: Completion = running.completion
    assert (completion.token_ids, completion.finish_reason, completion.text) == (tokens, reason, text)


@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_stop_strings_may_span_any_number_of_tokens_and_steps(width: int) -> None:
    """A stop string of seven tokens, committed one, two, three or seven at a time; the text before it is whole."""
    tokens = [3, 1, 4, 1, 5, 1, 2, 3, 4, 5, 6, 7, 8]
    scheduler, running = one(request(0, new_tokens=13, stop_strings=(spell([1, 2, 3, 4, 5, 6, 7]),)))
    for start in range(0, len(tokens), width):
        step = tokens[start : start + width]
        if scheduler.advance(running, step, [0.0] * len(step), 1.0) is not None:
            break
    completion = running.completion
    assert (completion.finish_reason, completion.text) == ("stop_string", spell([3, 1, 4, 1, 5]))
    assert completion.token_ids == tokens[:12]
