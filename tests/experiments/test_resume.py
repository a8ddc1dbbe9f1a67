"""A run that was interrupted goes on to what an undisturbed run writes, times aside."""

import json
import os
import random
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from experiments.app import cli
from experiments.app.errors import UserError
from experiments.app.files import JsonLog, locked
from experiments.report.run_folder import RunFolder, open_run_folder
from experiments.sweep.folder import SweepFolder
from experiments.sweep.job import Task, as_job
from experiments.tasks.run import run_task
from tests.experiments.forked import Forked
from tests.experiments.program import model_settings

TIMES = ("emitted_at_ms", "ttft_ms", "total_ms")
TEXTS = ("data", "method", "output_tokens", "tokens_per_step", "num_accepted_histogram", "acceptance", "lossless",
         "answers", "num_drafted", "acceptance_rate", "finish_reasons")  # fmt: skip
random_place = random.Random(20)


def words(models: Path, *more: str) -> list[str]:
    return [
        *model_settings(models), "runtime.device=cpu", "runtime.impl=reference", "tracker=none", "data.limit=4",
        "sampling.max_new_tokens=6", "sampling.temperature=0.8", "runtime.max_batch=2", "task.repeats=1", *more,
    ]  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(cli.FULL_ERROR, raising=False)
    monkeypatch.setenv("SPECDEC_REVISION", "r1")
    return tmp_path


def run(*arguments: str, task: Task = run_task) -> int:
    """The program in this process; returns its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["run.py", *arguments])
        try:
            cli.main(task)
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def ending_behind(after: int, end: Callable[[], None]) -> Callable[[RunFolder, Mapping[str, Any]], None]:
    """A `RunFolder.record` that ends the run behind the `after`-th request."""
    record = RunFolder.record

    def last(self: RunFolder, request: Mapping[str, Any]) -> None:
        record(self, request)
        if len(self.requests.entries) == after:
            end()

    return last


def interrupt() -> None:
    raise KeyboardInterrupt


def interrupted(home: Path, after: int, *arguments: str) -> Path:
    """The folder of a run that ends by an interrupt behind its `after`-th request, in the middle of a line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "record", ending_behind(after, interrupt))
        assert run("name=broken", *arguments) == 130
    (folder,) = (home / "outputs" / "broken").iterdir()
    assert json.loads((folder / "status.json").read_text())["status"] == "interrupted"
    with open(folder / "requests.jsonl", "a") as file:
        file.write('{"data": "torn')
    return folder


