"""The run folder: files are whole or absent, folders are never shared, status.json says how a run ended."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from experiments.app.errors import UserError
from experiments.report import run_folder as records
from experiments.report.run_folder import RunFolder, json_lines, open_run_folder, to_json, write_whole


def status(folder: Path) -> str:
    return str(json.loads((folder / "status.json").read_text())["status"])


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


def test_a_finished_run_says_done_and_has_everything(tmp_path: Path) -> None:
    with open_run_folder(tmp_path / "run") as folder:
        assert status(folder.path) == "running"
        folder.write_results({"requests.jsonl": json_lines([{"id": 0}, {"id": 1}])}, {"speedup_decode": None})
    assert status(folder.path) == "done"
    lines = (folder.path / "requests.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [0, 1]
    assert json.loads((folder.path / "summary.json").read_text()) == {"speedup_decode": None}


@pytest.mark.parametrize(("error", "expected"), [(KeyboardInterrupt(), "interrupted"), (RuntimeError("bug"), "failed")])
def test_a_run_that_breaks_off_says_so_and_has_no_summary(tmp_path: Path, error: BaseException, expected: str) -> None:
    with pytest.raises(type(error)), open_run_folder(tmp_path / "run") as folder:
        folder.write("config.yaml", "a: 1")
        raise error
    assert status(tmp_path / "run") == expected
    assert not (tmp_path / "run" / "summary.json").exists()


def test_the_summary_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    whole = records.write_whole
    monkeypatch.setattr(records, "write_whole", lambda path, text: (written.append(path.name), whole(path, text)))
    with open_run_folder(tmp_path / "run") as folder:
        folder.write_results({"requests.jsonl": "", "report.html": ""}, {})
    assert written.index("summary.json") > max(written.index("requests.jsonl"), written.index("report.html"))


def test_input_that_forbids_a_run_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError), open_run_folder(tmp_path / "run") as folder:
        folder.write("config.yaml", "a: 1")
        raise UserError("the KV pool is too small")
    assert list(tmp_path.iterdir()) == []
