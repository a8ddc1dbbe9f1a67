"""The scheduler under random traffic: no page is lost or shared, rows stay dense, and requests run in their order."""

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

    @initialize(max_batch=st.integers(1, 5), num_pages=st.integers(4, 24), page_size=st.sampled_from([1, 3, 8]))
    def start(self, max_batch: int, num_pages: int, page_size: int) -> None:
        self.scheduler = Scheduler(max_batch, num_pages, page_size, OVERSHOOT, spell)
        self.max_batch, self.num_pages = max_batch, num_pages
        self.waiting: list[int] = []
        self.admitted: list[int] = []
        self.rows: list[int] = []
        """Ids by row, moved as the scheduler says: what an engine's tensors would hold."""
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
        fresh = self.scheduler.admit(self.now_ms)
        ids = [running.request.id for running in fresh]
        assert ids == self.waiting[: len(ids)], "a request overtook another"
        self.waiting = self.waiting[len(ids) :]
        assert [running.row for running in fresh] == list(range(len(self.rows), len(self.rows) + len(ids)))
        assert all(len(running.pages) == self.scheduler.pages_for(running.request) for running in fresh)
        self.rows += ids
        self.admitted += ids
        if not self.rows:
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
        running = next((r for r in self.scheduler.rows if r.request.id == victim), None)
        got = self.scheduler.abort(victim, self.now_ms)
        assert (got is not None) == (victim in self.waiting + self.rows)
        if got is not None:
            completion, move = got
            assert (completion.request_id, completion.finish_reason) == (victim, ABORTED)
            assert (move is None) == (running is None)
            if running is None:
                self.waiting.remove(victim)
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
        self.rows, self.waiting = [], []
        assert self.scheduler.idle and self.scheduler.num_free_pages == self.num_pages

    @invariant()
    def rows_are_dense(self) -> None:
        rows = self.scheduler.rows
        assert [running.request.id for running in rows] == self.rows
        assert [running.row for running in rows] == list(range(len(rows))) and len(rows) <= self.max_batch
        assert self.scheduler.num_waiting == len(self.waiting)
        assert self.scheduler.idle == (not self.rows and not self.waiting)

    @invariant()
    def every_page_is_free_or_owned_once(self) -> None:
        owned = [page for running in self.scheduler.rows for page in running.pages]
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
            self.admit()
            assert self.rows, "a request starves"
            while self.scheduler.rows:
                running = self.scheduler.rows[0]
                self.follow(self.scheduler.advance(running, [1], [0.0], self.now_ms), running)
        assert self.scheduler.num_free_pages == self.num_pages


TestTraffic = Traffic.TestCase


def one(asked: Request) -> tuple[Scheduler, Running]:
    scheduler = Scheduler(1, 8, 4, OVERSHOOT, spell)
    scheduler.submit(asked)
    (running,) = scheduler.admit(10.0)
    return scheduler, running


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
    ],
)
def test_endings(sampling: dict, tokens: list[int], reason: str, text: str) -> None:
    """A stop string may begin in one token and end in the next; the first of several counts."""
    scheduler, running = one(request(0, **sampling))
    scheduler.advance(running, [1, 2, 3, 4, 5], [0.0] * 5, 11.0)
    completion: Completion = running.completion
    assert (completion.token_ids, completion.finish_reason, completion.text) == (tokens, reason, text)
