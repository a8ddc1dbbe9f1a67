"""Steps whose size is chosen: the text stays the target's own, and the choice is the one that pays."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from algorithms.engine.engine import Engine
from algorithms.engine.request import Request
from algorithms.engine.transfers import StepResult
from algorithms.standalone import Standalone
from algorithms.step import adaptive
from algorithms.step.runner import StepRunner
from tests.algorithms.drafters import ALL_MAKERS, KINDS, TARGET, Watched, hinted
from tests.algorithms.test_mixed_prefill import Rides
from tests.algorithms.toy import Scripted, Setup, answers, autoregressive, changed, engine_of, requests, run, scripts

pytestmark = pytest.mark.usefixtures("random_drafters")

TOKENS = 20
COLUMNS = 4


def CHEAP(slots: int, nodes: int) -> float:
    """Nodes cost nearly nothing."""
    return 1.0 + 1e-6 * nodes


def DEAR(slots: int, nodes: int) -> float:
    """No draft pays."""
    return 1.0 if nodes == 1 else 1.0 + 1.5 * nodes


DRAFTING = [name for name in KINDS if name not in ("autoregressive", "dflash_window", "suffix_own")]


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters observe at least every few plain steps."""
    for module in ("context", "runner"):
        monkeypatch.setattr(f"algorithms.step.{module}.COLUMNS", COLUMNS)


@cache
def reference() -> tuple[list[Request], list[list[int]], list[list[int]]]:
    """Requests, greedy and sampled, some of which end early; what the target alone writes; and longer texts."""
    free = [changed(r, temperature=(0.0, 0.8)[r.id % 2]) for r in requests(4, TOKENS)]
    written = answers(free, Setup(max_batch=1), TARGET)
    asked = [changed(r, max_new_tokens=(TOKENS, 9)[r.id % 2]) for r in free]
    ends = [r.sampling.max_new_tokens for r in asked]
    return asked, [ids[:end] for ids, end in zip(written, ends, strict=True)], scripts(free, written)


class Random(adaptive.Pacing):
    """Takes any size at any time, and plain steps for a while."""

    def __init__(self, nodes: Sequence[int], seed: int = 3) -> None:
        self._random, self._num_sizes, self._num_plain = random.Random(seed), len(nodes) - 1, 0

    def reset(self) -> None: ...

    def update(self, choice: int | None, drafting: int) -> None:
        assert (choice is None or 0 <= choice <= self._num_sizes) and 1 <= drafting <= self._num_sizes

    def next(self, requests: int, step_ms: Sequence[float], smaller_pause: float = 1.0) -> int:
        if self._num_plain:
            self._num_plain -= 1
            return adaptive.NO_DRAFT
        if self._random.random() < 0.3:
            self._num_plain = self._random.choice((0, 2, COLUMNS + 1))
            return adaptive.NO_DRAFT
        return self._random.randint(1, self._num_sizes)


def paced(engine: Engine, pacing: adaptive.Pacing) -> Engine:
    assert engine.parts.sizing is not None
    engine.parts.sizing.pacing = pacing
    return engine


def sizes_of(engine: Engine) -> tuple[int, ...]:
    assert engine.parts.sizing is not None
    return engine.parts.sizing.nodes


def test_sizes_are_powers_of_two_and_the_algorithms_own() -> None:
    assert [adaptive.step_sizes(nodes) for nodes in (2, 4, 6, 33)] == [
        (1, 2), (1, 2, 4), (1, 2, 4, 6), (1, 2, 4, 8, 16, 32, 33),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "cost", "pause", "trials"), [(1, 1.01, adaptive.LEAST_PAUSE, 4), (1, 1.5, 267, 4), (8, 3, 267, 1)]
)
def test_drafting_is_tried_again_as_rarely_as_it_costs(rows: int, cost: float, pause: int, trials: int) -> None:
    pacing, step_ms = adaptive.Pacing((1, 2, 4)), [1.0, cost, 9.0]
    pacing.update(adaptive.NO_DRAFT, 1)
    taken = [pacing.next(rows, step_ms) for _ in range(2 * (pause + trials))]
    assert taken == ([adaptive.NO_DRAFT] * pause + [1] * trials) * 2
    pacing.update(2, 2)
    assert pacing.next(rows, step_ms) == 2


