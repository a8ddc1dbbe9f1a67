"""One table of sweeps: what was swept, what was measured, what is not done, and nothing that cannot be compared."""

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from experiments import collect
from experiments.app.errors import UserError
from experiments.report.tables import Column, console_table
from experiments.sweep.folder import DONE, FAILED, REFUSED, JobRecord, SweepFolder
from experiments.sweep.frame import best_lines, distinct, is_time, read
from tests.experiments.toy_sweep import summary


def sweep_of(path: Path, limits: tuple[int, ...] = (1, 2, 4), machine: str = "toy", **more: Any) -> SweepFolder:
    """A sweep over algorithm and limit, with one row that failed and one that was refused."""
    folder = SweepFolder(path)
    rows = [(algo, limit) for algo in ("dflash", "eagle3") for limit in limits]
    names = [f"{algo}{limit}" for algo, limit in rows]
    folder.begin(["algo", "data.limit"], [*names, "bad", "no"], ["run.py"])
    for name, (algo, limit) in zip(names, rows, strict=True):
        config = {"algo": {"name": algo}, "data": {"limit": limit}}
        folder.write(JobRecord(name, [f"algo={algo}", f"data.limit={limit}"], [], config, DONE, wall_s=1.5))
        found = summary(algo, limit, limit == 4) | {"machine": machine, **more}
        found["rows"][1] |= {"lossless": {"checked": 2, "identical": 2}, "request_tokens_per_s": 30.0 / limit}
        found["rows"][1] |= {"speedup_decode_interval": [0.5 * limit, 2.0 * limit]}
        (folder.path / name).mkdir()
        (folder.path / name / "summary.json").write_text(json.dumps(found))
    config = {"algo": {"name": "eagle3"}, "data": {"limit": 64}}
    folder.write(JobRecord("bad", ["algo=eagle3", "data.limit=64"], [], config, FAILED, "out of memory\nlower it"))
    folder.write(JobRecord("no", ["algo=dflash", "data.limit=-1"], [], {}, REFUSED, "data.limit: expected at least 1"))
    return folder


def collected(*arguments: Any) -> None:
    collect.collect(*collect.parsed([str(argument) for argument in arguments]))


