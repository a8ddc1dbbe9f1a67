"""Which steps are captured, what is run for a step, and how their times are booked."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from algorithms.runtime import cuda_graph
from algorithms.runtime.backlog import COLUMNS
from algorithms.runtime.cuda_graph import StepRunner, _captured, _Launch, _Variant
from algorithms.runtime.sampling_params import SamplingNeeds
from algorithms.runtime.step import CONSTRAINED, PHASES, Step
from tests.algorithms.drafters import ALL_MAKERS, TARGET
from tests.algorithms.toy import Setup, autoregressive, engine_of

NEEDS = SamplingNeeds()


@pytest.mark.parametrize(
    ("level", "phases", "groups"),
    [
        ("none", PHASES, []),
        ("draft", PHASES, [("draft",)]),
        ("verify", PHASES, [("draft",), ("verify",)]),
        ("step", PHASES, [PHASES]),
        ("draft", CONSTRAINED, [("draft",)]),
        ("verify", CONSTRAINED, [("draft",), ("graft",), ("verify",)]),
        ("step", CONSTRAINED, [(phase,) for phase in CONSTRAINED]),
    ],
)
def test_groups_of_phases_that_are_one_graph(level: str, phases: tuple[str, ...], groups: list[Any]) -> None:
    assert _captured(level, phases) == groups


def runner_of(maker: str = "autoregressive", **setup: Any) -> StepRunner:
    return engine_of(ALL_MAKERS[maker](), Setup(**setup), TARGET).runner


class Made(Step):
    """Records what steps are made of."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        _, batch, needs, checked, nodes, chunk = arguments
        seen = (len(batch.lengths), batch.max_length, needs, checked, nodes, None if chunk is None else chunk.size)
        steps_made.append(seen)

    def draft(self) -> None:
        drafted.append((len(self._batch.lengths), self._checked))
        super().draft()


steps_made: list[tuple[Any, ...]] = []
drafted: list[tuple[int, bool]] = []


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_made.clear()
    drafted.clear()
    monkeypatch.setattr(cuda_graph, "Step", Made)


def test_a_step_that_is_not_captured_has_the_rows_in_use(made: None) -> None:
    """The first one is checked."""
    runner = runner_of("ngram", max_batch=3)
    runner.prepare(NEEDS)
    assert steps_made == []
    with torch.inference_mode():
        tables = [runner.launch(2, 37, NEEDS), runner.launch(1, 41, NEEDS)]
    assert [table.shape[0] for table in tables] == [2, 1]
    assert steps_made == [(2, 37, NEEDS, True, 9, None), (1, 41, NEEDS, False, 9, None)]


def test_captured_steps_are_made_once_for_each_bucket(made: None) -> None:
    """Of as many rows as it has, and for any length; the draft that is checked runs uncaptured."""
    runner = runner_of("ngram", max_batch=3, graph="verify")
    longest = runner._longest
    with torch.inference_mode():
        runner.prepare(NEEDS)
        assert steps_made == [(3, longest, NEEDS, True, None, None)] + [
            (rows, longest, NEEDS, False, 9, None) for rows in (3, 2, 1)
        ]
        runner.prepare(NEEDS)
        del drafted[:], steps_made[:]
        table = runner.launch(1, 30, NEEDS)
    assert (
        table.shape[0] == 1 and steps_made == [(1, 30, NEEDS, True, None, None)] and drafted == [(1, True), (1, False)]
    )
    assert longest == runner._parts.state.page_table.shape[1] * 16


def test_chunks_ride_in_steps_of_their_own(made: None) -> None:
    runner = runner_of(max_batch=2, graph="step", prefill_chunk=64)
    with torch.inference_mode():
        runner.prepare(NEEDS)
    sizes = {rows: [chunk.size for chunk in runner.riding(NEEDS, rows)] for rows in (1, 2)}
    assert sizes == {1: [4], 2: [4]}
    assert [(rows, chunk) for rows, *_, chunk in steps_made[1:]] == [(2, 4), (2, None), (1, 4), (1, None)]
    assert {variant.tiles for variant in runner._captured} == {0, 4}


