"""The table of a paper: pivot, its formats, and a whole run."""

import csv
import json
import re
import shutil
import subprocess
from dataclasses import asdict
from math import sqrt
from pathlib import Path

import pytest

from experiments.app.schema import ModelConfig
from experiments.app.task_schema import method_config, prompt_set
from experiments.report.pivot import Estimate, Figure, Pivot, csv_text, html, latex, markdown, over_seeds, with_average
from experiments.report.run_folder import RunFolder
from experiments.tasks.paper_table import figures, paper_tables
from experiments.tasks.resumed import drop_unless_together
from tests.experiments import program

FIGURES = (Figure("speedup", unit="×"), Figure("tokens/step"))
BLOCK = Pivot(
    "Temperature 0",
    FIGURES,
    {
        ("plain", "a_b"): [Estimate(1.0), Estimate(1.0)],
        ("fast & good", "a_b"): [Estimate(2.504, 0.3), Estimate(3.0, 0.1)],
        ("plain", "c"): [Estimate(1.0), Estimate(1.0)],
        ("fast & good", "c"): [Estimate(0.5, 0.4), Estimate(2.0, 0.2)],
        ("half", "c"): [Estimate(2.0), Estimate(2.001)],
    },
)


def test_the_average_is_over_complete_rows_and_its_interval_that_of_a_mean() -> None:
    average = with_average(BLOCK)
    assert average.columns == ["a_b", "c", "average"] and ("half", "average") not in average.cells
    speedup, tokens = average.cells["fast & good", "average"]
    assert speedup.value == pytest.approx(1.502) and speedup.half == pytest.approx(0.25)
    assert tokens.half == pytest.approx(sqrt(0.1**2 + 0.2**2) / 2)
    assert average.cells["plain", "average"] == [Estimate(1.0), Estimate(1.0)]


def test_seeds_give_the_interval_of_their_spread() -> None:
    assert over_seeds([Estimate(2.0, 0.5)]) == Estimate(2.0, 0.5)
    mean, half = over_seeds([Estimate(1.0, 9.0), Estimate(2.0, 9.0), Estimate(3.0, 9.0)])
    assert mean == 2.0 and half == pytest.approx(4.303 / sqrt(3))


def test_markdown_shows_what_is_best_as_rounded() -> None:
    table = markdown([with_average(BLOCK)])
    assert "**Temperature 0** (speedup / tokens/step)" in table
    assert "| fast & good | **2.50× ± 0.30** / **3.00 ± 0.10** | 0.50× ± 0.40 / **2.00 ± 0.20** |" in table
    assert "| half | – | **2.00×** / **2.00** | – |" in table


def test_a_page_shows_the_same_cells() -> None:
    table = html([BLOCK])
    assert (
        '<td class="text">fast &amp; good</td><td><strong>2.50× ± 0.30</strong> / <strong>3.00 ± 0.10</strong></td>'
        in table
    )


def test_csv_has_a_line_for_each_figure() -> None:
    lines = list(csv.DictReader(csv_text([BLOCK]).splitlines()))
    assert len(lines) == 10
    line = next(each for each in lines if (each["method"], each["column"]) == ("fast & good", "a_b"))
    assert [float(line[key]) for key in ("value", "low", "high")] == pytest.approx([2.504, 2.204, 2.804])


def test_latex_is_balanced_and_escaped(tmp_path: Path) -> None:
    text = latex([with_average(BLOCK), with_average(BLOCK)], "50% & more", "tab:x")
    rows = [line for line in text.splitlines() if line.endswith(r"\\") and "multicolumn" not in line]
    assert len(rows) == 7 and all(len(re.findall(r"(?<!\\)&", row)) == 3 for row in rows)
    assert r"fast \& good & $\mathbf{2.50\times}{\scriptstyle\,\pm0.30}$" in text and r"a\_b" in text
    assert len(re.findall(r"(?<!\\)\{", text)) == len(re.findall(r"(?<!\\)\}", text))
    if shutil.which("pdflatex"):
        page = tmp_path / "page.tex"
        page.write_text(f"\\documentclass{{article}}\\begin{{document}}{text}\\end{{document}}", encoding="utf-8")
        command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", page.name]
        assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0


def test_a_set_may_come_from_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "a set.jsonl")
    chosen = prompt_set(f"gsm8k:{path}", 3, True, "field")
    assert (chosen.name, chosen.path, chosen.limit, chosen.wording) == ("gsm8k", path, 3, "field")
    assert (prompt_set(path, 3, True).path, prompt_set("code", 3, True).name) == (path, "code")
    with pytest.raises(ValueError, match="task.data: code is made here and takes no file"):
        prompt_set(f"code:{path}", 3, True)


