"""Whole runs of the program on small random models: records, identity, sweeps, and what it refuses.

The reference implementation stands in for the kernels here, which have their own tests: what is under test is
everything between the command line and the files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.app import cli
from experiments.app.schema import REPO_ROOT
from experiments.sweep.main import main
from experiments.tasks.run import run_task
from tests.runtime.tiny_folders import edit_json, small_dflash_config, write_dflash, write_target


@dataclass(frozen=True)
class Done:
    """How a call of the program ended."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]
CONDITIONS = ["name", "task", "backend", "model", "device", "dtype", "impl", "sampling", "revision", "versions", "rows"]
FIGURES = [
    "data",
    "method",
    "algo",
    "num_requests",
    "output_tokens",
    "tokens_per_step",
    "num_accepted_histogram",
    "acceptance_at",
    "decode_tokens_per_s",
    "wall_tokens_per_s",
    "speedup_decode",
    "speedup_wall",
    "ttft_ms",
    "step_ms",
    "ledger_ms",
    "lossless",
    "accuracy",
    "compiled",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    target = write_target(folder / "target")
    write_dflash(folder / "dflash", small_dflash_config(target.config))
    return folder


def words(models: Path, *arguments: str, target: Path | None = None, draft: Path | None = None) -> list[str]:
    """A small run of the random models; later words win, and options come first, as argparse wants them."""
    return [
        *(word for word in arguments if word.startswith("-")),
        "model=local",
        f"model.path={target or models / 'target'}",
        f"model.draft_path={draft or models / 'dflash'}",
        "runtime.device=cpu",
        "runtime.impl=reference",
        "tracker=none",
        "data.limit=3",
        "sampling.max_new_tokens=6",
        "name=test",
        *(word for word in arguments if not word.startswith("-")),
    ]


@pytest.fixture
def run(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The program in this process, which spares its imports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(cli.FULL_ERROR, raising=False)

    def call(*arguments: str, **folders: Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["run.py", *words(models, *arguments, **folders)])
        code = 0
        try:
            main(run_task, [str(REPO_ROOT / "run.py")])
        except SystemExit as end:
            code = int(end.code or 0)
        return Done(code, *capfd.readouterr())

    return call


def only_folder(home: Path) -> Path:
    (folder,) = (home / "outputs" / "test").iterdir()
    return folder


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def requests_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]


def test_a_run_leaves_a_complete_and_consistent_record(run: Run, tmp_path: Path) -> None:
    done = run()
    assert done.returncode == 0, done.stderr
    folder = only_folder(tmp_path)
    assert {p.name for p in folder.iterdir()} == {
        "config.yaml",
        "decodings.jsonl",
        "generate.csv",
        "generate.jsonl",
        "generate.md",
        "report.html",
        "requests.jsonl",
        "status.json",
        "summary.json",
    }
    assert read(folder, "status.json")["status"] == "done"
    summary, requests = read(folder, "summary.json"), requests_of(folder)
    assert [key for key in CONDITIONS if key not in summary] == []
    plain, ours = summary["rows"]
    assert [key for key in FIGURES for row in (plain, ours) if key not in row] == []
    assert (plain["method"], ours["method"]) == ("autoregressive", "dflash")
    assert ours["lossless"] == {"checked": 3, "identical": 3, "near_ties": 0, "first_difference": None}
    assert summary["impl"] == "reference" and summary["dtype"] == "float32"
    assert set(ours["ledger_ms"]) == {"draft", "verify", "accept", "commit", "host"}
    assert ours["output_tokens"] == sum(len(request["token_ids"]) for request in requests)
    for request in requests:
        emitted = sum(count + 1 for count in request["accepted_counts"])
        assert len(request["token_ids"]) == emitted - request["num_truncated"] <= 6
        assert request["identical"] and request["token_ids"] == request["baseline_token_ids"]
    for shown in ("autoregressive", "dflash · fa4", "3/3", "time of a step", "report:"):
        assert shown in done.stdout
    assert "not" in done.stdout and "GPU" in done.stdout


def test_sampled_output_is_identical_too_and_a_seed_repeats_it(run: Run, tmp_path: Path) -> None:
    assert run("sampling=sample", "sampling.seed=5").returncode == 0
    assert run("sampling=sample", "sampling.seed=5", "runtime.max_batch=2", "baseline=false").returncode == 0
    assert run("sampling=sample", "sampling.seed=6", "baseline=false").returncode == 0
    folders = sorted((tmp_path / "outputs" / "test").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    tokens = [[request["token_ids"] for request in requests_of(folder)] for folder in folders]
    assert read(folders[0], "summary.json")["rows"][-1]["lossless"]["identical"] == 3
    assert tokens[0] == tokens[1] != tokens[2]
    (second,) = read(folders[1], "summary.json")["rows"]
    assert second["speedup_decode"] is None and second["speedup_wall"] is None and second["lossless"]["checked"] == 0


def test_a_sweep_gives_every_job_a_folder(run: Run, tmp_path: Path) -> None:
    done = run("-m", "backend=fa4,torch", "baseline=false", "sweep.share_target=true")
    assert done.returncode == 0, done.stderr
    (sweep,) = (tmp_path / "outputs" / "sweeps").iterdir()
    assert datetime.strptime(sweep.name, "%Y-%m-%d_%H-%M-%S"), "without a name it is called by its start"
    rows = {read(path.parent, "summary.json")["backend"]: path.parent for path in sweep.glob("*/summary.json")}
    assert sorted(rows) == ["fa4", "torch"]
    assert run("backend=torch", "baseline=false").returncode == 0
    written = [
        [(request["token_ids"], request["accepted_counts"]) for request in requests_of(folder)]
        for folder in (rows["torch"], only_folder(tmp_path))
    ]
    assert written[0] == written[1], "the second row of a worker is not what a run of its own is"
    other = run("-m", "--config-dir=elsewhere", "backend=fa4,torch")
    assert other.returncode == 2 and "a sweep takes settings alone, got the option --config-dir" in other.stderr


def test_autoregressive_alone_needs_no_drafter(run: Run, tmp_path: Path) -> None:
    done = run("algo=autoregressive", draft=tmp_path / "nowhere")
    assert done.returncode == 0, done.stderr
    (row,) = read(only_folder(tmp_path), "summary.json")["rows"]
    assert row["tokens_per_step"] == 1.0 and row["acceptance_at"] == [] and row["speedup_decode"] == 1.0


def test_the_program_itself_runs_kernels_in_the_interpreter(models: Path, tmp_path: Path) -> None:
    """In a process of its own: the interpreter must be switched on before Triton is imported. The compiler of torch,
    which nothing here needs, would take longer to import than the models to load."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    small = ["runtime.impl=auto", "data.limit=1", "sampling.max_new_tokens=2", "algo.block_size=2"]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(REPO_ROOT / "run.py"), *words(models, *small)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    summary = read(only_folder(tmp_path), "summary.json")
    assert summary["impl"] == "triton-interpreter" and summary["rows"][-1]["lossless"]["identical"] == 1
    assert "interpreter" in done.stdout
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "triton" in imported and "torch._dynamo" not in imported


def refused(done: Done, home: Path, *expected: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 24
    for text in expected:
        assert text in done.stderr, done.stderr
    assert not (home / "outputs").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["runtime.num_pages=1"], ["KV pool", "runtime.num_pages"]),
        (["sampling.max_new_tokens=4000"], ["context is 512", "sampling.max_new_tokens"]),
        (["algo.block_size=200"], ["algo.block_size"]),
        (["model.draft_path=null"], ["model.draft_path"]),
    ],
)
def test_requests_that_cannot_be_served(run: Run, tmp_path: Path, arguments: list[str], expected: list[str]) -> None:
    refused(run(*arguments), tmp_path, *expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_a_device_that_is_not_there(run: Run, tmp_path: Path) -> None:
    refused(run("runtime.device=cuda"), tmp_path, "runtime.device=cuda", "runtime.device=cpu")


def test_model_folders_that_cannot_be_used(run: Run, tmp_path: Path) -> None:
    refused(run(target=tmp_path / "nowhere"), tmp_path, "nowhere")
    broken = tmp_path / "broken"
    write_target(broken)
    (broken / "config.json").unlink()
    refused(run(target=broken), tmp_path, "config.json", str(broken))


def test_a_drafter_of_another_target(run: Run, tmp_path: Path, models: Path) -> None:
    target = write_target(tmp_path / "other")
    write_dflash(tmp_path / "misfit", small_dflash_config(target.config))
    edit_json(tmp_path / "misfit" / "config.json", num_target_layers=99)
    refused(run(draft=tmp_path / "misfit"), tmp_path, "misfit", "99")


def test_a_prompt_from_a_file_is_decoded(run: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"turns": ["two", "three"]}\n')
    done = run("data=jsonl", f"data.path={prompts}", "data.limit=null", "baseline=false")
    assert done.returncode == 0, done.stderr
    assert [request["prompt"] for request in requests_of(only_folder(tmp_path))] == ["one", "two", "three"]
