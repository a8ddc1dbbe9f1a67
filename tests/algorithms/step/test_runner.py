"""Which steps are captured, what is run for a step, and how their times are booked."""

from typing import Any

import pytest
import torch

from algorithms.step.context import COLUMNS
from algorithms.step.runner import StepRunner, _captured
from algorithms.step.sampling_params import SamplingNeeds
from algorithms.step.step import CONSTRAINED, PHASES
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


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 5)])
def test_rows_are_rounded_up_to_a_bucket(rows: int, bucket: int) -> None:
    assert runner_of(max_batch=5, graph="draft").bucket_of(rows) == bucket


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

    monkeypatch.setattr("algorithms.step.runner._TIMED_RUNS", 5)
    monkeypatch.setattr(runner, "_timed_ms", timed)
    found = runner.step_times(NEEDS)
    assert calls == ([1] * 6 + [2] * 6) * 6
    for rows, first in ((1, 0), (2, 600)):
        plain, *drafting = (found.pop((rows, nodes)) for nodes in (1, 2, 4, 8, 9))
        assert drafting == [first + place + 3 for place in (100, 200, 300, 400)]
        assert plain == first + 3 + (first + 503) / COLUMNS
    assert not found


def test_steps_that_are_timed_leave_no_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one step for each batch size and number of nodes, and logits are large."""
    runner = runner_of("ngram", max_batch=2, adaptive=True)
    prepared, steps = runner._prepared, []

    def noted(*given: Any, **how: Any) -> Any:
        launch = prepared(*given, **how)
        steps.append(launch.step)
        return launch

    monkeypatch.setattr("algorithms.step.runner._TIMED_RUNS", 1)
    monkeypatch.setattr(runner, "_prepared", noted)
    runner.step_times(NEEDS)
    assert len(steps) == 10 and not any(hasattr(step, name) for step in steps for name in ("tree", "hidden", "logits"))


def test_steps_without_a_draft_in_each_number_of_nodes() -> None:
    """What a grammar forces is verified in any case, so its steps have one size."""
    runner = runner_of("ngram", max_batch=2, adaptive=True)
    assert runner._sizes(NEEDS) == (1, 2, 4, 8, 9) and runner._sizes(SamplingNeeds(constrained=True)) == (9,)
    assert engine_of(autoregressive(TARGET), Setup(adaptive=True), TARGET).runner._sizes(NEEDS) == (1,)
