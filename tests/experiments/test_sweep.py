"""Sweeps survive: rows have an identity, done ones stay, and whatever ends a sweep, the next start goes on.

Launchers get the names of rows and run each once, wherever that is.
"""

import csv
import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from experiments import collect
from experiments.app.errors import UserError
from experiments.app.schema import CONFIG_FOLDER, REPO_ROOT, SweepConfig
from experiments.sweep import driver
from experiments.sweep import main as sweep_main
from experiments.sweep.driver import parse
from experiments.sweep.folder import DONE, FAILED, KILLED, OPEN, REFUSED, RUNNING, JobRecord, SweepFolder
from experiments.sweep.processes import VISIBLE, slots
from tests.experiments import toy_sweep
from tests.experiments.forked import Forked, fork_workers

TOY = str(REPO_ROOT / "tests/experiments/toy_sweep.py")
FOUR = ["limit=1,2", "seed=0,1"]


def toy(*arguments: str, config: str = toy_sweep.NAME) -> None:
    """The toy's command line; workers are forked where a test asks for it."""
    sys.argv = [TOY, *arguments]
    sweep_main.main(toy_sweep.run, [TOY], config)


@dataclass
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Start the toy's command line in this process, which has imported everything; workers are forked from it."""
    fork_workers(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str, config: str = toy_sweep.NAME, **variables: str) -> Ended:
        capfd.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [])
            for name, value in variables.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as caught:
                toy(*arguments, config=config)
        told = capfd.readouterr()
        return Ended(caught.value.code, told.out, told.err)

    return run


def states(sweep: SweepFolder) -> list[str]:
    return [sweep.state(record.id) for record in sweep.records()]


def figures(sweep: SweepFolder) -> dict[str, Any]:
    found = {record.id: sweep.summary(record.id) for record in sweep.records()}
    return {row: summary["rows"] if summary else None for row, summary in found.items()}


