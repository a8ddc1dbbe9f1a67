"""The HTML report and the terminal: complete, escaped, well-formed, and free of the network."""

import io
import re
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from experiments.report.console import bar_chart, printable
from experiments.report.html_page import position_counts, render, step_times
from experiments.report.tables import console_table, html_table, markdown
from experiments.tasks.compare import Compare
from experiments.tasks.generate import Generate
from experiments.tasks.throughput import Throughput

VOID = {"meta"}
ATTACK = "<script>alert('x')</script>&amp;"
UNCHECKED = {"checked": 0, "identical": 0, "near_ties": 0, "first_difference": None}
METHOD: dict[str, Any] = (
    {"data": "arithmetic", "method": "dflash", "algo": "dflash", "rule": "target_only", "prediction": None}
    | {"num_requests": 2, "output_tokens": 30, "num_steps": 10, "tokens_per_step": 3.0, "accuracy": 0.5}
    | {"num_accepted_histogram": [1, 2, 3, 4], "acceptance_at": [0.9, 0.5, None]}
    | {"decode_tokens_per_s": 1234.5, "wall_tokens_per_s": 1000.0, "speedup_decode": 2.5, "speedup_wall": 2.0}
    | {"ttft_ms": {"p50": 5.0, "p90": 9.0}, "step_ms": {"median": 2.0, "p20": 1.0, "p80": 3.0}}
    | {"phase_times_ms": {"draft": 5.0, "verify": 10.0, "accept": 1.0, "commit": 2.0, "host": 2.0}}
    | {"lossless": UNCHECKED | {"checked": 2, "identical": 2}}
)
PLAIN = {"method": "autoregressive", "algo": "autoregressive", "tokens_per_step": 1.0, "accuracy": 1.0}
BASELINE: dict[str, Any] = METHOD | PLAIN | {"lossless": UNCHECKED}


def conditions(**changes: Any) -> dict[str, Any]:
    sampling = {"temperature": 0.7, "max_new_tokens": 64, "seed": 3}
    where = {"device": "cpu", "dtype": "float32", "impl": "triton-interpreter", "machine": "a machine"}
    sizes = {"page_size": 16, "max_batch": 4, "revision": None, "versions": {"torch": "2"}}
    return {"model": ATTACK, "backend": "fa4", "sampling": sampling, **where, **sizes, **changes}


def generated(records: list[dict[str, Any]], console: Console | None = None) -> Generate:
    """The task behind a page, without a run."""
    hardware, config = SimpleNamespace(dtype="float32"), SimpleNamespace(samples=2)
    plan = SimpleNamespace(hardware=hardware, config=config, workloads=(), exact=True)
    task = Generate(plan, None, console)  # type: ignore[arg-type]
    task.records = records
    return task


def page_of(rows: list[dict[str, Any]], records: list[dict[str, Any]], config: dict[str, Any], **changes: Any) -> str:
    task, where = generated(records), conditions(**changes)
    notes, headline, sections = task.warnings(rows), task.headline(rows), task.sections(rows)
    return render(ATTACK, Generate.columns, rows, where, config, notes, headline, sections, task.failures(rows))


def request(index: int, **changes: Any) -> dict[str, Any]:
    texts = {"prompt": f"prompt {index} {ATTACK}", "text": f"answer {index} {ATTACK}", "answer": "7"}
    counts = {"token_ids": [1, 2, 3], "accepted_counts": [2, 0], "finish_reason": "stop_token", "total_ms": 12.0}
    verdict = ("right", "wrong", "cut")[index]
    return {"id": index, **texts, **counts, "verdict": verdict, "identical": True, **changes}


REQUESTS = [request(0), request(1)]


class Balance(HTMLParser):
    """Fails on a tag that closes what is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """`<rect .../>` opens nothing."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_report_is_well_formed_and_runs_nothing_of_a_prompt() -> None:
    page = page_of([BASELINE, METHOD], REQUESTS, {"data": {"text": ATTACK}})
    balance = Balance()
    balance.feed(page)
    assert balance.scripts == 0
    assert balance.open == []
    assert page.count("&lt;script&gt;") >= 5 and "<script" not in page
    assert not re.search(r"https?://|src=|href=\"?[/.]|@import|url\(", page), "a page needs no network"


def test_report_holds_the_figures_and_every_text() -> None:
    page = page_of([BASELINE, METHOD], REQUESTS, {"sampling": {"seed": 3}})
    for shown in (
        "3.00",
        "2.50×",
        "1,234.5",
        "2/2",
        "50%",
        "autoregressive",
        "prompt 0",
        "answer 1",
        "90 %",
        "seed: 3",
    ):
        assert shown in page, shown
    assert "say nothing about a GPU" in page
    assert "say nothing about a GPU" not in page_of([METHOD], REQUESTS, {}, device="cuda", impl="triton")


