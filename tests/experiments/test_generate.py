"""Whole runs of the program on small random models: records, identity, sweeps, and what it refuses.

The reference implementation stands in for the kernels here, which have their own tests: what is under test is
everything between the command line and the files.
"""

import json
import os
import subprocess
import sys
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from experiments.app.schema import REPO_ROOT
from experiments.report.metrics import MethodResult
from tests.experiments import program
from tests.experiments.forked import fork_workers
from tests.experiments.program import Done, Run, model_settings

CONDITIONS = {"name", "task", "backend", "model", "device", "dtype", "impl", "sampling", "revision", "versions", "rows"}
SMALL = ("data.limit=3", "sampling.max_new_tokens=6")


@pytest.fixture
def run(models: Path, tmp_path: Path) -> Run:
    return partial(program.called, tmp_path, *SMALL, *model_settings(models))


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def requests_of(done: Done) -> list[dict[str, Any]]:
    return done.lines("requests.jsonl")


def test_a_run_leaves_a_complete_and_consistent_record(run: Run) -> None:
    done = run()
    assert done.returncode == 0 and done.folder is not None, done.stderr
    assert {p.name for p in done.folder.iterdir()} == {
        "config.yaml", "decodings.jsonl", "generate.csv", "generate.jsonl", "generate.md", "report.html",
        "requests.jsonl", "status.json", "summary.json",
    }  # fmt: skip
    assert read(done.folder, "status.json")["status"] == "done"
    summary, requests = read(done.folder, "summary.json"), requests_of(done)
    assert set(summary) >= CONDITIONS
    plain, ours = summary["rows"]
    assert set(plain) == set(ours) == set(get_type_hints(MethodResult)), "every figure is declared, and no other"
    assert (plain["method"], ours["method"]) == ("autoregressive", "dflash")
    assert ours["lossless"] == {"checked": 3, "identical": 3, "near_ties": 0, "first_difference": None}
    assert summary["impl"] == "reference" and summary["dtype"] == "float32"
    assert set(ours["phase_times_ms"]) == {"draft", "verify", "accept", "commit", "host"}
    assert ours["output_tokens"] == sum(len(request["token_ids"]) for request in requests)
    for request in requests:
        emitted = sum(count + 1 for count in request["accepted_counts"])
        assert len(request["token_ids"]) == emitted - request["num_truncated"] <= 6
        assert request["identical"] and request["token_ids"] == request["baseline_token_ids"]
    for shown in ("autoregressive", "dflash · fa4", "3/3", "time of a step", "report:"):
        assert shown in done.stdout
    assert "not" in done.stdout and "GPU" in done.stdout


def test_sampled_output_is_identical_too_and_a_seed_repeats_it(run: Run) -> None:
    settings = (["sampling.seed=5"], ["sampling.seed=5", "runtime.max_batch=2", "baseline=false"])
    done = [run("sampling=sample", *given) for given in (*settings, ["sampling.seed=6", "baseline=false"])]
    assert [each.returncode for each in done] == [0, 0, 0]
    tokens = [[request["token_ids"] for request in requests_of(each)] for each in done]
    assert done[0].results[-1]["lossless"]["identical"] == 3
    assert tokens[0] == tokens[1] != tokens[2]
    (second,) = done[1].results
    assert second["speedup_decode"] is None and second["speedup_wall"] is None and second["lossless"]["checked"] == 0


def test_a_sweep_gives_every_job_a_folder(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_workers(monkeypatch)
    done = run("-m", "backend=fa4,torch", "baseline=false", "sweep.share_target=true")
    assert done.returncode == 0, done.stderr
    (sweep,) = (tmp_path / "outputs" / "sweeps").iterdir()
    assert datetime.strptime(sweep.name, "%Y-%m-%d_%H-%M-%S"), "without a name it is called by its start"
    rows = {read(path.parent, "summary.json")["backend"]: path.parent for path in sweep.glob("*/summary.json")}
    assert sorted(rows) == ["fa4", "torch"]
    alone = run("backend=torch", "baseline=false")
    assert alone.returncode == 0
    swept = [json.loads(line) for line in (rows["torch"] / "requests.jsonl").read_text().splitlines()]
    written = [[(each["token_ids"], each["accepted_counts"]) for each in side] for side in (swept, requests_of(alone))]
    assert written[0] == written[1], "the second job of a worker is not what a run of its own is"
    other = run("-m", "--config-dir=elsewhere", "backend=fa4,torch")
    assert other.returncode == 2 and "a sweep takes settings alone, got the option --config-dir" in other.stderr


def test_autoregressive_alone_needs_no_drafter(run: Run) -> None:
    done = run("algo=autoregressive", "model.draft_path=nowhere")
    assert done.returncode == 0, done.stderr
    (row,) = done.results
    assert row["tokens_per_step"] == 1.0 and row["acceptance_at"] == [] and row["speedup_decode"] == 1.0


def test_the_program_itself_runs_kernels_in_the_interpreter(models: Path, tmp_path: Path) -> None:
    """In a process of its own: the interpreter must be switched on before Triton is imported. The compiler of torch,
    which nothing here needs, would take longer to import than the models to load."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    short = ["data=prompt", "data.text=hi", "sampling.max_new_tokens=2", "algo.block_size=2", "task.repeats=1"]
    command = [sys.executable, "-X", "importtime", str(REPO_ROOT / "run.py"), *model_settings(models), *short]
    command += ["name=test", "runtime.device=cpu", "tracker=none"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "outputs" / "test").iterdir()
    summary = read(folder, "summary.json")
    assert summary["impl"] == "triton-interpreter" and summary["rows"][-1]["lossless"]["identical"] == 1
    assert "interpreter" in done.stdout
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "triton" in imported and "torch._dynamo" not in imported


def test_a_prompt_from_a_file_is_decoded(run: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"turns": ["two", "three"]}\n')
    done = run("data=jsonl", f"data.path={prompts}", "data.limit=null", "baseline=false")
    assert done.returncode == 0, done.stderr
    assert [request["prompt"] for request in requests_of(done)] == ["one", "two", "three"]