def test_a_method_may_have_a_drafter_of_its_own() -> None:
    model = ModelConfig(name="m", path="p", drafts={"dflash": "shared"})
    settings = {"name": "dflash", "topk": 4}
    own = method_config("task.methods.x", {**settings, "draft_path": "mine"})
    plain = method_config("task.methods.x", settings)
    assert isinstance(own, type(plain)) and asdict(own) == {**asdict(plain), "draft_path": "mine"}
    assert (model.drafter_of_method(own), model.drafter_of_method(plain)) == ("mine", "shared")
    with pytest.raises(ValueError, match="task.methods.x: algo=ngram with these settings takes no drafter"):
        method_config("task.methods.x", {"name": "ngram", "draft_path": "mine"})


@pytest.mark.parametrize("processes, kept", [("aa", True), ("ab", False), ("a", False)])
def test_methods_that_one_process_decoded_are_kept(tmp_path: Path, processes: str, kept: bool) -> None:
    """Of a resumed run; what is dropped is dropped on disk, and other sets stay."""
    folder = RunFolder(tmp_path / "run")
    for data in ("here", "elsewhere"):
        for method, process in zip(("plain", "drafted"), processes, strict=False):
            folder.decodings.append({"data": data, "method": method, "round": 0, "process": process})
            folder.record({"data": data, "method": method, "id": 0})
    drop_unless_together(folder, "here", ["plain", "drafted"])
    for log in (folder.decodings, folder.requests):
        entries = [json.loads(line) for line in log.path.read_text().splitlines()]
        assert [e["data"] for e in entries] == ["here"] * len(processes) * kept + ["elsewhere"] * len(processes)


@pytest.fixture(scope="module")
def folder(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    done = program.called(
        tmp_path_factory.mktemp("paper"), *program.model_settings(models),
        *("experiment=paper_table", "task.data=[arithmetic,code]", "task.limit=2", "task.seeds=[0,1]"),
        *("task.concurrency=[2]", "task.only=[ngram]", "sampling.max_new_tokens=6", "task.repeats=1"),
    )  # fmt: skip
    assert done.returncode == 0 and done.folder is not None, done.stderr
    assert "| ngram |" in done.stdout
    return done.folder


def test_a_run_writes_every_table_in_every_format(folder: Path) -> None:
    names = [f"{name}.{kind}" for name in ("table", "acceptance", "throughput") for kind in ("md", "csv", "tex", "pdf")]
    assert [name for name in names if not (folder / name).is_file()] == ["table.pdf"]
    blocks = {line["block"] for line in csv.DictReader((folder / "table.csv").open(encoding="utf-8"))}
    assert blocks == {"Temperature 0", "Temperature 1"}


def test_the_tables_are_of_the_results(folder: Path) -> None:
    results = json.loads((folder / "summary.json").read_text())["rows"]
    assert len(results) == 2 * (2 + 2 * 2 + 1)
    assert all(each["lossless"]["identical"] == each["lossless"]["checked"] for each in results)
    tables = paper_tables(results)
    sampled = [r for r in results if (r["temperature"], r["data"], r["method"]) == (1.0, "code", "ngram")]
    assert [r["seed"] for r in sampled] == [0, 1]
    speedup, tokens = tables["table"][1].cells["ngram", "code"]
    assert speedup.value == pytest.approx(sum(r["speedup_decode"] for r in sampled) / 2)
    assert tokens.value == pytest.approx(sum(r["tokens_per_step"] for r in sampled) / 2)
    assert tables["table"][0].cells["autoregressive", "average"] == [Estimate(1.0), Estimate(1.0)]
    at_first = [
        r["acceptance"]
        for r in results
        if r["method"] == "ngram" and r["temperature"] == 0 and r["concurrency"] is None
    ]
    accepted, rejected = (sum(each[kind][0] for each in at_first) for kind in ("accepted", "rejected"))
    (share,) = tables["acceptance"][0].cells["ngram", "1"]
    assert share.value == pytest.approx(100 * accepted / (accepted + rejected))
    assert tables["throughput"][0].columns == ["2"]
    assert all(content.startswith(b"%PDF") for content in figures(tables).values())


def test_seeds_of_a_run_sample_other_outputs(folder: Path) -> None:
    outputs: dict[str, list[list[int]]] = {}
    for line in (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if entry["method"].startswith("autoregressive on code, T=1"):
            outputs.setdefault(entry["method"], []).append(entry["token_ids"])
    assert len(outputs) == 2 and len({str(each) for each in outputs.values()}) == 2
