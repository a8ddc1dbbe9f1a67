"""The scheduler under random traffic: no page is lost or shared, rows stay dense, requests run in their order, and each
prompt is prefilled once, in order and in chunks."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from algorithms.engine.request import Completion, EngineError, Request, SlotResult
from algorithms.engine.scheduler import ABORTED, Running, Scheduler, SlotMove
from algorithms.step.sampling_params import SamplingParams
from tests.algorithms.toy import spell

STOP = 9
OVERSHOOT = 3


def result(tokens: list[int]) -> SlotResult:
    """Of a step that emitted `tokens`."""
    return SlotResult(tokens, [0.0] * len(tokens), True, len(tokens) - 1, False, [])


def request(number: int, prompt: int = 5, new_tokens: int = 4, **sampling: object) -> Request:
    params = SamplingParams(max_new_tokens=new_tokens, **sampling)  # type: ignore[arg-type]
    return Request(number, tuple(range(prompt)), params, stop_token_ids=frozenset({STOP}))


class Traffic(RuleBasedStateMachine):
    """Submits, admits, advances and aborts in any order, and keeps its own list of what must be so."""

    @initialize(
        max_batch=st.integers(1, 5), num_pages=st.integers(4, 24), page_size=st.sampled_from([1, 3, 8]),
        tile=st.integers(1, 6), num_tiles=st.integers(1, 4), ahead=st.integers(0, 3),
    )  # fmt: skip
    def begin(self, max_batch: int, num_pages: int, page_size: int, tile: int, num_tiles: int, ahead: int) -> None:
        self.scheduler = Scheduler(max_batch, num_pages, page_size, OVERSHOOT, spell, ahead)
        self.max_batch, self.num_pages, self.tile, self.num_tiles = max_batch, num_pages, tile, num_tiles
        self.ahead = ahead
        self.waiting: list[int] = []
        self.admitted: list[int] = []
        self.rows: dict[int, int] = {}
        """Row to id, moved as the scheduler says: what an engine's tensors would hold."""
        self.held: list[int] = []
        """Ids of the requests that wait with pages, in order."""
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

    @rule(fewer=st.integers(0, 2), ahead=st.booleans())
    def admit(self, fewer: int = 0, ahead: bool = False) -> None:
        """A chunk of a step, of the full size or a smaller one, and the requests that run with it."""
        self.now_ms += 1
        tiles = max(1, self.num_tiles - fewer)
        self.start()
        begun = self.scheduler.begun
        full = len(self.rows) >= self.max_batch
        startable = min(self.max_batch - len(self.scheduler.running), len(self.waiting) + (begun is not None))
        assert self.scheduler.num_startable == startable
        pieces = self.scheduler.admit(self.now_ms, self.tile, tiles, ahead)
        ids, continued = [piece.running.request.id for piece in pieces], [] if begun is None else [begun.request.id]
        fresh = ids[len(continued) :]
        assert ids == continued + self.waiting[: len(fresh)], "a request overtook another"
        assert ahead or not (full and fresh), "a prompt is prefilled that there is no row for"
        self.waiting = self.waiting[len(fresh) :]
        self.admitted += fresh
        self.held += fresh
        assert sum(-(-piece.num_tokens // self.tile) for piece in pieces) <= tiles, "more than a chunk"
        for running, start, count in pieces:
            asked = running.request
            assert len(running.pages) == self.scheduler.pages_for(asked)
            assert start == self.prefilled.get(asked.id, 0), "a token is prefilled twice, late or never"
            assert count > 0 or len(asked.prompt_ids) == 1
            self.prefilled[asked.id] = start + count
            if asked.id in fresh:
                assert running.slot not in self.rows, "a row has two requests"
                self.rows[running.slot] = asked.id
        self.start()
        if not self.rows:
            assert not self.waiting, "the pool is empty, and still nothing was admitted"

    def start(self) -> None:
        """Do what an engine does for the requests that can run."""
        before = len(self.scheduler.running)
        for move in self.scheduler.start(self.now_ms):
            assert move.target not in self.rows, "a waiting request was displaced"
            self.rows[move.target] = self.rows.pop(move.source)
        for running in list(self.scheduler.running)[before:]:
            assert running.request.id == self.held.pop(0), "a request overtook another"

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data(), emitted=st.lists(st.integers(0, STOP), min_size=1, max_size=4))
    def advance(self, data: st.DataObject, emitted: list[int]) -> None:
        running = self.scheduler.running[data.draw(st.integers(0, len(self.scheduler.running) - 1))]
        before = len(running.completion.token_ids)
        self.now_ms += 1
        move = self.scheduler.advance(running, result(emitted), self.now_ms)
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
        assert (got is not None) == (victim in self.waiting or running is not None)
        if got is not None:
            completion, move = got
            assert (completion.request_id, completion.finish_reason) == (victim, ABORTED)
            assert (move is None) == (running is None)
            if running is None:
                self.waiting.remove(victim)
            self.follow(move, running)
            assert self.scheduler.abort(victim, self.now_ms) is None

    def follow(self, move: SlotMove | None, left: Running | None) -> None:
        """Do what an engine does for a request that has left."""
        if move is None:
            return
        assert left is not None and self.rows[move.target] == left.request.id
        moved = self.rows.pop(move.source)
        if move.source != move.target:
            self.rows[move.target] = moved
        for number in (left.request.id, moved):
            if number in self.held:
                assert number == left.request.id or number == self.held[0], "a request overtook another"
                self.held.remove(number)

    @rule()
    def clear(self) -> None:
        self.scheduler.clear()
        self.rows, self.waiting, self.held = {}, [], []
        assert self.scheduler.idle and self.scheduler.num_free_pages == self.num_pages

    @invariant()
    def rows_are_dense(self) -> None:
        scheduler = self.scheduler
        assert [running.slot for running in scheduler.running] == list(range(len(scheduler.running)))
        assert {running.slot: running.request.id for running in scheduler.admitted} == self.rows
        assert len(scheduler.running) <= self.max_batch and len(self.rows) <= self.max_batch + self.ahead
        assert max(self.rows, default=0) < self.max_batch + self.ahead
        assert len(scheduler.waiting) == len(self.waiting)
        assert scheduler.idle == (not self.rows and not self.waiting)

    @invariant()
    def who_can_run_runs(self) -> None:
        """Of the requests that wait with pages, only the last may lack a part of its prompt; with a complete one they
        wait for a row."""
        held = list(self.scheduler.held)
        assert [running.request.id for running in held] == self.held
        assert all(running.is_complete for running in held[:-1])
        assert self.scheduler.begun is (held[-1] if held and not held[-1].is_complete else None)
        if held and held[0].is_complete:
            assert len(self.scheduler.running) == self.max_batch and held[0].slot >= self.max_batch

    @invariant()
    def running_requests_have_all_of_their_prompts(self) -> None:
        for running in self.scheduler.running:
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
        for running in self.scheduler.running:
            text = [*running.request.prompt_ids, *running.completion.token_ids]
            assert running.length == len(text) - 1 < running.request.max_length

    def teardown(self) -> None:
        """Whatever happened, what is left is served to the end."""
        while not self.scheduler.idle:
            before = sum(self.prefilled.values())
            self.admit()
            assert self.scheduler.running or sum(self.prefilled.values()) > before, "a request starves"
            while self.scheduler.running:
                running = self.scheduler.running[0]
                self.follow(self.scheduler.advance(running, result([1]), self.now_ms), running)
        assert self.scheduler.num_free_pages == self.num_pages


TestTraffic = Traffic.TestCase


def one(asked: Request) -> tuple[Scheduler, Running]:
    scheduler = Scheduler(1, 8, 4, OVERSHOOT, spell)
    scheduler.submit(asked)
    (piece,) = scheduler.admit(10.0, 8, 4)
    assert scheduler.start(10.0) == []
    return scheduler, piece.running


def test_the_clock_of_a_request_starts_when_there_is_a_row() -> None:
    """A prompt that was prefilled ahead waits for its row, and the request's times run from there."""
    scheduler = Scheduler(1, 16, 4, OVERSHOOT, spell, ahead=1)
    for number in range(3):
        scheduler.submit(request(number))
    scheduler.admit(10.0, 8, 4)
    scheduler.start(10.0)
    (piece,) = scheduler.admit(11.0, 8, 4, ahead=True)
    assert scheduler.start(11.0) == [] and piece.running.slot == 1 and scheduler.admit(12.0, 8, 4, ahead=True) == []
    assert scheduler.advance(scheduler.running[0], result([STOP]), 20.0) == SlotMove(1, 0)
    assert list(scheduler.running) == [piece.running] and (piece.running.slot, piece.running.admitted_ms) == (0, 20.0)


def test_what_lies_past_the_end_is_counted() -> None:
    scheduler, running = one(request(0))
    completion = running.completion
    assert scheduler.advance(running, result([1, 2]), 12.0) is None
    assert (completion.finish_reason, completion.num_truncated, completion.ttft_ms) == ("", 0, 2.0)
    assert scheduler.advance(running, result([STOP, 3, 3]), 15.0) == SlotMove(0, 0)
    assert (completion.token_ids, completion.finish_reason, completion.num_truncated) == ([1, 2, 9], "stop_token", 2)
    assert completion.accepted_counts == [1, 2] and completion.emitted_at_ms == [2.0, 5.0]
    assert (completion.text, completion.ttft_ms, completion.total_ms) == (spell([1, 2]), 2.0, 5.0)


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason", "text"),
    [
        ({}, [1, 2, 3, 4], "length", "1234"),
        ({"stop_strings": ("23",)}, [1, 2, 3], "stop_string", "1"),
        ({"stop_strings": ("23", "12")}, [1, 2], "stop_string", ""),
        # Both end with one token: the one that begins first cuts the output, in either order.
        ({"stop_strings": ("3", "23")}, [1, 2, 3], "stop_string", "1"),
        ({"stop_strings": ("23", "3")}, [1, 2, 3], "stop_string", "1"),
        ({"stop_strings": ("7",)}, [1, 2, 3, 4], "length", "1234"),
        ({"stop_strings": ("1234",)}, [1, 2, 3, 4], "stop_string", ""),
    ],
)
def test_endings(sampling: dict, tokens: list[int], reason: str, text: str) -> None:
    """A stop string may begin in one token and end in the next; the first of several counts."""
    scheduler, running = one(request(0, **sampling))
    scheduler.advance(running, result([1, 2, 3, 4, 5]), 11.0)
    completion: Completion = running.completion
    assert (completion.token_ids, completion.finish_reason, completion.text) == (tokens, reason, text)


