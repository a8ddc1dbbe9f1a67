"""The tracker: silent, inside the run folder, and never able to cost a run."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from experiments.app.schema import TrackerConfig
from experiments.report.tables import flatten
from experiments.report.tracking import scalars, track

ROW: dict[str, Any] = {
    "algo": "dflash",
    "speedup_decode": 2.5,
    "acceptance_at": [0.9, 0.8, None],
    "num_accepted_histogram": [1, 2, 3, 0],
    "ledger_ms": {"draft": 1.0, "verify": 2.0},
    "lossless": {"checked": 3, "identical": 3, "near_ties": 0, "first_difference": None},
}
BASELINE = {"algo": "autoregressive", "decode_tokens_per_s": 10.0}
SUMMARY: dict[str, Any] = {
    "name": "run",
    "task": "generate",
    "backend": "fa4",
    "model": "tiny",
    "sampling": {"temperature": 0.5},
    "rows": [BASELINE, ROW],
}
CONFIG = {"algo": {"name": "dflash"}, "sampling": {"seed": 3}}


class Recorder(types.ModuleType):
    """Stands for wandb: keeps what it is given, or fails where told to."""

    def __init__(self, fails: str = "") -> None:
        super().__init__("wandb")
        self.fails, self.logged, self.started = fails, {}, {}
        self.summary: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "Settings":
            return lambda **options: options
        if name in ("Table", "Histogram"):
            return lambda **options: (name, options)
        raise AttributeError(name)

    def init(self, **options: Any) -> Recorder:
        if self.fails == "init":
            raise RuntimeError("no route to host\nsecond line")
        self.started = options
        return self

    def log(self, values: dict[str, Any]) -> None:
        if self.fails == "log":
            raise OSError("disk full")
        self.logged |= values

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *details: object) -> None:
        return None


def wandb_config(**changes: Any) -> TrackerConfig:
    return TrackerConfig(**{"name": "wandb", "mode": "offline", **changes})


def test_summary_config_and_tables_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert track(wandb_config(tags=["mine"]), tmp_path, CONFIG, SUMMARY, ROW) == []
    assert wandb.started["config"] == CONFIG and wandb.started["mode"] == "offline"
    assert wandb.started["tags"] == ["mine", "generate", "fa4", "tiny", "dflash"]
    assert wandb.started["name"] == "run" and wandb.started["job_type"] == "generate"
    assert wandb.summary["ledger_ms/verify"] == 2.0 and wandb.summary["speedup_decode"] == 2.5
    assert wandb.summary["sampling/temperature"] == 0.5
    table = wandb.logged["rows"][1]
    assert [dict(zip(table["columns"], line, strict=True))["algo"] for line in table["data"]] == [
        "autoregressive",
        "dflash",
    ]
    assert wandb.logged["acceptance_at"][1]["data"] == [[1, 0.9], [2, 0.8]]
    counts, edges = wandb.logged["num_accepted"][1]["np_histogram"]
    assert counts == [1, 2, 3, 0] and edges == [-0.5, 0.5, 1.5, 2.5, 3.5]
    assert wandb.logged["ledger_ms"][1]["data"] == [["draft", 1.0], ["verify", 2.0]]


@pytest.mark.parametrize("fails", ["init", "log"])
def test_a_failure_becomes_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Recorder(fails))
    (warning,) = track(wandb_config(), tmp_path, CONFIG, SUMMARY, ROW)
    assert "\n" not in warning and "run folder is complete" in warning


def test_a_missing_package_becomes_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert len(track(wandb_config(), tmp_path, CONFIG, SUMMARY, ROW)) == 1


@pytest.mark.parametrize("config", [TrackerConfig(), wandb_config(mode="disabled")])
def test_no_tracker_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: TrackerConfig) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert track(config, tmp_path, CONFIG, SUMMARY, ROW) == []


def test_offline_runs_stay_in_the_run_folder_and_say_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert track(wandb_config(), tmp_path, CONFIG, SUMMARY, ROW) == []
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert capfd.readouterr() == ("", "")


def test_flat_names_keep_their_path() -> None:
    values = {"a": {"b": {"c": 1}}, "list": [1], "none": None, "text": "x"}
    assert flatten(values) == {"a/b/c": 1, "list": [1], "none": None, "text": "x"}
    assert scalars(values) == {"a/b/c": 1, "text": "x"}
