"""Launchers get the names of rows and run each once, wherever that is."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from experiments.app.errors import UserError
from experiments.app.schema import CONFIG_FOLDER
from experiments.sweep import driver
from experiments.sweep.folder import DONE, FAILED, SweepFolder
from experiments.sweep.processes import VISIBLE, slots
from tests.experiments.test_sweep import start, states  # noqa: F401

SBATCH = """#!{python}
import sys
from pathlib import Path
script = Path(sys.argv[-1])
Path({record!r}).write_text(script.read_text())
print("Submitted batch job 7")
"""


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IEXEC)


@pytest.mark.parametrize("launcher", ["submitit_local", "joblib"])
def test_rows_run_under_the_launchers_of_plugins(tmp_path: Path, start: Any, launcher: str) -> None:  # noqa: F811
    sweep, asked = SweepFolder(tmp_path / "outputs/sweeps/other"), ["-m", "sweep=other", f"hydra/launcher={launcher}"]
    limit = ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else ["hydra.launcher.timeout_min=5"]
    done = start(*asked, *limit, "seed=9,0", TOY_ENDING="9:failed")
    assert done.code == 1 and done.err.count("ZeroDivisionError") == 1, done.err
    assert states(sweep) == [FAILED, DONE], "a row that fails costs no other row"


def test_slurm_gets_one_array_with_the_presets_arguments(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: Any,  # noqa: F811
) -> None:
    """The script that reaches sbatch; the jobs themselves are made done, as if the cluster had run them."""
    tools, record = tmp_path / "bin", tmp_path / "script.sh"
    tools.mkdir()
    executable(tools / "sbatch", SBATCH.format(python=sys.executable, record=str(record)))
    executable(tools / "srun", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    from submitit.core.core import Job

    monkeypatch.setattr(Job, "results", lambda self: [SimpleNamespace(return_value=None)])
    own = ["hydra.launcher.partition=h200", "hydra.launcher.timeout_min=90", "hydra.launcher.array_parallelism=2"]
    done = start("-m", "sweep=far", "hydra/launcher=slurm", *own, "limit=1,2,3")
    assert "3 open" in done.out, done.err
    lines = set(record.read_text().splitlines())
    folder = tmp_path / "outputs/sweeps/far/launcher"
    expected = {
        "#SBATCH --array=0-2%2",
        "#SBATCH --partition=h200",
        "#SBATCH --time=90",
        "#SBATCH --gpus-per-node=1",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --mem=64GB",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --signal=USR2@120",
        "#SBATCH --open-mode=append",
        "#SBATCH --job-name=specdec-sweep",
        f"#SBATCH --output={folder}/%A_%a/%A_%a_0_log.out",
    }
    assert expected <= lines, sorted(expected - lines)
    assert any(line.startswith("srun ") and "submitit.core._submit" in line for line in lines)


def test_a_slurm_job_that_is_preempted_is_queued_again() -> None:
    """submitit asks the launcher what to submit when SLURM stops the job: the same row, which then goes on."""
    from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher

    preset = OmegaConf.load(CONFIG_FOLDER / "hydra/launcher/slurm.yaml")
    assert preset.max_num_timeout > 0, "submitit gives up at the first timeout otherwise"
    launcher = SlurmLauncher(submitit_folder="x")
    again = launcher.checkpoint(["row=abc"], "hydra.sweep.dir", 0, "job_id_for_0", {})
    assert again.function is launcher and again.args[0] == ["row=abc"]


@pytest.mark.parametrize(
    "group, option, told",
    [
        ("hydra/launcher", "ray_cluster", "pip install -e '.[ray]'"),
        ("hydra/launcher", "joblib", "pip install -e '.[joblib]'"),
        ("hydra/launcher", "slurm", "pip install -e '.[slurm]'"),
        ("hydra/sweeper", "optuna", "pip install -e '.[optuna]'"),
    ],
)
def test_what_is_not_installed_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch, group: str, option: str, told: str
) -> None:
    monkeypatch.setattr(driver, "find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        driver.expect_plugin(group, option)
    assert told in str(caught.value)


def test_slurm_without_sbatch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="sbatch"):
        driver.expect_plugin("hydra/launcher", "slurm")


def test_gpus_are_shared_out_to_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "3,5,6,7")
    assert slots(1) == [{VISIBLE: each} for each in ("3", "5", "6", "7")]
    assert slots(2) == [{VISIBLE: "3,5"}, {VISIBLE: "6,7"}]
    assert slots(0) == [{}]
    with pytest.raises(UserError, match="needs 5 GPUs, and 4 are visible"):
        slots(5)


def test_a_queue_gives_each_gpu_its_rows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: Any,  # noqa: F811
) -> None:
    monkeypatch.setenv(VISIBLE, "0,1")
    done = start("-m", "sweep=cards", "hydra/launcher=gpus", "limit=1,2", TOY_WAIT_S="0.3")
    assert done.code == 0, done.err
    seen = [json.loads(path.read_text())["gpus"] for path in tmp_path.glob("outputs/sweeps/cards/*/requests.jsonl")]
    assert sorted(seen) == ["0", "1"]
