"""Sweeps survive: rows have an identity, done ones stay, and whatever ends a sweep, the next start goes on."""

from __future__ import annotations

import csv
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from experiments import collect
from experiments.app.errors import UserError
from experiments.app.schema import REPO_ROOT, SweepConfig
from experiments.sweep import driver
from experiments.sweep import main as sweep_main
from experiments.sweep.folder import DONE, FAILED, KILLED, OPEN, REFUSED, RUNNING, RowRecord, SweepFolder
from experiments.sweep.grid import parse, shard_of
from experiments.sweep.row import objective
from tests.experiments import toy_sweep

TOY = str(REPO_ROOT / "tests/experiments/toy_sweep.py")
TWELVE = ["limit=1,2,3,4", "seed=0,1,2"]


def environment(**variables: str) -> dict[str, str]:
    path = os.pathsep.join([str(REPO_ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, **variables}


@dataclass
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Start the toy's command line in this process, which has imported everything; rows have processes of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str, config: str = toy_sweep.NAME, **variables: str) -> Ended:
        capfd.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [TOY, *arguments])
            for name, value in variables.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as caught:
                sweep_main.main(toy_sweep.run, [TOY], config)
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


def test_a_sweep_that_is_killed_twice_ends_with_the_rows_of_an_undisturbed_one(tmp_path: Path, start: Any) -> None:
    """Killed at random places. The undisturbed sweep is run in two shards."""
    asked = ["-m", "sweep=killed", "sweep.share_target=true", *TWELVE]
    sweep = SweepFolder(tmp_path / "outputs/sweeps/killed")
    chance = random.Random(7)
    for least in (2, 6):
        command = [sys.executable, TOY, *asked]
        with subprocess.Popen(
            command, cwd=tmp_path, env=environment(TOY_WAIT_S="0.05"), stdout=subprocess.DEVNULL
        ) as process:
            wait_for(lambda least=least: len(list(sweep.path.glob("*/summary.json"))) >= least)
            time.sleep(chance.uniform(0, 0.15))
            process.kill()
        wait_for(lambda: RUNNING not in states(sweep))
        before = {path: path.stat().st_mtime_ns for path in sweep.path.glob("*/summary.json")}
        assert least <= len(before) < 12
    listed = start(*asked, "sweep.list=true")
    assert listed.code == 0 and f"{len(before)} done" in listed.out
    last = start(*asked)
    assert last.code == 0, last.err
    assert f"{len(before)} of 12 done before" in last.out
    assert states(sweep) == [DONE] * 12
    assert all(path.stat().st_mtime_ns == when for path, when in before.items()), "a done row ran again"

    shards = [SweepFolder(tmp_path / "outputs/sweeps" / name) for name in ("first", "second")]
    for number, shard in enumerate(shards, 1):
        done = start("-m", f"sweep={shard.name}", "sweep.share_target=true", f"shard={number}/2", *TWELVE)
        assert done.code == 0 and "0 of 6 done before" in done.out
    assert figures(sweep) == figures(shards[0]) | figures(shards[1])
    assert table(tmp_path / "one", sweep) == table(tmp_path / "two", *shards), "two shards collect to another table"


def table(out: Path, *sweeps: SweepFolder) -> list[dict[str, str]]:
    """The rows that `experiments.collect` writes, in an order of their own, without where and when they ran."""
    collect.collect(*collect.parsed([*(str(sweep.path) for sweep in sweeps), f"out={out}", "group=seed"]))
    with (out / "table.csv").open() as file:
        rows = [
            {key: value for key, value in row.items() if key not in ("sweep", "wall_s")} for row in csv.DictReader(file)
        ]
    assert len(rows) == 12
    return sorted(rows, key=lambda row: row["row"])


def test_changed_values_only_add_rows_and_one_run_can_be_a_row(tmp_path: Path, start: Any) -> None:
    sweep = SweepFolder(tmp_path / "outputs/sweeps/grows")
    assert start("-m", "sweep=grows", "limit=1", "heat=0,-1").code == 0
    assert states(sweep) == [DONE, REFUSED], "a combination that a check refuses is a row"
    first, refused = figures(sweep), sweep.records()[1]
    assert "got -1.0" in refused.reason
    again = start("-m", "sweep=grows", "limit=1,2", "name=other")
    assert "1 of 2 done before, 1 to run" in again.out
    assert len(figures(sweep)) == 3 and first.items() <= figures(sweep).items()
    command = [sys.executable, TOY, "sweep=grows", "limit=2"]
    single = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=100)
    assert single.returncode == 0 and "done before" in single.stdout


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


