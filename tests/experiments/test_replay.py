"""`task=replay`: what is predicted from a recorded text is what the engine does, and the arithmetic behind it."""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from algorithms.algorithm import DraftTree
from experiments.app.step_times import StepTime, StepTimes, read_step_times
from experiments.report.intervals import ratio_interval, wilson
from experiments.report.json_log import json_lines
from experiments.studies.replay.recorder import Recorded, Recorder, _drafts, confirmed
from experiments.studies.replay.steps import Drafts, all_steps, engine_steps, perfect, steps_of, summary
from experiments.studies.replay.task import Candidate, Replay, best_of_each_batch
from specdec_kernels import build_tree
from tests.algorithms.drafters import MAKERS, hinted, load_random_drafters
from tests.algorithms.toy import Setup, autoregressive, engine_of, random_target
from tests.algorithms.toy import requests as toy_requests
from tests.algorithms.toy import run as toy_run
from tests.experiments import program

METHODS = [
    "+task.methods.standalone={name: standalone, steps: 3}",
    "task.methods.eagle3_tree={name: eagle3, steps: 4, topk: 3, num_nodes: 12}",
]
ONLY = ("standalone", "eagle3_tree", "ngram", "dflash")


def called(home: Path, *words: str) -> tuple[int, str, list[dict[str, Any]], Path | None]:
    """Exit code, messages, results and folder of a run of the shipped small family."""
    done = program.called(home, "model=tiny", *words)
    results = done.results if done.folder and done.returncode == 0 else []
    return done.returncode, done.stdout + done.stderr, results, done.folder


@pytest.fixture(scope="module")
def engine_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """What the engine does: sampled, so that drafts are right now and then."""
    words = ["task=compare", "task.data=[code]", "task.limit=2", "task.repeats=1", "runtime.max_batch=1"]
    only = f"task.only=[{','.join(ONLY)}]"
    sampling = ["sampling.temperature=1", "sampling.max_new_tokens=14"]
    code, text, rows, folder = called(tmp_path_factory.mktemp("engine"), *words, only, *sampling, *METHODS)
    assert code == 0 and folder is not None, text
    return rows, folder


def test_predicted_steps_are_the_engines(engine_run: tuple[list[dict[str, Any]], Path], tmp_path: Path) -> None:
    """Chains, trees and lookups; the texts are cut into parts that run side by side."""
    engine, folder = engine_run
    shared = [
        "data=code",
        "data.limit=2",
        "runtime.max_batch=4",
        "sampling.temperature=1",
        "sampling.max_new_tokens=14",
    ]
    more = [f"task.trace={folder}", f"task.cost={folder}"]
    only = f"task.only=[{','.join(ONLY)}]"
    code, text, rows, own = called(tmp_path, "task=replay", *shared, *more, only, *METHODS)
    assert code == 0 and own is not None, text
    found = {row["method"]: row for row in rows}
    assert len(engine) == 1 + len(ONLY)
    for row in engine:
        ours = found[row["method"]]
        assert ours["row_steps"] == row["row_steps"], row["method"]
        assert ours["tokens_per_step"] == pytest.approx(row["output_tokens"] / row["row_steps"])
        assert ours["predicted"]["1"]["tokens_per_s"] == pytest.approx(row["decode_tokens_per_s"], rel=1e-6)
    assert len({row["row_steps"] for row in engine}) > 3  # the methods differ, so equal figures mean something
    assert found["oracle"]["row_steps"] <= min(found[name]["row_steps"] for name in ONLY)
    assert found["perfect, 16 nodes"]["row_steps"] == 2  # 14 tokens of 2 requests
    assert "figures are those of runtime.max_batch=1" in text and "batch 1:" in text
    assert read_step_times(str(own / "cost.json")) == read_step_times(str(folder))


