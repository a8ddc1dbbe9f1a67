"""`task=adaptive` and `runtime.adaptive_cost` on the shipped small family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.app.step_times import StepTime, StepTimes, read_step_times
from tests.experiments.test_replay import called

BRIEF = ["data.limit=1", "runtime.max_batch=1", "sampling.max_new_tokens=4"]


def test_every_number_of_nodes_stands_beside_the_choice(tmp_path: Path) -> None:
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
    assert "least: code ×1, ngram, adaptive at" in out


def test_costs_of_one_run_serve_the_next(tmp_path: Path) -> None:
    run = ["algo=eagle3", "algo.steps=3", "data=code", "baseline=false", "runtime.adaptive=true", *BRIEF]
    code, out, (first, *_), folder = called(tmp_path, *run)
    assert code == 0 and folder is not None, out
    code, out, (second, *_), _ = called(tmp_path, *run, f"runtime.adaptive_cost={folder}")
    assert code == 0, out
    assert second["adaptive"]["costs"] == first["adaptive"]["costs"]


def test_times_of_a_method_replace_those_of_all(tmp_path: Path) -> None:
    every, own = StepTime(None, 1, 4, 3.0, 1), StepTime("ngram", 1, 4, 2.0, 1)
    alone, other = StepTime("autoregressive", 1, 1, 1.0, 1), StepTime("dflash", 1, 4, 9.0, 1)
    times = StepTimes((other, own, every, alone))
    assert sorted(t.step_ms for t in times.kinds_of("ngram", "autoregressive")) == [1.0, 2.0]
    assert sorted(t.step_ms for t in times.kinds_of("suffix", "autoregressive")) == [1.0, 3.0]
    with pytest.raises(ValueError, match=r"runtime\.adaptive_cost: expected a JSON file"):
        read_step_times(str(tmp_path / "none.json"), "runtime.adaptive_cost")
