"""The HTML report and the terminal: complete, escaped, well-formed, and free of the network."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from experiments.report.console import bar, printable, show
from experiments.report.plots import LABEL, VALUE, WIDTH, bars, stacked
from experiments.report.run_page import render

VOID = {"meta"}
ATTACK = "<script>alert('x')</script>&amp;"
METHOD: dict[str, Any] = {
    "num_requests": 2,
    "output_tokens": 30,
    "num_steps": 10,
    "tokens_per_step": 3.0,
    "num_accepted_histogram": [1, 2, 3, 4],
    "acceptance_at": [0.9, 0.5, None],
    "decode_tokens_per_s": 1234.5,
    "end_to_end_tokens_per_s": 1000.0,
    "ttft_ms": {"p50": 5.0, "p90": 9.0},
    "step_ms": {"median": 2.0, "p20": 1.0, "p80": 3.0},
    "ledger_ms": {"draft": 5.0, "verify": 10.0, "accept": 1.0, "commit": 2.0, "host": 2.0},
}


def summary(**changes: Any) -> dict[str, Any]:
    return {
        "algo": "dflash",
        "backend": "fa4",
        "model": ATTACK,
        "device": "cpu",
        "dtype": "float32",
        "impl": "triton-interpreter",
        "machine": "a machine",
        **METHOD,
        "baseline": {**METHOD, "tokens_per_step": 1.0, "accuracy": 1.0},
        "prediction": None,
        "speedup": 2.5,
        "lossless": {"checked": 2, "identical": 2, "first_difference": None},
        "task": {"name": "arithmetic", "accuracy": 0.5},
        "sampling": {"temperature": 0.7, "max_new_tokens": 64},
        "page_size": 16,
        "max_batch": 4,
        "seed": 3,
        "git_revision": None,
        "versions": {"torch": "2"},
        **changes,
    }


def request(index: int, **changes: Any) -> dict[str, Any]:
    return {
        "id": index,
        "prompt": f"prompt {index} {ATTACK}",
        "text": f"answer {index} {ATTACK}",
        "token_ids": [1, 2, 3],
        "accepted_counts": [2, 0],
        "finish_reason": "stop_token",
        "total_ms": 12.0,
        "answer": "7",
        "correct": index == 0,
        "identical": True,
        **changes,
    }


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
    page = render(summary(), REQUESTS, {"data": {"text": ATTACK}})
    balance = Balance()
    balance.feed(page)
    assert balance.scripts == 0
    assert balance.open == []
    assert page.count("&lt;script&gt;") >= 5 and "<script" not in page


def test_report_needs_no_network() -> None:
    page = render(summary(), REQUESTS, {})
    assert not re.search(r"https?://|src=|href=|@import|url\(", page)


def test_report_holds_the_figures_and_every_text() -> None:
    page = render(summary(), REQUESTS, {"sampling": {"seed": 3}})
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
        "&quot;seed&quot;: 3",
    ):
        assert shown in page, shown
    assert "say nothing about a GPU" in page
    assert "say nothing about a GPU" not in render(summary(device="cuda", impl="triton"), REQUESTS, {})


def test_report_without_a_baseline_or_drafts() -> None:
    bare = summary(
        baseline=None,
        speedup=None,
        acceptance_at=[],
        num_accepted_histogram=[10],
        lossless={"checked": 0, "identical": 0, "first_difference": None},
        task={"name": "code", "accuracy": None},
    )
    page = render(bare, [request(0, correct=None, identical=None)], {})
    assert "identical to autoregressive" not in page and "Acceptance" not in page


def test_a_difference_is_shown_as_a_fault() -> None:
    page = render(summary(lossless={"checked": 2, "identical": 1, "first_difference": {}}), REQUESTS, {})
    assert 'class="bad">1/2' in page and "1 of 2 requests differ" in page


def test_bars_stay_inside_their_track() -> None:
    svg = bars([("1", -0.5, ""), ("2", 0.5, ""), ("3", 1.5, "")], "title")
    span = WIDTH - LABEL - VALUE
    widths = [float(w) for w in re.findall(r'width="([\d.]+)" height="14" rx="3" class="bar"', svg)]
    assert widths == [0.0, span / 2, span]


def test_ledgers_share_one_scale() -> None:
    svg = stacked([("short", {"draft": 1.0}), ("long", {"draft": 1.0, "verify": 3.0})], "ms")
    widths = [float(w) for w in re.findall(r'width="([\d.]+)" height="22"', svg)]
    assert widths == [240.0, 240.0, 720.0]


@pytest.mark.parametrize(("share", "cells"), [(0.0, 0), (0.5, 4), (1.0, 8), (2.0, 8), (-1.0, 0)])
def test_terminal_bars_have_the_length_of_their_share(share: float, cells: int) -> None:
    assert bar(share, width=8) == "█" * cells


def test_terminal_bars_resolve_an_eighth() -> None:
    assert bar(1 / 64, width=8) == "▏"


def test_terminal_shows_table_charts_and_sample_but_no_commands() -> None:
    console = Console(file=io.StringIO(), width=120)
    show(console, summary(), [request(0, text="\x1b[2Jhidden [bold]not markup[/]")])
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for shown in (
        "autoregressive",
        "2.50×",
        "2/2",
        "50%",
        "acceptance by draft position",
        "90.0%",
        "verify",
        "right",
    ):
        assert shown in text, shown
    assert "\x1b" not in text and "[bold]not markup[/]" in text
    assert "interpreter" in text
    assert printable("a\x07\nb") == "a·\nb"