@pytest.mark.parametrize(("cost", "every"), [(1.005, adaptive.LEAST_STEPS), (1.5, 67)])
def test_a_larger_size_is_tried_as_rarely_as_it_costs(cost: float, every: int) -> None:
    pacing, step_ms = adaptive.Pacing((1, 2, 4, 8)), [1.0, 1.1, 2.0, 2.0 * cost]
    pacing.update(2, 2)
    assert _steps_of(pacing, 3, step_ms, 2 * every) == [every, 2 * every]


def test_a_smaller_size_is_tried_soon_and_then_rarely() -> None:
    """Where real steps are timed, and its steps could be so cheap that it were the better one."""
    sizing = adaptive.Sizing(8, (1,))
    sizing.set_costs(lambda slots, nodes: {1: 1.0, 2: 1.2, 4: 1.7, 8: 2.0}[nodes])
    result = StepResult.of_table(np.array([[7, 8, 9, 0, 0, 0, 0, 0, 2, 1, 3, 0]]), {})

    def places(steps: int, gain: float, known: int) -> list[int]:
        """Numbers of the next steps that have the size below the largest."""
        sizing.pacing.reset()
        sizing.pacing.update(3, 3)
        for _ in range(known):
            sizing.update(result, 2, 4, 1.7)
        sizing.policy.choice, sizing.policy.smaller[2], sizing.policy.own[2] = 3, 1 + gain, 1.0
        return [number for number in range(1, steps + 1) if sizing.next(1) == 4]

    assert places(100, 0.2, 0) == []  # no real step
    sizing.update(result, 2, 8, 2.0)
    assert places(12, 0.2, 0) == [adaptive.DECIDE_EVERY * time for time in (1, 2, 3)]
    # What it takes longer for the same tokens counts as lost, and 0.0075 of all time may be.
    pause = math.ceil((1.7 / 2.0 - 1 / 1.3) / adaptive.EXPLORATION_SHARE)
    assert places(3 * pause - 1, 0.3, adaptive.KNOWN_STEPS) == [pause, 2 * pause]
    assert (
        places(20, 0.2, adaptive.KNOWN_STEPS) == [adaptive.SMALLER_PAUSE, 2 * adaptive.SMALLER_PAUSE]
        and places(200, 0.9, 0) == []
    )


def _steps_of(pacing: adaptive.Pacing, size: int, step_ms: list[float], steps: int) -> list[int]:
    """Numbers of the next `steps` steps that have `size`."""
    return [number for number in range(1, steps + 1) if pacing.next(1, step_ms) == size]


@pytest.mark.parametrize(
    ("step_ms", "size"), [([1.0, 1.1, 1.2, 1.3], 3), ([1.0, 1.2, 2.2, 4.0], 1), ([1, 9, 9.1, 18], 2)]
)
def test_the_first_step_drafts_as_if_most_drafts_were_accepted(step_ms: list[float], size: int) -> None:
    pacing = adaptive.Pacing((1, 2, 4, 8))
    assert pacing.next(1, step_ms) == size
    pacing.update(None, 3)
    assert pacing.next(1, step_ms) == size
    pacing.update(adaptive.NO_DRAFT, 1)
    assert pacing.next(1, step_ms) == adaptive.NO_DRAFT


def test_a_choice_is_taken_over_every_fourth_step() -> None:
    """The policy takes in every step that drafts."""
    sizing = adaptive.Sizing(4, (1,))
    sizing.set_costs(CHEAP)
    taken: list[int] = []
    sizing.pacing.update = lambda choice, drafting: taken.append(number)  # type: ignore[method-assign, assignment]
    table = [7, 8, 9, 0, 0, 0, 0, 0, 2, 1, 3, 0]
    for number in range(1, 2 * adaptive.DECIDE_EVERY + 2):
        before = sizing.policy.own.copy()
        sizing.update(StepResult.of_table(np.array([table]), {}), number, 1 if number == 2 else 4)
        assert (sizing.policy.own == before) == (number == 2)
    assert taken == [1, 1 + adaptive.DECIDE_EVERY, 1 + 2 * adaptive.DECIDE_EVERY] and sizing.policy.choice == 2


