"""What each rule accepts of the same samples: the probe in the engine, and the task on models."""

import pytest

from algorithms.dflash.drafting import DFlash
from experiments.studies.rules import Probe, summary
from tests.algorithms.drafters import TARGET, load_random_drafters
from tests.algorithms.toy import Setup, answers, changed, requests
from tests.algorithms.toy import run as served
from tests.experiments.program import Run
from tests.experiments.test_tasks import run  # noqa: F401


def test_the_probe_leaves_the_text_of_autoregressive_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    load_random_drafters(monkeypatch)
    asked = [changed(r, temperature=1.0) for r in requests(4, max_new_tokens=8)]
    inner = DFlash(DFlash.Config(block_size=4, topk=2, num_nodes=8, draft_sampling="sample"), TARGET, "random")
    probe = Probe(inner, ("traversal", "multi_round"))
    setup = Setup(max_batch=2)
    assert [c.token_ids for c in served(probe, asked, setup, TARGET).completions] == answers(asked, setup, TARGET)
    assert set(probe.found) == {request.sampling.seed for request in asked}
    figures = summary(probe.found, 0, 1)
    assert 0 < figures["expected_accepted"] < 3 and figures["num_requests"] == 4
    low, high = figures["gain_interval"]
    assert low <= figures["gain"] <= high and summary(probe.found, 1, 1)["gain"] == 0


def test_the_task_on_models(run: Run) -> None:  # noqa: F811
    found = run("task=verification_rules", "task.only=[dflash_independent]", "runtime.adaptive=true")
    assert found.returncode == 0, found.stderr
    of_models = [row for row in found.results if row["row_steps"]]
    rules = ["traversal", "greedy_paths", "without_replacement", "k_seq", "multi_round"]
    assert [row["rule"] for row in of_models] == rules
    assert all(0 <= row["expected_accepted"] <= 3 for row in of_models) and of_models[-1]["gain"] == 0
    assert len(found.read("verification_rules.jsonl").splitlines()) == len(found.results) == 5
    assert len(found.read("requests.jsonl").splitlines()) == of_models[0]["num_requests"]
