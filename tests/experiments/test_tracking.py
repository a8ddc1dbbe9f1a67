"""The tracker: silent, inside the run folder, and never able to cost a run."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import hydra
import pytest
import yaml

from experiments.app.compose import build_config, register
from experiments.app.schema import CONFIG_FOLDER, TrackerConfig
from experiments.report.tables import flatten
from experiments.report.tracking import scalars, tracking
from experiments.sweep.main import long_name

ROW: dict[str, Any] = {
    "algo": "dflash",
    "speedup_decode": 2.5,
    "acceptance_at": [0.9, 0.8, None],
    "num_accepted_histogram": [1, 2, 3, 0],
    "phase_times_ms": {"draft": 1.0, "verify": 2.0},
    "lossless": {"checked": 3, "identical": 3, "near_ties": 0, "first_difference": None},
}
BASELINE = {"algo": "autoregressive", "decode_tokens_per_s": 10.0}
SUMMARY: dict[str, Any] = {"name": "run", "task": "generate", "backend": "fa4", "model": "tiny"}
SUMMARY |= {"sampling": {"temperature": 0.5}, "rows": [BASELINE, ROW]}
CONFIG = {"algo": {"name": "dflash"}, "sampling": {"seed": 3}}


def stand_in(monkeypatch: pytest.MonkeyPatch, fails: str = "") -> MagicMock:
    """Stands for wandb: keeps what it is given, or fails where told to."""
    wandb = MagicMock(logged={}, summary={})

    def init(**options: Any) -> MagicMock:
        wandb.started, wandb.tags = options, tuple(options["tags"])
        return wandb

    wandb.init.side_effect = RuntimeError("no route to host\nsecond line") if fails == "init" else init
    wandb.log.side_effect = OSError("disk full") if fails == "log" else wandb.logged.update
    wandb.Table.side_effect = wandb.Histogram.side_effect = lambda **options: options
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return wandb


def wandb_config(**changes: Any) -> TrackerConfig:
    return TrackerConfig(**{"name": "wandb", "mode": "offline", **changes})


def tracked(config: TrackerConfig, folder: Path, name: str = "run", sweep: str | None = None) -> list[str]:
    with tracking(config, folder, CONFIG, "generate", name, sweep) as tracker:
        return tracker.finish(SUMMARY, ROW)


def test_summary_config_and_tables_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = stand_in(monkeypatch)
    assert tracked(wandb_config(tags=["mine"]), tmp_path) == []
    assert wandb.started["config"] == {"algo.name": "dflash", "sampling.seed": 3}
    wandb.finish.assert_called_once_with(exit_code=0)
    assert wandb.started["mode"] == "offline" and "id" not in wandb.started
    assert wandb.tags == ("mine", "generate", "fa4", "tiny", "dflash")
    assert wandb.started["name"] == "run" and wandb.started["job_type"] == "generate"
    assert wandb.summary["phase_times_ms/verify"] == 2.0 and wandb.summary["speedup_decode"] == 2.5
    assert wandb.summary["sampling/temperature"] == 0.5
    table = wandb.logged["rows"]
    algo = table["columns"].index("algo")
    assert [line[algo] for line in table["data"]] == ["autoregressive", "dflash"]
    assert wandb.logged["acceptance_at"]["data"] == [[1, 0.9], [2, 0.8]]
    counts, edges = wandb.logged["num_accepted"]["np_histogram"]
    assert counts == [1, 2, 3, 0] and edges == [-0.5, 0.5, 1.5, 2.5, 3.5]
    assert wandb.logged["phase_times_ms"]["data"] == [["draft", 1.0], ["verify", 2.0]]


def test_a_job_of_a_sweep_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb, folder = stand_in(monkeypatch), tmp_path / "abc123"
    tracked(wandb_config(), folder, "algo=dflash", "trees")
    kept = {name: wandb.started[name] for name in ("group", "id", "resume", "name")}
    assert kept == {"group": "trees", "id": "trees-abc123", "resume": "allow", "name": "algo=dflash"}
    monkeypatch.setenv("WANDB_SWEEP_ID", "agent")
    tracked(wandb_config(), folder, "algo=dflash", "trees")
    assert "id" not in wandb.started, "wandb agent gives the id itself"


def test_a_run_that_goes_on_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = stand_in(monkeypatch)
    report: Any = SimpleNamespace(emitted_tokens=30, elapsed_s=2.0, tokens_per_step=3.0, num_finished=1)
    with tracking(wandb_config(), tmp_path, CONFIG, "generate", "run") as tracker:
        tracker.live("dflash", report)
        tracker.live("dflash", report)
    assert wandb.logged["live/dflash/tokens_per_s"] == 15.0 and wandb.logged["live/dflash/tokens_per_step"] == 3.0
    assert wandb.log.call_count == 1, "not every step is a message"


def test_a_run_that_fails_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = stand_in(monkeypatch)
    with pytest.raises(ZeroDivisionError), tracking(wandb_config(), tmp_path, CONFIG, "generate", "run"):
        raise ZeroDivisionError
    wandb.finish.assert_called_once_with(exit_code=1)


@pytest.mark.parametrize("fails", ["init", "log"])
def test_a_failure_becomes_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    stand_in(monkeypatch, fails)
    (warning,) = tracked(wandb_config(), tmp_path)
    assert "\n" not in warning and "run folder is complete" in warning


def test_the_sweep_of_wandb_agent_is_made_of_settings_that_exist() -> None:
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    sweep = yaml.safe_load((CONFIG_FOLDER / "wandb_sweep.yaml").read_text())
    assert sweep["command"] == ["${env}", "python", "${program}", "${args_no_hyphens}"] and sweep["program"] == "run.py"
    values = {
        name: {"value": each.get("value", each.get("values", [None])[-1])} for name, each in sweep["parameters"].items()
    }
    typed = create_sweep_command_args({"args": values})["args_no_hyphens"]
    register()
    with hydra.initialize_config_dir(config_dir=str(CONFIG_FOLDER), version_base="1.3"):
        config = build_config(hydra.compose("config", [long_name(argument) for argument in typed]))
    assert config.sweep.name == "agent" and config.tracker.mode == "online"


def test_no_tracker_imports_nothing_and_a_missing_package_becomes_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert tracked(TrackerConfig(), tmp_path) == tracked(wandb_config(mode="disabled"), tmp_path) == []
    assert len(tracked(wandb_config(), tmp_path)) == 1


def test_offline_runs_stay_in_the_run_folder_and_say_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert tracked(wandb_config(), tmp_path) == []
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert capfd.readouterr() == ("", "")


def test_flat_names_keep_their_path() -> None:
    values = {"a": {"b": {"c": 1}}, "list": [1], "none": None, "text": "x"}
    assert flatten(values) == {"a/b/c": 1, "list": [1], "none": None, "text": "x"}
    assert scalars(values) == {"a/b/c": 1, "text": "x"}