def test_steps_of_one_size_have_nothing_to_choose() -> None:
    setup = Setup(adaptive=True)
    assert run(autoregressive(TARGET), requests(1, 4), setup, TARGET).adaptive is None


@pytest.mark.parametrize(
    ("maker", "graph"),
    [(maker, "none") for maker in DRAFTING] + [(maker, "step") for maker in ("eagle3_tree", "standalone_chain")],
)
def test_the_text_does_not_depend_on_the_sizes(monkeypatch: pytest.MonkeyPatch, maker: str, graph: str) -> None:
    """Sizes that change at random: catches observations of another size, rows that plain steps mix up, and prompts that
    ride in steps of another size."""
    asked, alone, texts = reference()
    algorithm = hinted(ALL_MAKERS[maker](), texts)
    setup = Setup(
        max_batch=2, page_size=4, graph=graph, async_steps=int(graph == "step"), adaptive=True, step_costs=CHEAP
    )
    engine, rides = engine_of(algorithm, setup, TARGET), Rides(monkeypatch)
    done = paced(engine, Random(sizes_of(engine))).generate(asked)
    assert [c.token_ids for c in done.completions] == alone
    assert (rides.in_steps > 0) == (graph == "step")
    assert done.adaptive is not None and done.adaptive["steps_by_nodes"]["1"]
    assert sum(map(bool, done.adaptive["steps_by_nodes"].values())) > 1 + (algorithm.num_nodes > 2)
    assert any(accepted for c in done.completions for accepted in c.accepted_counts)


@pytest.mark.parametrize(
    "maker", ["dflash_tree", "eagle3_chain", "mixed", "naive_eagle", "ngram", "standalone_chain", "standalone_tree"]
)
def test_drafts_behind_plain_steps_are_those_of_every_run(maker: str) -> None:
    """Catches caches with holes: what a drafter drafts behind a text does not depend on how it was written."""
    asked = requests(1, max_new_tokens=20)

    def drafts(pacing: type[adaptive.Pacing]) -> dict[tuple[int, ...], list[int]]:
        algorithm = ALL_MAKERS[maker]()
        watched = Watched(algorithm)
        engine = engine_of(algorithm, Setup(max_batch=1, adaptive=True, step_costs=CHEAP), TARGET)
        paced(engine, pacing(sizes_of(engine))).generate(asked)
        return watched.by_text()

    class Whole(adaptive.Pacing):
        def next(self, requests: int, step_ms: Sequence[float], smaller_pause: float = 1.0) -> int:
            return self._largest

    class Sometimes(Random):
        def next(self, requests: int, step_ms: Sequence[float], smaller_pause: float = 1.0) -> int:
            return min(super().next(requests, step_ms), 1) * self._num_sizes

    always, sometimes = drafts(Whole), drafts(Sometimes)
    both = always.keys() & sometimes.keys()
    assert both and all(always[text] == sometimes[text] for text in both)


def generated(correct: bool, costs: adaptive.StepCosts | None, decoys: bool = False) -> dict[str, int]:
    """Steps by nodes of a drafter that is always right or always wrong."""
    asked = requests(3, 24)
    texts = scripts(asked, answers(requests(3, 40), Setup(max_length=80), TARGET))
    scripted = Scripted(texts, 7, lambda position, depth: correct, decoys)
    setup = Setup(max_batch=1, adaptive=True, step_costs=costs, max_length=80)
    done = run(scripted, asked, setup, TARGET)
    assert [c.token_ids for c in done.completions] == answers(asked, setup, TARGET)
    assert done.adaptive is not None
    return done.adaptive["steps_by_nodes"]