def test_a_half_finished_sweep_is_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the terminal and in files."""
    folder = sweep_of(tmp_path / "a")
    collected(folder.path, "metrics=speedup_decode,tokens_per_step")
    rows = list(csv.DictReader((folder.path / "table.csv").open()))
    assert [row["state"] for row in rows] == [DONE] * 6 + [FAILED, REFUSED]
    assert [(row["algo"], row["data.limit"]) for row in rows[:2]] == [("dflash", "1"), ("dflash", "2")]
    assert (rows[7]["algo"], rows[7]["data.limit"]) == ("dflash", "-1"), "a refused row has the values that were typed"
    assert float(rows[2]["speedup_decode"]) == 4.1 and rows[2]["lossless"] == "2/2"
    shown = capsys.readouterr().out
    assert "8 lines, of which 1 failed, 1 refused" in shown
    text = (folder.path / "table.md").read_text()
    assert "| dflash | 4 | done | 4.10 ± 3.90 | 4.10 | best |" in text and "| out of memory |" in text
    lines = [json.loads(line) for line in (folder.path / "table.jsonl").read_text().splitlines()]
    assert len(lines) == 8 and lines[0]["machine"] == "toy" and lines[0]["wall_s"] == 1.5


def test_the_page_has_the_best_lines_and_figures(tmp_path: Path) -> None:
    folder = sweep_of(tmp_path / "a")
    collected(folder.path, "metrics=speedup_decode", "out=" + str(tmp_path / "elsewhere"))
    page = (tmp_path / "elsewhere/sweep.html").read_text()
    assert page.count("<svg") == 1 and "Best decode speedup for each algo" in page
    assert "decode speedup over data.limit" in page
    assert not (folder.path / "table.csv").exists()


def test_a_line_names_a_revision_only_where_nothing_else_tells_it() -> None:
    lines = [{"algo": f"a{i % 2}", "n": i, "speed": i, "revision": "ab"[i % 2] * 40} for i in range(4)]
    drawn = collect.over(lines, ["algo", "n", "revision"], "n", "speed")
    assert "a0</span>" in drawn and "aaaaaaa" not in drawn
    assert "aaaaaaa</span>" in collect.over(
        [line | {"algo": "x"} for line in lines], ["algo", "n", "revision"], "n", "speed"
    )


def test_rows_of_several_folders_meet_once(tmp_path: Path) -> None:
    first, second = sweep_of(tmp_path / "a", (1, 2)), sweep_of(tmp_path / "b", (2, 4))
    lines, keys = read([first, second])
    assert keys == ["algo", "data.limit"]
    done = sorted(line["job"] for line in lines if line["state"] == DONE)
    assert done == sorted(f"{algo}{limit}" for algo in ("dflash", "eagle3") for limit in (1, 2, 4))
    assert [line["job"] for line in lines].count("bad") == 1


@pytest.mark.parametrize("other", [{"machine": "another card"}, {"revision": "def"}])
def test_cards_and_revisions_are_not_mixed_by_themselves(tmp_path: Path, other: dict[str, str]) -> None:
    folders = [sweep_of(tmp_path / "a", (1,)), sweep_of(tmp_path / "b", (2,), **other)]
    (column,) = other
    with pytest.raises(UserError, match=f"jobs of 2 {column}s meet: .*\n.*mix=true"):
        read(folders)
    lines, keys = read(folders, mix=True)
    assert keys == ["algo", "data.limit", column] and len(distinct(lines, column)) == 2


def written(
    folder: SweepFolder, job: str, overrides: list[str], config: dict[str, Any], rows: list[Any], **own: Any
) -> None:
    """A job that is done."""
    folder.write(JobRecord(job, overrides, [], config, DONE, wall_s=own.get("wall_s", 1.0)))
    (folder.path / job).mkdir(parents=True)
    content = {"rows": rows, "machine": "m", "revision": "r"} | own
    (folder.path / job / "summary.json").write_text(json.dumps(content))


def test_methods_of_one_job_stay_apart(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    folder.begin(["seed"], ["x"], [])
    rows = [{"algo": algo, "method": algo, "concurrency": n} for n in (1, 8) for algo in ("autoregressive", "ngram")]
    written(folder, "x", ["seed=1"], {"seed": 1}, rows)
    lines, keys = read([folder])
    assert keys == ["seed", "concurrency"] and [line["concurrency"] for line in lines] == [1, 8]
    assert distinct(lines, "method") == ["ngram"], "the baseline is no line of the table"


@pytest.mark.parametrize(
    ("key", "values", "more"),
    [
        ("sampling", ["greedy", "sample"], []),
        ("sampling.seed", [0, 1, 2], ["sampling=sample"]),
        ("dtype", ["float16"], []),
    ],
)
def test_a_swept_option_is_shown_as_it_was_typed(tmp_path: Path, key: str, values: list[Any], more: list[str]) -> None:
    """Also a group without a name in its configuration, and a key that the conditions of a run have too."""
    folder = SweepFolder(tmp_path)
    folder.begin([key], [str(value) for value in values], [])
    for value in values:
        config = {"sampling": {"temperature": 0.7, "seed": value}, "dtype": "auto"}
        written(folder, str(value), [*more, f"{key}={value}"], config, [{"algo": "ngram", "tokens_per_step": 1.5}])
    lines, keys = read([folder])
    assert keys == [key] and [line[key] for line in lines] == values


def test_the_best_lines(tmp_path: Path) -> None:
    lines = [dict(zip("gxy", values, strict=True)) for values in (("a", 1.0, 5.0), ("a", 2.0, 4.0), ("b", 3.0, 4.5))]
    lines.append({"g": "b", "x": None, "y": 9.0})
    assert best_lines(lines, ["g"], "x") == lines[1:3]
    assert best_lines(lines, [], "y") == lines[3:]


@pytest.mark.parametrize("metric", ["median_us", "wall_s", "step_ms/mean", "ttft_ms/p50"])
def test_of_times_the_least_is_best(metric: str) -> None:
    assert best_lines([{metric: 2.0}, {metric: 1.0}], [], metric) == [{metric: 1.0}]
    assert not is_time("wall_tokens_per_s") and not is_time("tokens_per_step")


def test_prompt_sets_are_not_compared_with_each_other(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    folder.begin(["algo", "data"], [], [])
    for algo in ("dflash", "ngram"):
        for data, rate in (("arithmetic", 10.0), ("code", 5.0)):
            row = {"algo": algo, "data": data, "request_tokens_per_s": rate, "wall_tokens_per_s": rate + len(algo)}
            typed, num_resumed = [f"algo={algo}", f"data={data}"], int(algo == "ngram")
            written(folder, algo + data, typed, {}, [row | {"num_resumed": num_resumed}])
            (folder.path / f"{algo}{data}" / "report.html").write_text("")
    collected(folder.path)
    assert collect._groups(["data", "sampling.seed"]) == ["data", "sampling.seed"], "no seed is better than another"
    page = (folder.path / "sweep.html").read_text()
    assert "for each data" in page and page.count(">best<") == 1 + 2
    assert '<a href="dflashcode/report.html">' in page
    assert "resumed jobs, whose times leave out earlier requests: ngramarithmetic, ngramcode" in page


@pytest.mark.parametrize(
    "arguments, told",
    [
        ([], "give the folder of a sweep"),
        (["nowhere"], "nowhere: no such folder"),
        (["."], "is no sweep"),
        (["a", "metric=x"], "unknown key 'metric'"),
        (["a", "metrics=speed"], "unknown key 'speed'"),
        (["a", "x=algo.topc"], "unknown key 'algo.topc'"),
        (["a", "where=algo=ngram"], "no job is left"),
        (["a", "x=algo"], "algo has no numbers"),
        (["a", "mix=perhaps"], "full_key: mix"),
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


@pytest.mark.parametrize("width", [20, 80])
def test_a_narrow_terminal_breaks_no_word(width: int) -> None:
    names = ["autoregressive", "between tokens ms", "speculative"]
    columns = [Column(name, lambda line: "1,234.56 ± 78.90 reference") for name in names]
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(console_table("t", columns, [{}]), crop=False)
    shown = console.file.getvalue().split()
    assert {*" ".join(names).split(), "1,234.56", "78.90", "reference"} <= set(shown)
