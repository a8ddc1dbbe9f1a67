"""docs/results.md is what its command makes, and a block says what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.app.schema import REPO_ROOT
from experiments.results_page import page, rows
from experiments.results_page.blocks import Curve, Made, Table

ROWS: list[dict[str, Any]] = [
    {"method": "a", "data": "x", "batch": 1, "rate": 1.25, "revision": "0123456789", "machine": "card"},
    {"method": "a", "data": "y", "batch": 1, "rate": 2.5, "revision": "0123456789", "machine": "card"},
    {"method": "b", "data": "x", "batch": 4, "rate": 1234.5, "deep": {"er": 7}, "revision": "abcdef0123"},
]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.setattr(rows, "FOLDER", tmp_path)
    rows.read.cache_clear()
    return "a.jsonl"


def _lines(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_the_page_is_what_the_rows_say() -> None:
    rows.read.cache_clear()
    stale = [path.name for path, content in page.files().items() if path.read_text(encoding="utf-8") != content]
    assert stale == [], "run python -m experiments.results_page"


def test_rows_are_shown_or_stand_in_the_log() -> None:
    text = page.PAGE.read_text(encoding="utf-8") + (REPO_ROOT / "experiments" / "LOG.md").read_text(encoding="utf-8")
    assert [path.name for path in sorted(rows.FOLDER.glob("*")) if path.name not in text] == []


def test_a_table_across_a_key(file: str) -> None:
    table = Table(file, across="data", cell="{rate:,.1f}", order=["b", "a", "c"], names={"c": "never"}, head="m")
    found = _lines(table.text())
    assert found[0] == ["m", "x", "y"]
    assert found[2:] == [["b", "1,234.5", "–"], ["a", "1.2", "2.5"], ["never", "–", "–"]]


def test_a_table_of_several_figures(file: str) -> None:
    where = {"data": "x", "batch": [1, 4]}
    table = Table(file, where, down=["method", "batch"], cells={"rate": "{rate:.2f}", "deep": "{deep[er]}"})
    assert _lines(table.text())[2:] == [["a, 1", "1.25", "–"], ["b, 4", "1234.50", "7"]]


def test_a_table_of_totals(file: str) -> None:
    with pytest.raises(ValueError, match="several rows for a"):
        Table(file, cells={"rate": "{rate:.2f}"}).text()
    table = Table(file, cells={"rate": "{rate:.2f}", "batches": "{batch}"}, total=["rate", "batch"])
    assert _lines(table.text())[2:] == [["a", "3.75", "2"], ["b", "1234.50", "4"]]


def test_a_path_into_a_row(file: str) -> None:
    assert [row["method"] for row in rows.matching(rows.read(file), {"deep/er": 7})] == ["b"]
    assert rows.matching(rows.read(file), {"deep/er/more": 7}) == []


def test_provenance_names_every_revision_once(file: str) -> None:
    text = Made(file).text()
    assert text.count("card") == 1 and "revision 0123456, abcdef0" in text and "clock" not in text


def test_provenance_tells_the_clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = [{"sm_mhz": mhz, "memory_mhz": 3201.0, "max_sm_mhz": 1980.0} for mhz in (1965.0, 1980.0)]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({**ROWS[0], "clocks": each}) + "\n" for each in clocks))
    monkeypatch.setattr(rows, "FOLDER", tmp_path)
    assert "card; SM clock 1965 to 1980 of 1980 MHz, memory 3201 MHz; revision" in Made("b.jsonl").text()


def test_a_curve_has_a_line_for_each_method(file: str) -> None:
    curve = Curve(file, x="batch", y="rate", names={"b": "B"}, where={"data": "x"})
    assert curve.series() == [("a", [(1.0, 1.25)]), ("B", [(4.0, 1234.5)])]


def test_what_a_row_shows_of_itself(file: str) -> None:
    found = rows.derived(
        {
            "method": "m",
            "tokens_per_step": 2.0,
            "tokens_per_step_interval": [1.5, 2.5],
            "speedup_decode": 1.5,
            "acceptance_at": [0.5, None],
            "num_accepted_histogram": [1, 1, 2],
            "lossless": {"checked": 4, "identical": 3, "near_ties": 1},
            "num_steps": 4,
            "ledger_ms": {"draft": 2.0},
        }
    )
    assert found["tokens_per_step_text"] == "2.00 ± 0.50" and found["speedup_decode_text"] == "1.50×"
    assert found["acceptance_text"] == "50 –" and found["lossless_text"] == "3/4, 1 near ties"
    assert found["histogram"] == {0: "25", 1: "25", 2: "50", 4: "–", 8: "–", 16: "–"}
    assert found["phase"] == {"draft": "0.50", "verify": "–", "accept": "–", "commit": "–", "host": "–"}


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("rows\nfile: none.jsonl\ncells: {a: b}", "none.jsonl: no such file"),
        ("rows\nfile: a.jsonl\nwhere: {data: z}\ncells: {a: b}", "no row has {'data': 'z'}"),
        ("rows\nfile: a.jsonl\ncells: {a: '{rate}'}", "several rows for a; expected one"),
        ("rows\nfile: a.jsonl\nacross: data", "either across and cell, or cells"),
        ("rows\nfile: a.jsonl\ncells: {a: b}\norder: none", "order: expected a list or one of methods"),
        ("rows\nfile: a.jsonl\nlow: 1", "expected keys of across, cell, cells"),
    ],
)
def test_a_wrong_block_is_named(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: str, message: str
) -> None:
    monkeypatch.setattr(page, "SECTIONS", tmp_path)
    (tmp_path / "10_mine.md").write_text(f"# T\n\n```{block}\n```\n")
    with pytest.raises(ValueError, match=r"10_mine\.md: block rows") as raised:
        page.files()
    assert message in str(raised.value)
