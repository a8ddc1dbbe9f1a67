"""`task=adaptive` on the shipped small family."""

import json
from pathlib import Path

import pytest

from tests.experiments.test_replay import called


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