def test_keys_that_some_options_have_need_lenient(tmp_path: Path, start: Any) -> None:
    asked = ["-m", "sweep=keys", "sweep.list=true", "algo=dflash,ngram", "algo.topk=1,4"]
    strict = start(*asked, config="config")
    assert strict.code == 2
    assert "algo.topk is a setting of algo=dflash and not of algo=ngram" in strict.err
    assert "sweep.lenient=true" in strict.err
    lenient = start(*asked, "sweep.lenient=true", config="config")
    assert lenient.code == 0 and "3 open" in lenient.out
    typo = start(*asked, "sweep.lenient=true", "algo.topc=1", config="config")
    assert typo.code == 2 and "unknown key 'algo.topc'" in typo.err
    assert list(tmp_path.iterdir()) == [], "listing leaves nothing"


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b"])
def test_a_shard_that_is_none_is_named(shard: str) -> None:
    with pytest.raises(ValueError, match="shard: expected i/n"):
        SweepConfig(shard=shard)


def test_shards_split_the_rows() -> None:
    rows = list(range(11))
    parts = [shard_of(rows, f"{i}/3") for i in (1, 2, 3)]
    assert sorted(sum(parts, [])) == rows and max(map(len, parts)) - min(map(len, parts)) <= 1
    assert shard_of(rows, None) == rows


def test_the_grid_is_the_product_in_the_order_of_the_command_line() -> None:
    grid = parse(["algo=dflash,ngram", "data.limit=range(1,3)", "samples=0", "sweep.name=x", "hydra/launcher=gpus"])
    assert grid.jobs == (
        ("algo=dflash", "data.limit=1", "samples=0"),
        ("algo=dflash", "data.limit=2", "samples=0"),
        ("algo=ngram", "data.limit=1", "samples=0"),
        ("algo=ngram", "data.limit=2", "samples=0"),
    )
    assert grid.keys == ("algo", "data.limit") and grid.common == ("samples=0",)
    assert grid.own == ("sweep.name=x", "hydra/launcher=gpus")
    assert parse(["algo=ngram"], {"algo": "dflash,eagle", "algo.topk": [1, 2]}).jobs == (
        ("algo=ngram", "algo.topk=1"),
        ("algo=ngram", "algo.topk=2"),
    )


def test_the_name_of_a_row_stays_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra takes some hashes for numbers: 12e400 for infinity, 0012 for 12."""
    given: list[str] = []
    monkeypatch.setattr(driver, "run_hydra", lambda arguments, _: given.extend(arguments))
    rows = tuple(RowRecord(name, [], []) for name in ("12e400", "0012", "abc"))
    driver.launch(driver.Sweep(SweepFolder(tmp_path), SweepConfig(), rows, (), "basic", ()), rows)
    (named,) = [argument for argument in given if argument.startswith("row=")]
    parser = OverridesParser.create()
    values = parser.parse_override(named).sweep_string_iterator()
    assert [parser.parse_override(f"row={value}").value() for value in values] == ["12e400", "0012", "abc"]


def test_what_cannot_be_swept_is_named() -> None:
    with pytest.raises(UserError, match="sweep.force is a setting of the sweep"):
        parse(["sweep.force=true,false"])
    with pytest.raises(UserError, match="optuna"):
        parse(["algo.topk=interval(1,4)"])


def test_a_row_is_owned_by_one_process(tmp_path: Path) -> None:
    sweep = SweepFolder(tmp_path)
    sweep.write(RowRecord("abc", [], []))
    assert sweep.state("abc") == OPEN
    with sweep.claim("abc") as owned:
        assert owned and sweep.state("abc") == RUNNING
        with sweep.claim("abc") as second:
            assert not second
    assert sweep.state("abc") == OPEN


def test_a_broken_summary_is_no_result(tmp_path: Path) -> None:
    sweep = SweepFolder(tmp_path)
    sweep.write(RowRecord("abc", [], [], ended=DONE))
    sweep.run_folder("abc").mkdir()
    (sweep.run_folder("abc") / "summary.json").write_text('{"rows": [1, ')
    assert sweep.state("abc") == KILLED


def test_a_search_maximises_among_lossless_rows() -> None:
    assert objective(RowRecord("a", [], [], ended=DONE, exit_code=0, value=2.5)) == 2.5
    assert objective(RowRecord("a", [], [], ended=DONE, exit_code=3, value=9.0)) == 0.0
    assert objective(RowRecord("a", [], [], ended=REFUSED, exit_code=2)) is None