def test_the_text_is_the_recorded_one_whatever_the_target_would_write(tmp_path: Path) -> None:
    words = ["data=code", "data.limit=1", "sampling.max_new_tokens=8", "task.only=[dflash]", "task=replay"]
    trace = tmp_path / "trace"
    trace.mkdir()
    tokens = [5, 5, 5, 5, 5, 5, 5, 5]
    (trace / "requests.jsonl").write_text(json_lines([{"id": 0, "token_ids": tokens, "text": "a\u0085b\u2028c"}]))
    code, text, rows, _ = called(tmp_path, *words, f"task.trace={trace}")
    assert code == 0, text
    assert rows[0]["output_tokens"] == 8 and "positions of the trace" in text
    (trace / "requests.jsonl").write_text(json.dumps({"id": 0, "token_ids": tokens, "num_prompt_tokens": 1}) + "\n")
    code, text, *_ = called(tmp_path, *words, f"task.trace={trace}")
    assert code == 2 and "got 1" in text
    code, text, *_ = called(tmp_path, *words, f"task.trace={tmp_path}")
    assert code == 2 and "expected the folder of a run with requests.jsonl" in text


def test_sampled_drafts_are_refused(tmp_path: Path) -> None:
    drawn = "+task.methods.drawn={name: standalone, rule: rejection}"
    code, text, *_ = called(tmp_path, "task=replay", "data.limit=1", drawn, "task.only=[drawn]")
    assert code == 2 and "drawn has the rule rejection" in text


def test_the_text_confirms_the_longest_right_path() -> None:
    """A tree with two branches, a token that is right below one that is wrong, and an unused node."""
    tokens = torch.tensor([[7, 1, 2, 3, 4, 9]])
    parents = torch.tensor([[-1, 0, 0, 2, 1, -2]], dtype=torch.int32)
    lengths = torch.tensor([1])
    tree = DraftTree(tokens, build_tree(parents, lengths, impl="reference"))

    def found(*text: int) -> list[int]:
        return confirmed(tree, lengths, torch.tensor([[0, 7, *text]])).flatten().tolist()

    assert found(2, 3, 8) == [2, 1]  # through the second branch to its end
    assert found(1, 3, 8) == [1, 0]  # 4 was drafted, 3 hangs on the other branch
    assert found(9, 4, 8) == [0, 0]  # the unused node is no draft


def random_drafts(rng: random.Random, length: int) -> Drafts:
    accepted = [rng.randint(0, min(3, length - start)) for start in range(length)]
    return Drafts(accepted, [rng.random() < 0.5 for _ in accepted])


def test_the_oracle_is_the_cheapest_choice() -> None:
    """Against every sequence of choices; a drafter that accepts most is not always the best one."""
    rng = random.Random(0)
    for _ in range(40):
        length = rng.randint(1, 7)
        choices, costs = [random_drafts(rng, length) for _ in range(2)], [1.0, rng.uniform(0.5, 2)]

        def cost(plan: tuple[int, ...], length: int = length, choices: Any = choices, costs: Any = costs) -> float:
            start, total = 0, 0.0
            while start < length:
                total += costs[plan[start]]
                start += choices[plan[start]].accepted[start] + 1
            return total

        steps = steps_of(choices, costs)
        assert sum(costs[step.choice] for step in steps) == pytest.approx(
            min(map(cost, product(range(2), repeat=length)))
        )
        assert sum(step.tokens for step in steps) == length


def test_the_bound_and_the_counts_of_several_outputs() -> None:
    first, second = Drafts([2, 0, 1], [True, False, True]), Drafts([1, 0, 1], [False, True, True])
    assert perfect(4, 2).accepted == [2, 2, 2, 1]
    row = summary(all_steps([[first, second]]), max_depth=2)
    assert row["output_tokens"] == 6 and row["row_steps"] == 1 + 2
    assert row["acceptance"] == {"accepted": [3, 1], "rejected": [0, 1], "no_draft": [0, 1]}