@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_stop_strings_may_span_any_number_of_tokens_and_steps(width: int) -> None:
    """A stop string of seven tokens, committed one, two, three or seven at a time; the text before it is whole."""
    tokens = [3, 1, 4, 1, 5, 1, 2, 3, 4, 5, 6, 7, 8]
    scheduler, running = one(request(0, new_tokens=13, stop_strings=(spell([1, 2, 3, 4, 5, 6, 7]),)))
    for start in range(0, len(tokens), width):
        step = tokens[start : start + width]
        if scheduler.advance(running, result(step), 1.0) is not None:
            break
    completion = running.completion
    assert (completion.finish_reason, completion.text) == ("stop_string", spell([3, 1, 4, 1, 5]))
    assert completion.token_ids == tokens[:12]


def test_tokens_of_no_probability_are_not_reported() -> None:
    """Of the likeliest tokens behind each kept one, as many as the request asks for."""
    scheduler = Scheduler(1, 9, 4, 0, spell)
    scheduler.submit(request(0, prompt=1, new_tokens=2, logprobs=True, top_logprobs=2))
    scheduler.admit(0.0, 4, 9)
    scheduler.start(0.0)
    (running,) = scheduler.running
    top = [[(3, -0.5), (4, -1.0), (5, -2.0)], [(6, 0.0), (7, float("-inf"))], [(8, 0.0)]]
    assert scheduler.advance(running, SlotResult([3, 6, 8], [-0.5, 0.0, -0.1], True, 2, False, top), 7.0) == SlotMove(
        0, 0
    )
    completion = running.completion
    assert (completion.token_ids, completion.finish_reason, completion.num_truncated) == ([3, 6], "length", 1)
    assert completion.logprobs == [-0.5, 0.0]
    assert completion.top_logprobs == [[(3, -0.5), (4, -1.0)], [(6, 0.0)]]