def wait_for(condition: Any, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited for too long"
        time.sleep(0.005)


def test_a_sweep_that_is_killed_twice_ends_with_the_rows_of_an_undisturbed_one(
    tmp_path: Path, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at random places. The undisturbed sweep is run in two shards."""
    asked = ["-m", "sweep=killed", "sweep.share_target=true", *FOUR]
    sweep = SweepFolder(tmp_path / "outputs/sweeps/killed")
    chance = random.Random(7)
    for least in (1, 2):
        with monkeypatch.context() as patch:
            patch.setenv(toy_sweep.WAIT, "0.3")
            process = Forked(lambda: toy(*asked))
        wait_for(lambda least=least: len(list(sweep.path.glob("*/summary.json"))) >= least)
        time.sleep(chance.uniform(0, 0.15))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_for(lambda: RUNNING not in states(sweep))
        before = {path: path.stat().st_mtime_ns for path in sweep.path.glob("*/summary.json")}
        assert least <= len(before) < 4
    listed = start(*asked, "sweep.list=true")
    assert listed.code == 0 and f"{len(before)} done" in listed.out
    last = start(*asked)
    assert last.code == 0, last.err
    assert f"{len(before)} of 4 done before" in last.out
    assert states(sweep) == [DONE] * 4
    assert all(path.stat().st_mtime_ns == when for path, when in before.items()), "a done row ran again"

    shards = [SweepFolder(tmp_path / "outputs/sweeps" / name) for name in ("first", "second")]
    for number, shard in enumerate(shards, 1):
        done = start("-m", f"sweep={shard.name}", "sweep.share_target=true", f"shard={number}/2", *FOUR)
        assert done.code == 0 and "0 of 2 done before" in done.out
    assert figures(sweep) == figures(shards[0]) | figures(shards[1])
    assert table(tmp_path / "one", sweep) == table(tmp_path / "two", *shards), "two shards collect to another table"


def table(out: Path, *sweeps: SweepFolder) -> list[dict[str, str]]:
    """The rows that `experiments.collect` writes, in an order of their own, without where and when they ran."""
    collect.collect(*collect.parsed([*(str(sweep.path) for sweep in sweeps), f"out={out}", "group=seed"]))
    with (out / "table.csv").open() as file:
        rows = [{key: value for key, value in row.items() if key != "wall_s"} for row in csv.DictReader(file)]
    assert len(rows) == 4
    return sorted(rows, key=lambda row: row["job"])


def test_changed_values_only_add_rows_and_one_run_can_be_a_row(
    tmp_path: Path, start: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep = SweepFolder(tmp_path / "outputs/sweeps/grows")
    assert start("-m", "sweep=grows", "limit=1", "heat=0,-1").code == 0
    assert states(sweep) == [DONE, REFUSED], "a combination that a check refuses is a row"
    first = figures(sweep)
    assert "got -1.0" in sweep.records()[1].reason
    again = start("-m", "sweep=grows", "limit=1,2", "name=other")
    assert "1 of 2 done before, 1 to run" in again.out
    assert len(figures(sweep)) == 3 and first.items() <= figures(sweep).items()
    assert Forked(lambda: toy("sweep=grows", "limit=2")).wait() == 0 and "done before" in capfd.readouterr().out
    refused = start("-m", "sweep=none", "heat=-1,-2")
    assert refused.code == 2 and "got -1.0" in refused.err and "got -2.0" in refused.err, "each job its own mistake"


def test_rows_that_end_badly_are_told_and_run_again(tmp_path: Path, start: Any) -> None:
    sweep, asked = SweepFolder(tmp_path / "outputs/sweeps/bad"), ["-m", "sweep=bad", "seed=range(5)"]
    done = start(*asked, "sweep.share_target=true", TOY_ENDING="1:killed 2:failed 3:refused 4:lossy")
    assert done.code == 1, done.out + done.err
    assert states(sweep) == [DONE, KILLED, FAILED, REFUSED, DONE]
    told = ["SIGKILL", "ZeroDivisionError: seed 2 is a bug", "seed 3 is not served", "seed 4 differs"]
    assert all(text in done.err for text in told), done.err
    assert all(f"seed={seed}" in done.out for seed in range(5))
    pids = [json.loads(path.read_text())["pid"] for path in tmp_path.glob("outputs/sweeps/bad/*/requests.jsonl")]
    assert len(set(pids)) == 2, "rows of one target share a process until one ends it"

    last = start(*asked)
    assert "2 of 5 done before, 3 to run" in last.out
    assert last.code == 3 and states(sweep) == [DONE] * 5
    forced = start("-m", "sweep=bad", "seed=4", "sweep.force=true")
    assert forced.code == 0 and "seed 4 differs" not in forced.err
    pids = [json.loads(path.read_text())["pid"] for path in tmp_path.glob("outputs/sweeps/bad/*/requests.jsonl")]
    assert len(set(pids)) == 5


def test_a_key_that_an_option_lacks_is_refused_and_listing_leaves_nothing(tmp_path: Path, start: Any) -> None:
    asked = ["-m", "sweep=keys", "sweep.list=true", "algo.topk=1,4"]
    strict = start(*asked, "algo=dflash,ngram", config="config")
    assert strict.code == 2 and "unknown key 'algo.topk'" in strict.err and "with algo=dflash" in strict.err
    listed = start(*asked, "algo=dflash,eagle3", config="config")
    assert listed.code == 0 and "4 open" in listed.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b"])
def test_a_shard_that_is_none_is_named(shard: str) -> None:
    with pytest.raises(ValueError, match="shard: expected i/n"):
        SweepConfig(shard=shard)


def test_the_grid_is_the_product_in_the_order_of_the_command_line() -> None:
    grid = parse(["algo=dflash,ngram", "data.limit=range(1,3)", "samples=0", "sweep.name=x", "hydra/launcher=gpus"])
    assert grid.jobs == [
        [f"algo={algo}", f"data.limit={limit}", "samples=0"] for algo in ("dflash", "ngram") for limit in (1, 2)
    ]
    assert grid.keys == ("algo", "data.limit") and grid.common == ("samples=0",)
    assert grid.own == ("sweep.name=x", "hydra/launcher=gpus")
    assert parse(["algo=ngram"], {"algo": "dflash,eagle", "algo.topk": [1, 2]}).jobs == [
        ["algo=ngram", "algo.topk=1"],
        ["algo=ngram", "algo.topk=2"],
    ]


def test_the_name_of_a_row_stays_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra takes some hashes for numbers: 12e400 for infinity, 0012 for 12."""
    given: list[str] = []
    monkeypatch.setattr(driver, "run_hydra", given.extend)
    rows = tuple(JobRecord(name, [], []) for name in ("12e400", "0012", "abc"))
    driver.launch(driver.Sweep(SweepFolder(tmp_path), SweepConfig(), rows, (), "basic", ()), rows)
    (named,) = [argument for argument in given if argument.startswith("job=")]
    parser = OverridesParser.create()
    values = parser.parse_override(named).sweep_string_iterator()
    assert [parser.parse_override(f"job={value}").value() for value in values] == ["12e400", "0012", "abc"]


def test_what_cannot_be_swept_is_named() -> None:
    with pytest.raises(UserError, match="sweep.force is a setting of the sweep"):
        parse(["sweep.force=true,false"])
    with pytest.raises(UserError, match="expected a list of values"):
        parse(["algo.topk=interval(1,4)"])


def test_a_row_is_owned_by_one_process(tmp_path: Path) -> None:
    sweep = SweepFolder(tmp_path)
    sweep.write(JobRecord("abc", [], []))
    assert sweep.state("abc") == OPEN
    with sweep.claim("abc") as owned:
        assert owned and sweep.state("abc") == RUNNING
        with sweep.claim("abc") as second:
            assert not second
    assert sweep.state("abc") == OPEN


def test_a_broken_summary_is_no_result(tmp_path: Path) -> None:
    sweep = SweepFolder(tmp_path)
    sweep.write(JobRecord("abc", [], [], ended=DONE))
    (sweep.path / "abc").mkdir()
    (sweep.path / "abc/summary.json").write_text('{"rows": [1, ')
    assert sweep.state("abc") == KILLED


SBATCH = """#!{python}
import sys
from pathlib import Path
script = Path(sys.argv[-1])
Path({record!r}).write_text(script.read_text())
print("Submitted batch job 7")
"""


@pytest.mark.parametrize("launcher", ["submitit_local", "joblib"])
def test_rows_run_under_the_launchers_of_plugins(tmp_path: Path, start: Any, launcher: str) -> None:
    sweep, asked = SweepFolder(tmp_path / "outputs/sweeps/other"), ["-m", "sweep=other", f"hydra/launcher={launcher}"]
    limit = ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else ["hydra.launcher.timeout_min=5"]
    done = start(*asked, *limit, "seed=9,0", TOY_ENDING="9:failed")
    assert done.code == 1 and done.err.count("ZeroDivisionError") == 1, done.err
    assert states(sweep) == [FAILED, DONE], "a row that fails costs no other row"


def test_slurm_gets_one_array_with_the_presets_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Any
) -> None:
    """The script that reaches sbatch; the jobs themselves are made done, as if the cluster had run them."""
    tools, record = tmp_path / "bin", tmp_path / "script.sh"
    tools.mkdir()
    for name, text in (("sbatch", SBATCH.format(python=sys.executable, record=str(record))), ("srun", "#!/bin/sh\n")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    from submitit.core.core import Job

    monkeypatch.setattr(Job, "results", lambda self: [SimpleNamespace(return_value=None)])
    own = ["hydra.launcher.partition=h200", "hydra.launcher.timeout_min=90", "hydra.launcher.array_parallelism=2"]
    done = start("-m", "sweep=far", "hydra/launcher=slurm", *own, "limit=1,2,3")
    assert "3 open" in done.out, done.err
    lines = set(record.read_text().splitlines())
    folder = tmp_path / "outputs/sweeps/far/launcher"
    given = (
        "array=0-2%2 partition=h200 time=90 gpus-per-node=1 cpus-per-task=8 mem=64GB nodes=1 ntasks-per-node=1 "
        f"signal=USR2@120 open-mode=append job-name=specdec-sweep output={folder}/%A_%a/%A_%a_0_log.out"
    )
    expected = {f"#SBATCH --{setting}" for setting in given.split()}
    assert expected <= lines, sorted(expected - lines)
    assert any(line.startswith("srun ") and "submitit.core._submit" in line for line in lines)


def test_a_slurm_job_that_is_preempted_is_queued_again() -> None:
    """submitit asks the launcher what to submit when SLURM stops the job: the same row, which then goes on."""
    from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher

    preset = OmegaConf.load(CONFIG_FOLDER / "hydra/launcher/slurm.yaml")
    assert preset.max_num_timeout > 0, "submitit gives up at the first timeout otherwise"
    launcher = SlurmLauncher(submitit_folder="x")
    again = launcher.checkpoint(["job=abc"], "hydra.sweep.dir", 0, "job_id_for_0", {})
    assert again.function is launcher and again.args[0] == ["job=abc"]


def test_what_a_launcher_lacks_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="sbatch"):
        driver.expect_plugin("slurm")
    monkeypatch.setattr(driver, "find_spec", lambda name: None)
    for option, extra in (("ray_cluster", "ray"), ("joblib", "joblib"), ("slurm", "slurm")):
        with pytest.raises(UserError, match=rf"pip install -e '\.\[{extra}\]'"):
            driver.expect_plugin(option)


def test_gpus_are_shared_out_to_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "3,5,6,7")
    assert slots(1) == [{VISIBLE: each} for each in ("3", "5", "6", "7")]
    assert slots(2) == [{VISIBLE: "3,5"}, {VISIBLE: "6,7"}]
    assert slots(0) == [{}]
    with pytest.raises(UserError, match="needs 5 GPUs, and 4 are visible"):
        slots(5)


def test_a_queue_gives_each_gpu_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    monkeypatch.setenv(VISIBLE, "0,1")
    done = start("-m", "sweep=cards", "hydra/launcher=gpus", "limit=1,2", TOY_WAIT_S="0.3")
    assert done.code == 0, done.err
    seen = [json.loads(path.read_text())["gpus"] for path in tmp_path.glob("outputs/sweeps/cards/*/requests.jsonl")]
    assert sorted(seen) == ["0", "1"]