def test_smaller_batches_have_every_second_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """None where steps differ in their number of nodes, and no batch has one where grammars have their turns."""
    for adaptive, below in ((False, [2, 4]), (True, [])):
        runner = runner_of("ngram", max_batch=3, graph="step", adaptive=adaptive)
        runner._chunks = [SimpleNamespace(size=size) for size in (1, 2, 3, 4)]  # type: ignore[misc]
        found = {rows: [chunk.size for chunk in runner.riding(NEEDS, rows)] for rows in (1, 2, 3)}
        assert found == {1: below, 2: below, 3: [1, 2, 3, 4]}
        assert not runner.riding(SamplingNeeds(constrained=True), 3)


@pytest.mark.parametrize(
    ("level", "pieces"),
    [
        ("none", ["draft", "verify", "accept", "commit"]),
        ("verify", ["draft", "verify", "accept", "commit"]),
        ("step", [None]),
    ],
)
def test_a_step_in_one_graph_stamps_its_own_phases(level: str, pieces: list[str | None]) -> None:
    """What it leaves is kept by nobody; its phases last a while without requests."""
    runner = runner_of("ngram", max_batch=1, graph=level)
    with torch.inference_mode():
        launch = runner._prepared(1, 32, NEEDS, nodes=9)
    assert [phase for phase, _ in launch.pieces] == pieces
    assert hasattr(launch.step, "tree") == (level == "verify")
    assert set(launch.idle_ms) == (set(PHASES) if level == "step" else set())


def test_the_host_has_its_turns_between_the_phases_of_a_step_with_grammars() -> None:
    """What is grafted counts as part of the draft; the turns themselves count for no phase."""
    runner, done = runner_of(max_batch=1), list[Any]()
    turns = {name: partial(done.append, name) for name in ("offer", "mask")}
    runner._parts.state.constraints = SimpleNamespace(read=done.append, **turns)  # type: ignore[assignment]
    step: Any = SimpleNamespace(nodes="nodes")
    pieces = runner._with_turns(step, [(phase, partial(done.append, phase)) for phase in CONSTRAINED])
    for _, work in pieces:
        work()
    assert done == ["draft", "offer", "graft", "nodes", "verify", "mask", "accept", "commit"]
    assert [phase for phase, _ in pieces] == ["draft", None, "draft", None, "verify", None, "accept", "commit"]


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 5)])
def test_rows_are_rounded_up_to_a_bucket(rows: int, bucket: int) -> None:
    assert runner_of(max_batch=5, graph="draft").num_rows_of(rows) == bucket


def test_a_chunk_is_booked_with_what_it_adds_to_an_idle_step() -> None:
    """Of each phase, and no less than nothing."""
    runner = runner_of(max_batch=1, graph="step")
    alone, joint = _Variant(1, 1, NEEDS), _Variant(1, 1, NEEDS, 3)
    steps: Any = None
    runner._captured = {
        alone: _Launch(steps, [], {"verify": 5.0, "accept": 2.0}),
        joint: _Launch(steps, [], {"verify": 8.0, "accept": 1.5}),
    }
    chunk: Any = SimpleNamespace(size=3)
    assert runner._recorded(alone, None) is runner._captured[alone] and not runner.riding_ms
    for times in (1, 2):
        assert runner._recorded(alone, chunk) is runner._captured[joint]
        assert runner.riding_ms == {"verify": 3.0 * times, "accept": 0.0}


def test_what_plain_steps_keep_is_observed_before_a_draft_and_where_it_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = runner_of("ngram", max_batch=2, adaptive=True)
    sizes = [1] * 3 + [4, 4] + [1] * (COLUMNS + 1) + [4]
    asked, observed = iter(sizes), list[tuple[int, int, int]]()
    sizing = runner._parts.sizing
    assert sizing is not None
    monkeypatch.setattr(sizing, "next", lambda rows: next(asked))
    for step in range(len(sizes)):
        monkeypatch.setattr(runner, "_observe", lambda rows, bound, step=step: observed.append((step, rows, bound)))
        assert runner._next_nodes(2, 50 + step, NEEDS) == sizes[step]
    full = 5 + COLUMNS
    assert observed == [(3, 2, 53), (full, 2, 50 + full), (full + 1, 2, 51 + full)]