def test_intervals() -> None:
    low, high = wilson(8, 10) or [0.0, 0.0]
    assert (low, high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 0) is None and ratio_interval([3], [1]) is None
    assert ratio_interval([4, 4, 4], [2, 2, 2]) == [2, 2]
    # The mean of 1, 2, 3 with Student's t of two degrees of freedom.
    assert ratio_interval([1, 2, 3], [1, 1, 1]) == pytest.approx([0.0, 2 + 4.303 / 3**0.5])


def test_times_lie_between_measured_ones_only(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    entries = [
        {"method": "a", "batch": 2, "nodes": 2, "step_ms": 4.0},
        {"method": "a", "batch": 2, "nodes": 6, "step_ms": 8.0, "rows": 1.0},
        {"batch": 2, "nodes": 3, "step_ms": 1.0},
    ]
    file.write_text(json.dumps({"steps": entries}))
    times = read_step_times(str(file))
    assert times.of("a", 2, 4) == StepTime("a", 2, 4, 6.0, 1.5)
    assert times.of("a", 2, 7) is None and times.of("a", 1, 2) is None
    between = times.of("other", 2, 3)
    assert between == StepTime("other", 2, 3, 1.0, 2.0)
    assert times.batches == [2] and StepTimes(times.entries).of("other", 2, 4) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", 'a list "steps"'),
        ('{"steps": []}', "no times"),
        ('{"steps": [{"batch": 1, "nodes": 2, "step_ms": 0}]}', "step_ms: expected a number above 0, got 0"),
        ('{"steps": [{"batch": 1, "nodes": 2, "step_ms": 1}, {"batch": 1, "nodes": 2, "step_ms": 2}]}', "two times"),
        ("no json", "expected a JSON file"),
    ],
)
def test_times_that_cannot_be_used(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_step_times(str(tmp_path / "cost.json"))


def test_the_best_row_of_each_batch_is_one_that_can_run() -> None:
    def row(method: str, kind: str, **rates: float | None) -> dict[str, Any]:
        predicted = {batch.strip("_"): {"tokens_per_s": rate} for batch, rate in rates.items()}
        return {"method": method, "kind": kind, "predicted": predicted}

    rows = [
        row("autoregressive", "baseline", _1=10.0, _8=70.0),
        row("tree", "method", _1=30.0, _8=60.0),
        row("chain", "method", _1=20.0, _8=None),
        row("perfect", "perfect", _1=90.0, _8=90.0),
    ]
    assert {batch: best["method"] for batch, best in best_of_each_batch(rows).items()} == {
        "1": "tree", "8": "autoregressive",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["eagle_chain", "eagle3_tree", "standalone_tree", "dflash_window"])
def test_drafts_at_every_position_give_the_steps_of_the_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where steps are captured and read late: requests end at different steps, move rows, and are stepped once
    more behind their end, in padded batches."""
    load_random_drafters(monkeypatch)
    target = random_target()
    asked = [r.with_sampling(max_new_tokens=8 + r.id, seed=r.id) for r in toy_requests(5)]
    answers = [c.token_ids for c in toy_run(autoregressive(target), asked, Setup(), target).completions]
    texts = [[*r.prompt_ids, *tokens] for r, tokens in zip(asked, answers, strict=True)]

    def found(setup: Setup) -> list[Drafts]:
        recorder = Recorder([hinted(MAKERS[name](), texts)], texts)
        engine_of(recorder, setup, target).generate(asked)
        accepted, ran_out = recorder.figures()[0].tolist()
        ends = [(i, len(r.prompt_ids) - 1, len(text) - 1) for i, (r, text) in enumerate(zip(asked, texts, strict=True))]
        return [Drafts(accepted[i][a:b], ran_out[i][a:b]) for i, a, b in ends]

    eager = found(Setup())
    assert found(Setup(graph="step", async_steps=1, max_batch=4)) == eager
    engine = toy_run(hinted(MAKERS[name](), texts), asked, Setup(), target).completions
    for drafts, completion in zip(eager, engine, strict=True):
        steps = [(step.accepted, step.ran_out) for step in steps_of([drafts], [1.0])]
        # The last step may go on behind the recorded text.
        assert steps[:-1] == list(zip(completion.accepted_counts, completion.ran_out, strict=True))[:-1]
        assert len(steps) == len(completion.accepted_counts)
    assert max(max(drafts.accepted) for drafts in eager) > 1


def test_requests_share_the_steps_of_the_engine() -> None:
    """Each takes the row that is free first; the last one runs alone."""
    assert engine_steps([5, 3, 4], 1) == 12
    assert engine_steps([5, 3, 4], 2) == 7
    assert engine_steps([5, 3, 4], 8) == 5
    assert engine_steps([], 2) == 0
    assert engine_steps([5, 3, 4], 1, late=1) == 15
    assert engine_steps([5, 3, 4], 2, late=0.5) == 8  # 5.5, and 3.5 before 4.5


def test_a_step_of_fewer_requests_takes_the_time_of_a_smaller_batch() -> None:
    entries = (StepTime("a", 1, 4, 2.0, 1.0), StepTime("a", 8, 4, 4.0, 6.0), StepTime("a", 32, 4, 9.0, 26.0))
    times = StepTimes(entries)
    _, eight, most = entries
    assert times.at_requests(eight, 6.0) == 4.0
    assert times.at_requests(eight, 3.5) == 3.0  # between 1 and 6 requests
    assert times.at_requests(eight, 8.0) == 4.5  # between 6 and 26
    assert times.at_requests(most, 30.0) == 10.0  # no larger batch: on the line from the smaller one
    assert StepTimes((eight,)).at_requests(eight, 3.0) == 4.0


@pytest.mark.parametrize("async_steps", [0, 1])
def test_steps_behind_an_unread_end_are_counted(async_steps: int) -> None:
    """Whether a step is read before the next one is launched depends on the clock; the last end is always read late."""
    target, asked = random_target(), toy_requests(3)
    done = toy_run(autoregressive(target), asked, Setup(async_steps=async_steps, max_batch=1), target)
    late = done.launched_rows - sum(len(completion.accepted_counts) for completion in done.completions)
    assert async_steps <= late <= async_steps * len(asked)


def test_the_end_of_an_output_is_no_rejection_and_cuts_the_last_step() -> None:
    """Five tokens, the last step drafts past the end: it produces what is recorded, and nothing was rejected."""
    steps = steps_of([Drafts([2, 0, 0, 2, 1], [False, True, True, True, True])], [1.0])
    assert [(step.accepted, step.tokens) for step in steps] == [(2, 3), (2, 2)]
    found = summary([steps], max_depth=3)
    assert found["output_tokens"] == 5 and found["tokens_per_step"] == 2.5
    assert found["acceptance"] == {"accepted": [2, 2, 0], "rejected": [0, 0, 1], "no_draft": [0, 0, 1]}
    request = toy_requests(1)[0]
    trace = [Recorded(request, [4, 5, 6])]
    first = len(request.prompt_ids) - 1
    accepted, ran_out = [[0] * first + counts for counts in ([1, 2, 1], [0, 0, 0])]
    (((drafts,),),) = [_drafts([[[accepted], [ran_out]]], trace)]
    assert drafts == Drafts([1, 2, 1], [False, True, True]), "where the output ends nothing can be rejected"


def test_a_prediction_takes_the_times_of_its_own_method() -> None:
    times = StepTimes((StepTime(None, 2, 4, 9.0, 2), StepTime("own", 2, 4, 3.0, 2)))
    for name, step_ms in (("own", 3.0), ("other", 9.0)):
        task: Any = SimpleNamespace(_times=times)
        found = Replay._rate(task, Candidate(name, "method", [], 3, 4), 2, [5, 5], 20)
        assert found == {"tokens_per_s": pytest.approx(20e3 / (5 * step_ms)), "step_ms": step_ms}