def requests(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def texts(folder: Path) -> list[dict[str, Any]]:
    """What the rows of a run say of its texts."""
    rows = json.loads((folder / "summary.json").read_text())["rows"]
    return [{key: row[key] for key in TEXTS if key in row} for row in rows]


def same(first: Path, second: Path) -> None:
    assert requests(first) == requests(second) != []
    assert texts(first) == texts(second)


TASKS = {
    "a drafter that learns": ["algo=ngram"],
    "compare": ["task=compare", "task.limit=2", "task.only=[ngram,dflash]"],
    "throughput": ["task=throughput", "algo=dflash", "task.concurrency=[1,2]", "task.requests=2"],
}


@pytest.mark.parametrize("task", TASKS)
def test_an_interrupted_run_goes_on_to_the_same_table(task: str, models: Path, home: Path) -> None:
    arguments = [word for word in words(models, *TASKS[task]) if task != "compare" or word != "data.limit=4"]
    assert run("name=whole", *arguments) == 0
    (whole,) = (home / "outputs" / "whole").iterdir()
    total = sum(
        1 for line in (whole / "decodings.jsonl").read_text().splitlines() for _ in json.loads(line)["timed_requests"]
    )
    folder = interrupted(home, random_place.randrange(1, total), *arguments)
    assert run(f"resume={folder}") == 0
    same(folder, whole)
    status = json.loads((folder / "status.json").read_text())
    assert status["status"] == "done" and "resumed" in status and status["requests"] == total
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_a_killed_run_goes_on_to_the_same_requests(
    models: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, after = words(models, "algo=dflash"), random_place.randrange(1, 8)

    def killed() -> None:
        RunFolder.record = ending_behind(after, lambda: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[method-assign]
        run("name=killed", *arguments)

    assert Forked(killed).wait() == -signal.SIGKILL
    (folder,) = (home / "outputs" / "killed").iterdir()
    assert json.loads((folder / "status.json").read_text())["status"] == "running"
    assert run(f"resume={folder}") == 0
    assert run("name=whole", *arguments) == 0
    (whole,) = (home / "outputs" / "whole").iterdir()
    same(folder, whole)
    # Killed while it writes its last files, and after them.
    (folder / "status.json").write_text((folder / "status.json").read_text().replace('"done"', '"running"'))
    assert "this run is done" in refused(capsys, f"resume={folder}")
    (folder / "summary.json").unlink()
    assert run(f"resume={folder}") == 0
    same(folder, whole)


def test_what_ended_is_not_decoded_again(models: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = interrupted(home, 6, *words(models, "algo=dflash"))
    before = [(entry["method"], entry["id"]) for entry in requests_kept(folder)]
    seen: list[tuple[str, int]] = []
    record = RunFolder.record

    def noted(self: RunFolder, request: Mapping[str, Any]) -> None:
        seen.append((request["method"], request["id"]))
        record(self, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "record", noted)
        assert run(f"resume={folder}") == 0
    assert len(before) == 6 and not set(before) & set(seen)
    assert sorted(before + seen) == [(method, i) for method in ("autoregressive", "dflash") for i in range(4)]
    said = " ".join(capsys.readouterr().out.split())
    assert "2 of 4 requests ended before the run was resumed" in said and "no rates and no speedups" in said
    results = json.loads((folder / "summary.json").read_text())["rows"]
    assert [result["num_timed_rounds"] for result in results] == [0, 0]
    for result in results:
        assert result["speedup_decode"] is None and result["decode_tokens_per_s"] is None, "of two processes' clocks"
        assert result["tokens_per_step"] is not None


def requests_kept(folder: Path) -> list[dict[str, Any]]:
    return JsonLog(folder / "requests.jsonl").entries


@pytest.mark.parametrize("revision", ["r1", "r2"])
def test_a_row_of_a_sweep_goes_on_unless_the_revision_changed(
    revision: str, models: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = as_job(run_task, ["run.py"])
    arguments = ["sweep.name=trees", *words(models, "algo=dflash")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "record", ending_behind(6, interrupt))
        assert run(*arguments, task=row) == 130
    sweep = SweepFolder(home / "outputs/sweeps/trees")
    (record,) = sweep.records()
    assert len(requests_kept(sweep.path / record.id)) == 6 and sweep.state(record.id) == "killed"
    monkeypatch.setenv("SPECDEC_REVISION", revision)
    assert run(*arguments, task=row) == 0
    rows = (sweep.summary(record.id) or {})["rows"]
    assert rows[1]["num_resumed"] == (2 if revision == "r1" else 0)


def test_later_turns_of_a_conversation_go_on(models: Path, home: Path) -> None:
    (home / "talk.jsonl").write_text('{"turns": ["one", "and two"]}\n{"turns": ["three", "four", "five"]}\n')
    arguments = words(models, "algo=dflash", "data=jsonl", "data.path=talk.jsonl")
    assert run("name=whole", *arguments) == 0
    (whole,) = (home / "outputs" / "whole").iterdir()
    folder = interrupted(home, 7, *arguments)
    assert run(f"resume={folder}") == 0
    same(folder, whole)


@pytest.fixture(scope="module")
def broken_once(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home := tmp_path_factory.mktemp("broken"))
        patch.setenv("SPECDEC_REVISION", "r1")
        return interrupted(home, 2, *words(models, "algo=dflash"))


@pytest.fixture
def broken(broken_once: Path, home: Path) -> Path:
    """The folder of an interrupted run, in a home of its own."""
    folder = home / "outputs/broken" / broken_once.name
    shutil.copytree(broken_once, folder)
    edit_status(folder, cwd=str(home))
    return folder


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert run(*arguments) == 2
    return capsys.readouterr().err


def edit_status(folder: Path, **changes: Any) -> None:
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(status | changes))


def test_what_cannot_be_resumed_is_refused(
    broken: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = (broken / "requests.jsonl").read_text()
    assert "nowhere, which does not exist" in refused(capsys, "resume=nowhere")
    assert "which has no status.json" in refused(capsys, f"resume={home}")
    assert "leave out algo=ngram" in refused(capsys, f"resume={broken}", "algo=ngram")
    edit_status(broken, status="done")
    assert "this run is done" in refused(capsys, f"resume={broken}")
    edit_status(broken, status="running", pid=os.getppid())
    with locked(broken):
        assert f"still running, as process {os.getppid()}" in refused(capsys, f"resume={broken}")
    edit_status(broken, status="running", host="elsewhere", heartbeat=datetime.now(timezone.utc).isoformat())
    assert "still running" in refused(capsys, f"resume={broken}")
    edit_status(broken, host=socket.gethostname())
    edit_status(broken, status="interrupted", cwd="/elsewhere")
    assert "started in another folder: cd /elsewhere" in refused(capsys, f"resume={broken}")
    edit_status(broken, cwd=str(home), overrides=["task=losslessness", "tracker=none"])
    assert "task=losslessness cannot be resumed" in refused(capsys, f"resume={broken}")
    assert (broken / "requests.jsonl").read_text() == kept


def test_a_process_with_the_number_of_a_dead_run_does_not_block_it(broken: Path) -> None:
    edit_status(broken, status="running", pid=os.getppid())
    assert run(f"resume={broken}") == 0


def test_of_two_resumes_one_runs(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_run_folder(broken, resumed=True), pytest.raises(UserError, match="in use by another run"):
        RunFolder(broken, resumed=True)


@pytest.mark.parametrize("content", [None, "", "name: ["])
def test_a_folder_that_was_half_made_is_named(broken: Path, capsys: pytest.CaptureFixture[str], content: Any) -> None:
    (broken / "config.yaml").unlink() if content is None else (broken / "config.yaml").write_text(content)
    said = refused(capsys, f"resume={broken}")
    assert "start it again: python run.py " in said if content is None else "config.yaml" in said


def test_a_changed_revision_or_configuration_is_refused_unless_forced(
    broken: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECDEC_REVISION", "r2")
    said = refused(capsys, f"resume={broken}")
    assert "revision: r1 in the run, r2 now" in said and "resume_force=true goes on all the same" in said
    config = (broken / "config.yaml").read_text()
    (broken / "config.yaml").write_text(config.replace("page_size: 16", "page_size: 8"))
    assert "runtime.page_size: 8 in the run, 16 now" in refused(capsys, f"resume={broken}")
    assert run(f"resume={broken}", "resume_force=true") == 0


def test_a_finished_round_is_not_measured_again(models: Path, home: Path) -> None:
    arguments = [word for word in words(models, "algo=dflash") if word != "task.repeats=1"] + ["task.repeats=2"]
    folder = interrupted(home, 8, *arguments)
    (first,) = JsonLog(folder / "decodings.jsonl").entries
    assert run(f"resume={folder}") == 0
    entries = JsonLog(folder / "decodings.jsonl").entries
    assert [(e["method"], e["round"]) for e in entries] == [
        (m, r) for r in (0, 1) for m in ("autoregressive", "dflash")
    ]
    assert entries[0] == first
    rows = json.loads((folder / "summary.json").read_text())["rows"]
    assert [len(row["rounds"]["decode_tokens_per_s"]) for row in rows] == [1, 1], "one process decoded round 1 alone"
    assert rows[1]["speedup_decode"] == rows[1]["decode_tokens_per_s"] / rows[0]["decode_tokens_per_s"]


def test_a_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"id": 0}\n{"id": 1}\n{"id": 2')
    log = JsonLog(path)
    log.append({"id": 3})
    assert [entry["id"] for entry in JsonLog(path).entries] == [0, 1, 3]
    path.write_text('{"id": 0}\n{"id": 1}')
    assert [entry["id"] for entry in JsonLog(path).entries] == [0], "a line may be whole JSON and still lack its end"