def test_a_drafter_that_is_never_right_is_left_alone() -> None:
    steps = generated(correct=False, costs=DEAR)
    assert steps["8"] == 0 and steps["1"] >= sum(steps.values()) - 10 - adaptive.EXPLORED_SLOTS


@pytest.mark.parametrize("decoys", [False, True], ids=["chain", "tree"])
def test_a_drafter_that_is_always_right_drafts_all(decoys: bool) -> None:
    steps = generated(correct=True, costs=CHEAP, decoys=decoys)
    assert steps[max(steps, key=int)] == sum(steps.values())


@pytest.mark.parametrize("maker", ["eagle3_chain", "ngram"])
def test_costs_are_measured_where_none_are_given(maker: str) -> None:
    """Before the first request, for every batch and size; what that wrote is gone."""
    asked = requests(3, 6)
    engine = engine_of(ALL_MAKERS[maker](), Setup(max_batch=2, adaptive=True), TARGET)
    done = engine.generate(asked)
    assert [c.token_ids for c in done.completions] == answers(asked, Setup(max_batch=2), TARGET)
    assert done.adaptive is not None
    costs = {(cost["batch"], cost["nodes"]): cost["step_ms"] for cost in done.adaptive["costs"]}
    assert costs.keys() == {(rows, nodes) for rows in (1, 2) for nodes in sizes_of(engine)}
    assert all(spent_ms > 0 for spent_ms in costs.values())


@pytest.mark.parametrize("graph", ["none", "step"])
def test_real_steps_correct_measured_costs(monkeypatch: pytest.MonkeyPatch, graph: str) -> None:
    """By a clock that says 2 ms for each real step, where 1 ms was measured. Steps with a prefill say nothing."""
    read: list[int] = []

    def step_times(runner: StepRunner, needs: object) -> dict[tuple[int, int], float]:
        runner._observed_ms = dict.fromkeys((1, 2), 0.0)
        return {(slots, nodes): 1.0 for slots in (1, 2) for nodes in (1, 2, 4, 5)}

    monkeypatch.setattr(StepRunner, "step_times", step_times)
    monkeypatch.setattr(StepRunner, "spent_ms", lambda *step: read.append(1) or 2.0)
    joined, recorded, asked = [], StepRunner._recorded, requests(6, 10)

    def launched(runner: StepRunner, variant: Any, prefill: Any) -> Any:
        joined.extend([prefill] if prefill is not None else [])
        return recorded(runner, variant, prefill)

    monkeypatch.setattr(StepRunner, "_recorded", launched)
    setup = Setup(max_batch=2, adaptive=True, graph=graph, async_steps=int(graph == "step"))
    done = run(ALL_MAKERS["eagle3_chain"](), asked, setup, TARGET)
    assert [c.token_ids for c in done.completions] == answers(asked, Setup(max_batch=2), TARGET)
    assert done.adaptive is not None
    costs = {(cost["batch"], cost["nodes"]): cost["step_ms"] for cost in done.adaptive["costs"]}
    assert 1.2 < max(costs.values()) <= 2.0 and costs[1, 1] <= 2.0
    assert (len(joined) > 1) == (graph == "step")
    assert done.num_steps - len(joined) - 1 <= len(read) <= done.num_steps - len(joined)
    given = run(ALL_MAKERS["eagle3_chain"](), asked[:2], replace(setup, step_costs=CHEAP), TARGET).adaptive
    assert given is not None and max(cost["step_ms"] for cost in given["costs"]) < 1.0002


@pytest.mark.parametrize(
    ("rule", "graph", "expected"),
    [
        ("block", "none", "algo=standalone samples its drafts .rule block.*expected the rule target_only"),
        ("target_only", "verify", "expected runtime.graph=auto, none or step, got verify"),
    ],
)
def test_what_cannot_be_adaptive_is_refused(rule: str, graph: str, expected: str) -> None:
    algorithm = Standalone(Standalone.Config(steps=3, rule=rule), TARGET, "random")
    with pytest.raises(ValueError, match=expected):
        engine_of(algorithm, Setup(adaptive=True, graph=graph), TARGET)