def test_the_drafter_observes_the_rows_of_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, seen = runner_of("ngram", max_batch=3, adaptive=True), list[Any]()
    monkeypatch.setattr(
        runner._parts.backlog, "take", lambda batch: seen.append((len(batch.lengths), batch.max_length))
    )
    monkeypatch.setattr(type(runner._parts), "observe", lambda self, taken: seen.append(taken))
    runner._observe(2, 37)
    assert seen == [(2, 37), None]


def test_times_of_steps_are_medians_and_plain_ones_have_their_share_of_an_observation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first round warms up and does not count."""
    runner = runner_of("ngram", max_batch=2, adaptive=True)
    calls: list[int] = []

    def timed(work: Any, size: int, length: int, generator: torch.Generator) -> float:
        turn, place = divmod(len(calls), 12)
        calls.append(size)
        return 100.0 * place + (90, 5, 1, 3, 2, 4)[turn]

    monkeypatch.setattr(runner, "_timed_ms", timed)
    found = runner.step_times(NEEDS)
    assert calls == ([1] * 6 + [2] * 6) * 6
    for rows, first in ((1, 0), (2, 600)):
        plain, *drafting = (found.pop((rows, nodes)) for nodes in (1, 2, 4, 8, 9))
        assert drafting == [first + place + 3 for place in (100, 200, 300, 400)]
        assert plain == first + 3 + (first + 503) / COLUMNS
    assert not found


def test_what_is_timed_is_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The captured step and observation where there is one; else steps and observations of so many rows and tokens."""
    runner = runner_of("ngram", max_batch=2, adaptive=True, graph="step")
    played: list[Any] = []
    with torch.inference_mode():
        runner.prepare(NEEDS)
    monkeypatch.setattr(runner, "_play", lambda pieces: played.append(pieces))
    for rows, nodes in ((1, 4), (2, 1)):
        runner._pretended_step(rows, 33, nodes, NEEDS)()
        assert played[-1] is runner._captured[_Variant(rows, nodes, NEEDS)].pieces
    runner = runner_of("ngram", max_batch=2, adaptive=True)
    made: list[Any] = []
    monkeypatch.setattr(runner, "_play", lambda pieces: made.append(pieces))
    monkeypatch.setattr(runner, "_prepared", lambda *given, **how: SimpleNamespace(pieces=(given, how)))
    runner._pretended_step(2, 33, 4, NEEDS)()
    assert made == [((2, 33, NEEDS), {"nodes": 4})]
    observed: list[tuple[int, int]] = []
    monkeypatch.setattr(runner, "_observe", lambda rows, bound: observed.append((rows, bound)))
    pretended: list[tuple[int, int, int]] = []
    monkeypatch.setattr(runner._parts.state, "pretend", lambda *given: pretended.append(given[:3]))
    runner.step_times(NEEDS)
    length, pages = runner._parts.state.pretended_length(runner._longest), runner._parts.resources.num_pages
    assert observed == [(1, length), (2, length)] * 6
    assert set(pretended) == {(1, length, pages), (2, length, pages)}
    assert {given[:2] for given, _ in made[1:]} == {(1, length), (2, length)}


def test_steps_without_a_draft_in_each_number_of_nodes() -> None:
    """What a grammar forces is verified in any case, so its steps have one size."""
    runner = runner_of("ngram", max_batch=2, adaptive=True)
    assert runner._sizes(NEEDS) == (1, 2, 4, 8, 9) and runner._sizes(SamplingNeeds(constrained=True)) == (9,)
    assert engine_of(autoregressive(TARGET), Setup(adaptive=True), TARGET).runner._sizes(NEEDS) == (1,)
