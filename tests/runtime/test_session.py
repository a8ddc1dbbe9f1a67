"""What a session counts, how far it bounds lengths, and which chunks ride in its steps."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from algorithms.runtime.chunk import PASS_ROWS
from algorithms.runtime.engine import Engine
from algorithms.runtime.readback import Readback
from algorithms.runtime.sampling_params import SamplingNeeds
from algorithms.runtime.session import Session
from tests.algorithms.toy import (
    Scripted,
    Setup,
    answers,
    autoregressive,
    changed,
    engine_of,
    random_target,
    requests,
    scripts,
)

TARGET = random_target()
ASKED = [changed(request, max_new_tokens=count) for request, count in zip(requests(3), (9, 4, 14), strict=True)]
DEPTH = 2


def scripted(overlap: int, max_batch: int = 2) -> Engine:
    """An engine whose drafts are all accepted."""
    algorithm = Scripted(scripts(ASKED, answers(ASKED, Setup(), TARGET)), DEPTH)
    return engine_of(algorithm, Setup(max_batch=max_batch, overlap=overlap), TARGET)


@pytest.fixture
def session() -> Iterator[Session]:
    with engine_of(autoregressive(TARGET), Setup(max_batch=2, overlap=2), TARGET).session(SamplingNeeds()) as opened:
        yield opened


def test_tokens_per_step_are_pooled_over_requests() -> None:
    engine, completions = scripted(0), []
    with engine.session(SamplingNeeds()) as session:
        assert session.report().tokens_per_step == 0
        for request in ASKED:
            session.submit(request)
        while not session.idle:
            completions += session.step()
            report = session.report()
            running = [running.completion for running in engine.scheduler.rows]
            steps = sum(len(completion.accepted_counts) for completion in (*completions, *running))
            emitted = sum(count + 1 for each in (*completions, *running) for count in each.accepted_counts)
            assert (report.num_requests, report.num_finished) == (3, len(completions))
            assert report.emitted_tokens == emitted and report.tokens_per_step == emitted / steps
        assert session.generation(completions).num_steps == session.generation([]).num_steps > 3


@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_the_bound_of_lengths_is_what_steps_in_flight_may_accept(monkeypatch: pytest.MonkeyPatch, overlap: int) -> None:
    """Where all drafts are accepted it is the greatest length itself."""
    engine = scripted(overlap, max_batch=1)
    bounds: list[tuple[int, int]] = []
    launch = engine.runner.launch

    def watched(num_rows: int, max_length: int, *arguments: Any) -> Any:
        bounds.append((int(engine.parts.state.lengths[:num_rows].max()), max_length))
        return launch(num_rows, max_length, *arguments)

    monkeypatch.setattr(engine.runner, "launch", watched)
    engine.generate([changed(ASKED[2], max_new_tokens=14)])
    assert len(bounds) >= 5 and all(length == bound for length, bound in bounds[:4])


def in_flight(rows: list[list[int]], valid: list[int]) -> torch.Tensor:
    """A table of emitted tokens, of four at most a row."""
    table = torch.full((len(rows), 12), -1)
    for row, tokens in enumerate(rows):
        table[row, : len(tokens)] = torch.tensor(tokens)
        table[row, 8:] = torch.tensor([len(tokens) - 1, valid[row], 3, 0])
    return table


def test_a_grammar_is_told_what_it_has_not_seen(session: Session) -> None:
    """Of tokens that are read and of those in flight; a row without a usable logit has nothing in flight."""
    readback: Readback[Any] = Readback(3, 4, 3, torch.device("cpu"))
    session._readback = readback
    rows: list[Any] = [SimpleNamespace(completion=SimpleNamespace(token_ids=ids)) for ids in ([1, 2, 3], [7], [5, 6])]
    readback.push(in_flight([[4, 5], [8, 9], [10]], [1, 0, 1]), rows)
    readback.push(in_flight([[6, 16], [11]], [1, 1]), [rows[0], rows[2]])
    matchers: list[Any] = [SimpleNamespace(num_tokens=count) if count is not None else None for count in (1, 1, None)]
    assert session._news(rows, matchers) == [[2, 3, 4, 5, 6, 16], [], [5, 6, 10, 11]]
    matchers = [SimpleNamespace(num_tokens=count) for count in (5, 0, 2)]
    assert session._news(rows, matchers) == [[6, 16], [7], [10, 11]]
    assert readback.num_pending == 2, "they stay in flight"


@pytest.mark.parametrize(("loop_ms", "decode_ms", "host_ms"), [(40.0, 31.0, 17.0), (20.0, 14.0, 0.0)])
def test_what_chunks_add_to_steps_is_prefill(
    monkeypatch: pytest.MonkeyPatch, session: Session, loop_ms: float, decode_ms: float, host_ms: float
) -> None:
    """No phase is below zero, and decoding lasts no shorter than its phases."""
    ledger = {"draft": 5.0, "verify": 10.0, "accept": 1.0, "commit": 2.0}
    monkeypatch.setattr(session._runner.clock, "ledger_ms", lambda: ledger)
    monkeypatch.setattr(session._prefill_clock, "ledger_ms", lambda: {"prefill": 4.0})
    session._runner.riding_ms |= {"verify": 3.0, "accept": 2.0}
    session._loop_ms = loop_ms
    found = session.generation([])
    assert (found.prefill_ms, found.decode_ms) == (9.0, decode_ms)
    assert found.ledger_ms == {"draft": 5.0, "verify": 7.0, "accept": 0.0, "commit": 2.0, "host": host_ms}


def test_a_step_is_read_first_only_where_that_wins(session: Session) -> None:
    """Not where both cost the same."""
    for request in requests(2):
        session.submit(request)
    session._loop_ms, session._readback.waited_ms, session._num_finished = 100.0, 90.0, 2
    for row_steps, first in ((19, True), (20, False), (21, False)):
        session._row_steps = row_steps
        assert session._reads_first() == first


@pytest.mark.parametrize(("startable", "rides"), [(1, True), (2, True), (3, False)])
def test_prompts_ride_where_no_more_could_start_than_run(startable: int, rides: bool) -> None:
    scheduler = SimpleNamespace(num_startable=startable, rows=[0, 0])
    fake: Any = SimpleNamespace(_scheduler=scheduler, _riding=lambda: [1])
    assert Session._rides(fake) == rides
    fake._riding = lambda: []
    assert not Session._rides(fake)


@pytest.mark.parametrize(
    ("nodes", "tokens"),
    [(64, 192), (65, 128), (128, 128), (129, 64), (PASS_ROWS - 64, 64), (PASS_ROWS - 63, 192), (PASS_ROWS, 192)],
)
def test_prompts_without_a_row_need_no_further_pass_over_the_weights(nodes: int, tokens: int) -> None:
    """Beside the nodes of a step, the largest chunk that needs no more passes than the smallest one."""
    fake: Any = SimpleNamespace(
        _riding=lambda: [SimpleNamespace(num_tokens=count) for count in (64, 128, 192)],
        _runner=SimpleNamespace(num_rows_of=lambda count: count + 1),
        _scheduler=SimpleNamespace(rows=[0] * (nodes - 1)),
        _algorithm=SimpleNamespace(num_nodes=1),
    )
    assert Session._chunk_ahead(fake).num_tokens == tokens


@pytest.mark.parametrize(
    ("rides", "startable", "worth", "asked"),
    [
        (False, 0, False, ("between", True)),
        (True, 2, False, ("riding", True)),
        (True, 0, True, ("ahead", True)),
        (True, 0, False, ("ahead", False)),
    ],
)
def test_prompts_that_nobody_waits_for_wait_until_they_are_worth_a_chunk(
    rides: bool, startable: int, worth: bool, asked: tuple[str, bool]
) -> None:
    """The largest chunk of its kind bounds what is prefilled; only what rides may be prefilled ahead."""
    chunks = {
        name: SimpleNamespace(tile=place, size=10 * place) for place, name in enumerate(("between", "riding", "ahead"))
    }
    found = list[tuple[Any, ...]]()
    filled: Any = SimpleNamespace(row=4, request="new")
    fake: Any = SimpleNamespace(
        _scheduler=SimpleNamespace(
            num_startable=startable,
            worth_a_chunk=lambda tile, size: found.append(("worth", tile, size)) or worth,
            admit=lambda now, tile, size, ahead: found.append((tile, size, ahead)) or [(filled, 0, 3), (filled, 3, 3)],
        ),
        _chunk_ahead=lambda: chunks["ahead"],
        _riding=lambda: [None, chunks["riding"]],
        _prefiller=SimpleNamespace(chunks=[None, chunks["between"]]),
        _state=SimpleNamespace(fill=lambda *what: found.append(what)),
        _begin_text=found.append,
        _needs="needs",
    )
    pieces = Session._admit(fake, rides)
    name, admitted = asked
    chunk = chunks[name]
    assert found == [
        *[("worth", chunk.tile, chunk.size)] * (name == "ahead"),
        *[(chunk.tile, chunk.size, rides), (4, "new", "needs"), "new"] * admitted,
    ]
    assert len(pieces) == 2 * admitted


def test_what_belongs_to_a_request_moves_with_its_row(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []
    for name in ("rearrange", "move_row", "clear"):
        monkeypatch.setattr(Recorder, name, lambda self, *what, name=name: told.append((name, *what)), raising=False)
    session._state = session._parts = Recorder()  # type: ignore[assignment]
    session._move_rows([])
    session._move_rows([(2, 0), (1, 1)])  # type: ignore[list-item]
    assert told == [("rearrange", [(2, 0), (1, 1)]), ("move_row", 2, 0), ("clear", 2), ("clear", 1)]


class Recorder:
    """Stands for the state, the parts and their backlog."""

    @property
    def backlog(self) -> Recorder:
        return self


def test_a_request_is_filled_in_with_its_first_piece() -> None:
    """What penalties need of it is there before its first step, and is not filled in anew with the next piece."""
    asked = changed(ASKED[2], presence_penalty=0.5, max_new_tokens=3)
    engine = engine_of(autoregressive(TARGET), Setup(prefill_chunk=8, prefill_tile=4), TARGET)
    with engine.session(SamplingNeeds.of([asked.sampling])) as session:
        session.submit(asked)
        session.step()
        penalties = engine.parts.state.penalties
        assert penalties is not None and float(penalties.presence[0]) == 0.5
        penalties.presence[0] = 0.25
        session.step()
        assert engine.scheduler.rows and float(penalties.presence[0]) == 0.25
