"""The run folder: files are whole or absent, folders are never shared, status.json says how a run ended."""

import errno
import json
import os
import signal
import time
from pathlib import Path

import pytest

from experiments.app.errors import UserError
from experiments.app.files import json_lines, to_json, write_whole
from experiments.report import run_folder as records
from experiments.report.run_folder import RunFolder, open_run_folder
from tests.experiments.forked import Forked


def status(folder: Path) -> str:
    return str(json.loads((folder / "status.json").read_text())["status"])


def recorded(folder: Path) -> list[int]:
    return [json.loads(line)["id"] for line in (folder / "requests.jsonl").read_text().splitlines()]


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.json"
    write_whole(path, "old")

    def crash(source: object, target: object) -> None:
        raise OSError("power cut")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="power cut"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"]


def test_figures_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        to_json({"speedup_wall": float("nan")})


def test_runs_of_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    paths = [RunFolder(tmp_path / "run").path for _ in range(3)]
    assert [path.name for path in paths] == ["run", "run-2", "run-3"]


def test_a_finished_run_says_done_and_the_summary_is_written_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    whole = records.write_whole
    monkeypatch.setattr(records, "write_whole", lambda path, text: (written.append(path.name), whole(path, text)))
    with open_run_folder(tmp_path / "run") as folder:
        assert status(folder.path) == "running"
        texts = {"requests.jsonl": json_lines([{"id": 0}, {"id": 1}]), "report.html": ""}
        folder.write_results(texts, {"speedup_decode": None})
    assert status(folder.path) == "done" and recorded(folder.path) == [0, 1]
    assert json.loads((folder.path / "summary.json").read_text()) == {"speedup_decode": None}
    assert written.index("summary.json") > max(written.index("requests.jsonl"), written.index("report.html"))


@pytest.mark.parametrize(
    ("error", "expected"),
    [(KeyboardInterrupt(), "interrupted"), (RuntimeError("bug"), "failed"), (UserError("no finite logit"), "failed")],
)
def test_a_run_that_breaks_off_says_so_and_keeps_its_requests(
    tmp_path: Path, error: BaseException, expected: str
) -> None:
    with pytest.raises(type(error)) as caught, open_run_folder(tmp_path / "run") as folder:
        folder.write("config.yaml", "a: 1")
        folder.record({"id": 0})
        raise error
    told = f"requests that had ended: 1, in {folder.path}/requests.jsonl\ngo on with python run.py resume={folder.path}"
    assert expected != "interrupted" or str(caught.value) == told
    assert status(tmp_path / "run") == expected and recorded(tmp_path / "run") == [0]
    assert not (tmp_path / "run" / "summary.json").exists()


def test_requests_are_on_disk_as_they_end(tmp_path: Path) -> None:
    with open_run_folder(tmp_path / "run") as folder:
        for i in range(3):
            folder.record({"id": i})
            assert recorded(folder.path) == list(range(i + 1))
    assert json.loads((tmp_path / "run/status.json").read_text())["requests"] == 3


def test_a_full_disk_keeps_what_ended_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New files cannot be written any more; the status goes into the place of the old one."""

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="the disk is full") as caught, open_run_folder(tmp_path / "run") as folder:
        folder.write("config.yaml", "")
        folder.record({"id": 0})
        monkeypatch.setattr(records, "write_whole", full)
        folder.write("report.html", "x")
    assert f"requests that had ended: 1, in {tmp_path}" in str(caught.value)
    assert status(tmp_path / "run") == "failed" and recorded(tmp_path / "run") == [0]


def test_a_heartbeat_tells_that_the_run_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "HEARTBEAT_S", 0.01)
    with open_run_folder(tmp_path / "run") as folder:
        folder.record({"id": 0})
        end, found = time.monotonic() + 5, {}
        while "heartbeat" not in found and time.monotonic() < end:
            found = json.loads((folder.path / "status.json").read_text())
        assert found["status"] == "running" and found["requests"] == 1 and found["heartbeat"] >= found["started"]
    assert status(tmp_path / "run") == "done" and not any(p.suffix == ".tmp" for p in (tmp_path / "run").iterdir())


def test_a_killed_run_keeps_what_ended(tmp_path: Path) -> None:
    def killed() -> None:
        with open_run_folder(tmp_path / "run") as folder:
            folder.record({"id": 0})
            folder.record({"id": 1})
            os.kill(os.getpid(), signal.SIGKILL)

    assert Forked(killed).wait() == -signal.SIGKILL
    assert recorded(tmp_path / "run") == [0, 1] and status(tmp_path / "run") == "running"


@pytest.mark.parametrize("older", [False, True])
def test_input_that_forbids_a_run_leaves_what_was_there(older: bool, tmp_path: Path) -> None:
    """A tracker has a folder of its own in that of the run; a folder that the user named may hold other files."""
    if older:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "mine.txt").write_text("kept")
    with pytest.raises(UserError), open_run_folder(tmp_path / "run") as folder:
        folder.write("config.yaml", "a: 1")
        (folder.path / "wandb" / "offline-run").mkdir(parents=True)
        (folder.path / "wandb" / "offline-run" / "run.wandb").write_text("log")
        raise UserError("the KV pool is too small")
    assert [path.name for path in tmp_path.rglob("*")] == (["run", "mine.txt"] if older else [])