def test_report_without_a_baseline_or_drafts() -> None:
    bare = METHOD | {"speedup_decode": None, "speedup_wall": None, "data": "code", "accuracy": None}
    bare |= {"acceptance_at": [], "num_accepted_histogram": [10], "lossless": UNCHECKED}
    page = page_of([bare], [request(0, verdict=None, identical=None)], {}).split("What the figures mean")[0]
    assert "identical to autoregressive" not in page and "Acceptance" not in page


def test_a_cut_answer_is_no_wrong_one() -> None:
    page = page_of([BASELINE, METHOD], [request(0), request(2)], {})
    assert "truncated by the length limit, expected 7" in page and "wrong, expected" not in page
    row = METHOD | {"answers": {"right": 1, "wrong": 1, "cut": 3}}
    assert "50% (3 truncated)" in page_of([BASELINE, row], REQUESTS, {})


def test_a_difference_is_shown_as_a_fault() -> None:
    differing = METHOD | {"lossless": {"checked": 2, "identical": 1, "first_difference": {}}}
    page = page_of([BASELINE, differing], REQUESTS, {})
    assert '<b class="bad">1/2' in page and '<td class="bad">1/2' in page and "1 of 2 requests differ" in page


def test_stacked_bars_share_one_scale() -> None:
    times = {"short": {"draft": 2.0}, "long": {"draft": 2.0, "verify": 6.0}}
    page = step_times([{"method": name, "num_steps": 2, "phase_times_ms": each} for name, each in times.items()])
    assert re.findall(r'class=stack style="width:([\d.]+)%', page) == ["25.00", "100.00"]
    assert [float(share) for share in re.findall(r"flex:([\d.]+)", page)] == [1.0, 1.0, 3.0]


@pytest.mark.parametrize(("share", "shown"), [(0.0, ""), (0.5, "█" * 20), (2.0, "█" * 40), (-1.0, ""), (1 / 320, "▏")])
def test_terminal_bars_have_the_length_of_their_share(share: float, shown: str) -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(bar_chart("t", [("", share, "green", "|")]))
    assert console.file.getvalue().splitlines()[1].split("|")[0].strip() == shown  # type: ignore[attr-defined]


def test_terminal_shows_table_charts_and_sample_but_no_commands() -> None:
    console = Console(file=io.StringIO(), width=120)
    task = generated([request(0, text="\x1b[2Jhidden [bold]not markup[/]"), request(2)], console)
    console.print(console_table("t", Generate.columns, [BASELINE, METHOD]))
    task.show([BASELINE, METHOD])
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for shown in ("autoregressive", "2.50×", "2/2", "50%", "acceptance by draft position", "90.0%", "verify", "right"):
        assert shown in text, shown
    assert "2 steps · truncated" in text
    assert "\x1b" not in text and "[bold]not markup[/]" in text
    assert printable("a\x07\nb") == "a·\nb"


def test_every_heading_and_every_count_is_explained() -> None:
    for task in (Generate, Compare, Throughput):
        assert all(column.help for column in task.columns), task
    counts = {"accepted": [8, 6], "rejected": [2, 1], "no_draft": [0, 1]}
    assert position_counts({"acceptance": counts}, 0) == " 8/10"
    assert position_counts({"acceptance": counts}, 1) == " 6/7, 1 without"


def test_a_page_links_to_the_files_beside_it_and_says_what_was_typed() -> None:
    where = conditions(date="2026-01-01T00:00:00+00:00", command="python run.py algo=dflash")
    page = render("t", Generate.columns, [BASELINE, METHOD], where, {"task": {"repeats": 2}}, files=["requests.jsonl"])
    assert '<a href="requests.jsonl">requests.jsonl</a>' in page and "python run.py algo=dflash" in page
    assert "repeats: 2" in page and "Mean of accepted drafts plus the bonus token" in page


def test_touched_experts_are_a_column_where_a_target_has_any() -> None:
    touched = {"num_experts": 128.0, "touched_per_step": 70.4, "rows_per_step": 8.0, "touched_per_row": 8.8}
    rows = [METHOD | {"experts": touched}, BASELINE | {"experts": None}]
    for found, shown in ((rows, True), ([row | {"experts": None} for row in rows], False)):
        console = Console(file=io.StringIO(), width=200)
        console.print(console_table("", Compare.columns, found))
        for text in (console.file.getvalue(), markdown(Compare.columns, found), html_table(Compare.columns, found)):
            assert ("experts/step" in text) == ("70/128" in text) == shown