def test_prompts_without_a_row_are_prefilled_together() -> None:
    """As soon as they fill a chunk, nobody could join them, or nobody waits with a complete prompt."""
    scheduler = Scheduler(1, 64, 8, OVERSHOOT, spell, ahead=3)
    for number in range(3):
        scheduler.submit(request(number, prompt=9))
    scheduler.admit(0.0, 4, 2)
    scheduler.start(0.0)
    assert scheduler.prefill_ahead_pays(4, 100), "nobody waits with a complete prompt"
    scheduler.admit(1.0, 4, 2, ahead=True)
    assert len(scheduler.held) == 1 and scheduler.prefill_ahead_pays(4, 100), "nobody else could join"
    scheduler.submit(request(3, prompt=9))
    assert scheduler.prefill_ahead_pays(4, 100), "all who wait could join, and nobody else"
    for number in range(4, 6):
        scheduler.submit(request(number, prompt=9))
    assert not scheduler.prefill_ahead_pays(4, 5) and scheduler.prefill_ahead_pays(4, 4), (
        "two prompts of two tiles have room"
    )
    scheduler.admit(2.0, 4, 1, ahead=True)
    assert scheduler.begun is not None
    assert not scheduler.prefill_ahead_pays(4, 4) and scheduler.prefill_ahead_pays(4, 3), (
        "one tile is left, and one prompt joins"
    )
