"""`task=replay`: the steps that follow from a recorded text are those of the engine, and the arithmetic behind
them; and `task=adaptive` on the same family."""

import json
import random
import weakref
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from algorithms.algorithm import DraftTree
from algorithms.engine.engine import Engine
from algorithms.engine.request import Request
from experiments.app.files import json_lines
from experiments.report.intervals import ratio_interval, wilson
from experiments.studies.replay.recorder import (
    Drafts,
    Recorded,
    Recorder,
    _drafts,
    all_steps,
    confirmed,
    perfect,
    steps_of,
    summary,
)
from experiments.tasks import decoding
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
    sampling = ["sampling.temperature=1", "sampling.max_new_tokens=10"]
    code, text, rows, folder = called(tmp_path_factory.mktemp("engine"), *words, only, *sampling, *METHODS)
    assert code == 0 and folder is not None, text
    return rows, folder


def test_predicted_steps_are_the_engines(engine_run: tuple[list[dict[str, Any]], Path], tmp_path: Path) -> None:
    """Chains, trees and lookups; the texts are cut into parts that run side by side."""
    engine, folder = engine_run
    shared = [
        "data=code", "data.limit=2", "runtime.max_batch=4", "sampling.temperature=1", "sampling.max_new_tokens=10",
    ]  # fmt: skip
    only = f"task.only=[{','.join(ONLY)}]"
    code, text, rows, _ = called(tmp_path, "task=replay", *shared, f"task.trace={folder}", only, *METHODS)
    assert code == 0, text
    found = {row["method"]: row for row in rows}
    assert len(engine) == 1 + len(ONLY)
    for row in engine:
        ours = found[row["method"]]
        assert ours["row_steps"] == row["row_steps"], row["method"]
        assert ours["tokens_per_step"] == pytest.approx(row["output_tokens"] / row["row_steps"])
    assert len({row["row_steps"] for row in engine}) > 3  # the methods differ, so equal figures mean something
    assert found["oracle"]["row_steps"] <= min(found[name]["row_steps"] for name in ONLY)
    assert found["perfect, 16 nodes"]["row_steps"] == 2  # 10 tokens of 2 requests
    assert "figures are those of runtime.max_batch=1" in text


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


def test_the_oracle_is_the_shortest_choice() -> None:
    """Against every sequence of choices; the drafter that accepts most is not always the best one."""
    rng = random.Random(0)
    for _ in range(40):
        length = rng.randint(1, 7)
        choices = [random_drafts(rng, length) for _ in range(2)]

        def count(plan: tuple[int, ...], length: int = length, choices: Any = choices) -> int:
            start, total = 0, 0
            while start < length:
                total += 1
                start += choices[plan[start]].accepted[start] + 1
            return total

        steps = steps_of(choices)
        assert len(steps) == min(map(count, product(range(2), repeat=length)))
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


@cache
def asked_and_written() -> tuple[list[Request], list[list[int]]]:
    """Requests, and their prompts with their outputs."""
    target = random_target()
    asked = [r.with_sampling(max_new_tokens=8 + r.id, seed=r.id) for r in toy_requests(4)]
    done = toy_run(autoregressive(target), asked, Setup(), target).completions
    return asked, [[*r.prompt_ids, *completion.token_ids] for r, completion in zip(asked, done, strict=True)]


@pytest.mark.parametrize("name", ["eagle_chain", "eagle3_tree", "standalone_tree", "dflash_window"])
def test_drafts_at_every_position_give_the_steps_of_the_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where steps are captured and read late: requests end at different steps, move rows, and are stepped once
    more behind their end, in padded batches."""
    load_random_drafters(monkeypatch)
    target, (asked, texts) = random_target(), asked_and_written()

    def found(setup: Setup) -> list[Drafts]:
        recorder = Recorder([hinted(MAKERS[name](), texts)], texts)
        engine_of(recorder, setup, target).generate(asked)
        accepted, ran_out = recorder.figures()[0].tolist()
        ends = [(i, len(r.prompt_ids) - 1, len(text) - 1) for i, (r, text) in enumerate(zip(asked, texts, strict=True))]
        return [Drafts(accepted[i][a:b], ran_out[i][a:b]) for i, a, b in ends]

    eager = found(Setup())
    assert found(Setup(graph="step", async_steps=1, max_batch=3)) == eager
    engine = toy_run(hinted(MAKERS[name](), texts), asked, Setup(), target).completions
    for drafts, completion in zip(eager, engine, strict=True):
        steps = [(step.accepted, step.ran_out) for step in steps_of([drafts])]
        # The last step may go on behind the recorded text.
        assert steps[:-1] == list(zip(completion.accepted_counts, completion.ran_out, strict=True))[:-1]
        assert len(steps) == len(completion.accepted_counts)
    assert max(max(drafts.accepted) for drafts in eager) > 1


def test_the_end_of_an_output_is_no_rejection_and_cuts_the_last_step() -> None:
    """Five tokens, the last step drafts past the end: it produces what is recorded, and nothing was rejected."""
    steps = steps_of([Drafts([2, 0, 0, 2, 1], [False, True, True, True, True])])
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


def test_every_number_of_nodes_stands_beside_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine at a time: each has a pool of its own."""
    engines: list[weakref.ref[Engine]] = []

    def made(*given: Any) -> Engine:
        assert not any(engine() for engine in engines)
        engine = engine_of_plan(*given)
        engines.append(weakref.ref(engine))
        return engine

    engine_of_plan = decoding.engine_of
    monkeypatch.setattr(decoding, "engine_of", made)
    words = ["task=adaptive", "task.data=[code]", "task.limit=1", "task.batches=[1]", "task.only=[ngram]"]
    code, out, rows, folder = called(tmp_path, *words, "+task.methods.ngram.num_nodes=3", "sampling.max_new_tokens=4")
    assert code == 0 and folder is not None, out
    served = [json.loads(line)["method"] for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert served == ["autoregressive ×1, 1", *(f"ngram ×1, {name}" for name in ("configured", "2", "3", "adaptive"))]
    assert [row["setting"] for row in rows] == ["1", "configured", "2", "3", "adaptive"]
    assert {row["lossless"]["identical"] for row in rows[1:]} == {1}
    for row in rows[2:-1]:
        taken = {nodes for nodes, count in row["adaptive"]["steps_by_nodes"].items() if count}
        assert taken == {row["setting"]}
    fixed = max(row["decode_tokens_per_s"] for row in rows[1:-1])
    assert rows[-1]["ratio_to_best_fixed"] == pytest.approx(rows[-1]["decode_tokens_per_s"] / fixed)
    assert "least: code ×1, ngram, adaptive at" in out and len(engines) == 3
