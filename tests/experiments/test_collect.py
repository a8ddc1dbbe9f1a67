"""One table of sweeps: what was swept, what was measured, what is not done, and nothing that cannot be compared."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments import collect
from experiments.app.errors import UserError
from experiments.sweep import figures
from experiments.sweep.folder import DONE, FAILED, REFUSED, RowRecord, SweepFolder
from experiments.sweep.frame import best_rows, pareto, read
from tests.experiments.toy_sweep import summary


def sweep_of(path: Path, limits: tuple[int, ...] = (1, 2, 4), machine: str = "toy", **more: Any) -> SweepFolder:
    """A sweep over algorithm and limit, with one row that failed and one that was refused."""
    folder = SweepFolder(path)
    rows = [(algo, limit) for algo in ("dflash", "eagle3") for limit in limits]
    names = [f"{algo}{limit}" for algo, limit in rows]
    folder.begin(["algo", "data.limit"], [*names, "bad", "no"], ["run.py"])
    for name, (algo, limit) in zip(names, rows, strict=True):
        config = {"algo": {"name": algo}, "data": {"limit": limit}}
        folder.write(RowRecord(name, [f"algo={algo}", f"data.limit={limit}"], [], config, DONE, wall_s=1.5))
        found = summary(algo, limit, limit == 4) | {"machine": machine, **more}
        found["rows"][1] |= {"lossless": {"checked": 2, "identical": 2}, "request_tokens_per_s": 30.0 / limit}
        found["rows"][1] |= {"speedup_decode_interval": [0.5 * limit, 2.0 * limit]}
        folder.run_folder(name).mkdir()
        (folder.run_folder(name) / "summary.json").write_text(json.dumps(found))
    config = {"algo": {"name": "eagle3"}, "data": {"limit": 64}}
    folder.write(RowRecord("bad", ["algo=eagle3", "data.limit=64"], [], config, FAILED, "out of memory\nlower it"))
    folder.write(RowRecord("no", ["algo=dflash", "data.limit=-1"], [], {}, REFUSED, "data.limit: expected at least 1"))
    return folder


def collected(*arguments: Any) -> None:
    collect.collect(*collect.parsed([str(argument) for argument in arguments]))


def table(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "table.csv").open()))


def test_a_half_finished_sweep_is_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = sweep_of(tmp_path / "a")
    collected(folder.path, "metrics=speedup_decode,tokens_per_step")
    rows = table(folder.path)
    assert [row["state"] for row in rows] == [DONE] * 6 + [FAILED, REFUSED]
    assert [(row["algo"], row["data.limit"]) for row in rows[:2]] == [("dflash", "1"), ("dflash", "2")]
    assert (rows[7]["algo"], rows[7]["data.limit"]) == ("dflash", "-1"), "a refused row has the values that were typed"
    assert float(rows[2]["speedup_decode"]) == 4.1 and rows[2]["lossless"] == "2/2"
    shown = capsys.readouterr().out
    assert "8 rows, of which 1 failed, 1 refused" in shown
    text = (folder.path / "table.md").read_text()
    assert "| dflash | 4 | done | 4.10 ± 3.90 | 4.10 | best |" in text and "| out of memory |" in text
    assert r"speedup\_decode" in (folder.path / "table.tex").read_text()
    lines = [json.loads(line) for line in (folder.path / "table.jsonl").read_text().splitlines()]
    assert len(lines) == 8 and lines[0]["machine"] == "toy" and lines[0]["wall_s"] == 1.5


def test_the_page_has_the_best_rows_and_three_figures(tmp_path: Path) -> None:
    folder = sweep_of(tmp_path / "a")
    collected(folder.path, "metrics=speedup_decode", "out=" + str(tmp_path / "elsewhere"))
    page = (tmp_path / "elsewhere/sweep.html").read_text()
    assert page.count("<svg") == 2 and "Best decode speedup for each algo" in page, "a map needs two keys of numbers"
    assert "decode speedup over data.limit" in page and "Pareto front" in page
    assert not (folder.path / "table.csv").exists()


def test_a_line_names_a_revision_only_where_nothing_else_tells_it() -> None:
    frame = pd.DataFrame({"algo": ["dflash", "eagle3"] * 2, "n": [1, 1, 2, 2], "speed": [1.0, 2.0, 3.0, 4.0]})
    frame["revision"] = ["a" * 40, "b" * 40 + "-dirty"] * 2
    assert lines_of(frame) == ["dflash", "eagle3"]
    assert lines_of(frame.assign(algo="dflash")) == ["aaaaaaa", "bbbbbbb-dirty"]


def lines_of(frame: pd.DataFrame) -> list[str]:
    figure = figures.over(frame, ["algo", "n", "revision"], "n", "speed")
    assert figure is not None
    return list(figure.axes[0].get_legend_handles_labels()[1])


def test_maps_stand_in_a_grid_and_a_long_legend_below() -> None:
    cells = [(algo, n, k, n * k) for algo in "abcde" for n in (1, 2) for k in (3, 4)]
    frame = pd.DataFrame(cells, columns=["algo", "n", "k", "speed"])
    drawn = figures.over_two(frame, ["algo", "n", "k"], "n", "k", "speed")
    lines = figures.over(frame, ["algo", "n", "k"], "n", "speed")
    assert drawn is not None and lines is not None
    maps = [axes for axes in drawn.axes if axes.images and axes.get_visible()]
    assert [axes.get_title() for axes in maps] == list("abcde")
    assert {axes.get_position().x0 for axes in maps} == {axes.get_position().x0 for axes in maps[:3]}, "two rows of 3"
    assert len(lines.legends) == 1 and lines.axes[0].get_legend() is None


def test_several_folders_are_one_table_and_a_row_counts_once(tmp_path: Path) -> None:
    first, second = sweep_of(tmp_path / "a", (1, 2)), sweep_of(tmp_path / "b", (2, 4))
    frame, keys = read([first, second])
    assert keys == ["algo", "data.limit"]
    assert sorted(frame[frame["state"] == DONE]["row"]) == sorted(
        f"{algo}{limit}" for algo in ("dflash", "eagle3") for limit in (1, 2, 4)
    )
    assert list(frame["row"]).count("bad") == 1


@pytest.mark.parametrize("other", [{"machine": "another card"}, {"revision": "def"}])
def test_cards_and_revisions_are_not_mixed_by_themselves(tmp_path: Path, other: dict[str, str]) -> None:
    folders = [sweep_of(tmp_path / "a", (1,)), sweep_of(tmp_path / "b", (2,), **other)]
    (column,) = other
    with pytest.raises(UserError, match=f"rows of 2 {column}s meet: .*\n.*mix=true"):
        read(folders)
    frame, keys = read(folders, mix=True)
    assert keys == ["algo", "data.limit", column] and frame[column].nunique() == 2


def test_rows_of_one_job_stay_apart(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    folder.begin(["seed"], ["x"], [])
    folder.write(RowRecord("x", ["seed=1"], [], {"seed": 1}, DONE))
    rows = [{"algo": algo, "method": algo, "concurrency": n} for n in (1, 8) for algo in ("autoregressive", "ngram")]
    folder.run_folder("x").mkdir()
    (folder.run_folder("x") / "summary.json").write_text(json.dumps({"rows": rows, "machine": "m", "revision": "r"}))
    frame, keys = read([folder])
    assert keys == ["seed", "concurrency"] and list(frame["concurrency"]) == [1, 8]
    assert set(frame["method"]) == {"ngram"}, "the baseline is no row of the table"


def test_the_best_rows_and_the_front() -> None:
    frame = pd.DataFrame({"algo": ["a", "a", "b", "b"], "x": [1.0, 2.0, 3.0, None], "y": [5.0, 4.0, 4.5, 9.0]})
    assert list(best_rows(frame, ["algo"], "x").index) == [1, 2]
    assert list(best_rows(frame, [], "y").index) == [3]
    assert list(best_rows(frame.rename(columns={"y": "median_us"}), [], "median_us").index) == [1], "the least time"
    assert list(pareto(frame, "x", "y").index) == [0, 2], "row 1 is beaten in both, row 3 has no x"


@pytest.mark.parametrize(
    "arguments, told",
    [
        ([], "give the folder of a sweep"),
        (["nowhere"], "nowhere: no such folder"),
        (["."], "is no sweep"),
        (["a", "metric=x"], "unknown key 'metric'"),
        (["a", "metrics=speed"], "no row has the figure 'speed'"),
        (["a", "x=algo.topc"], "unknown key 'algo.topc'"),
        (["a", "where=algo=ngram"], "no row is left"),
        (["a", "mix=yes"], "mix: expected true or false"),
    ],
)
def test_mistakes_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep_of(tmp_path / "a")
    monkeypatch.setattr(sys, "argv", ["collect", *arguments])
    with pytest.raises(SystemExit) as caught:
        collect.main()
    assert caught.value.code == 2 and told in capsys.readouterr().err
