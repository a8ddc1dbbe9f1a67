"""Output of a run besides its table: live progress, acceptance, the time of a step, samples."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.bar import Bar
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from experiments.app.hardware import is_main_process
from experiments.report.html_page import position_counts
from experiments.report.tables import Result, counted, figure
from experiments.report.templates import PHASE_COLOURS

if TYPE_CHECKING:
    from algorithms.engine.session import StepReport

OnStep = Callable[["StepReport"], None]
BAR_WIDTH = 40
PLAIN_INTERVAL_S = 15.0
PIPE_WIDTH, PANEL_WIDTH = 160, 110


def plain_console() -> Console:
    """The terminal, or lines of `PIPE_WIDTH` where the output is a file or a pipe. Only the main process prints."""
    if not is_main_process():
        return Console(file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - lives as long as the process
    return Console(width=None if os.isatty(1) else PIPE_WIDTH)


def rates(report: StepReport) -> str:
    """Tokens per second and per step so far."""
    per_s = report.emitted_tokens / report.elapsed_s if report.elapsed_s else 0.0
    return f"{per_s:7.1f} tokens/s  {report.tokens_per_step:5.2f} tokens/step"


@contextmanager
def step_progress(console: Console, title: str, total: int) -> Iterator[OnStep]:
    """A bar over finished requests. Outside of a terminal, a line every `PLAIN_INTERVAL_S` seconds."""
    if not console.is_terminal:
        last = time.monotonic()

        def on_step(report: StepReport) -> None:
            nonlocal last
            if report.num_finished == report.num_requests or time.monotonic() - last >= PLAIN_INTERVAL_S:
                last = time.monotonic()
                done = f"{report.num_finished}/{report.num_requests}"
                console.print(f"{title}: {done}  {rates(report)}", highlight=False)

        yield on_step
        return
    description, shown = TextColumn("[bold]{task.description:<14}"), TextColumn("{task.fields[rates]}")
    parts = (SpinnerColumn(), description, BarColumn(bar_width=30), MofNCompleteColumn(), shown, TimeElapsedColumn())
    with Progress(*parts, console=console) as progress:
        task = progress.add_task(title, total=total, rates="")
        yield lambda report: progress.update(task, completed=report.num_finished, rates=rates(report))


def bar_chart(title: str, bars: Iterable[tuple[str, float, str, str]]) -> Table:
    """Horizontal bars, each of (label, share in [0, 1], colour, value as text)."""
    chart = Table.grid(padding=(0, 1))
    chart.add_row("", Text(title, style="bold"))
    for label, share, colour, value in bars:
        chart.add_row(label, Bar(1, 0, max(0.0, min(1.0, share)), width=BAR_WIDTH, color=colour), value)
    return chart


def acceptance_chart(result: Result) -> Table:
    """Acceptance of each draft position, among the steps that reached it and had a draft, with its counts."""
    rates = [(i, rate) for i, rate in enumerate(result["acceptance_at"]) if rate is not None]
    bars = ((f"{i + 1:>4}", rate, "green", f"{rate:6.1%} {position_counts(result, i)}") for i, rate in rates)
    return bar_chart("acceptance by draft position", bars)


def phase_chart(result: Result) -> Table:
    """Milliseconds per step by phase."""
    phases, steps = result["phase_times_ms"], max(1, result["num_steps"])
    total = sum(phases.values()) or 1.0
    values = ((name, ms / total, f"{ms / steps:9.2f} ms {ms / total:6.1%}") for name, ms in phases.items())
    bars = ((f"{name:>7}", share, PHASE_COLOURS[name], value) for name, share, value in values)
    return bar_chart("time of a step", bars)


def prediction_line(result: Result) -> str:
    """The decode speedup as a product: what step times predict, and the factors between that and the measured one."""
    found = result["prediction"]
    return (
        f"decode speedup {figure(result['speedup_decode'], 2, '×')} = predicted {figure(found['predicted'], 2)} × "
        f"occupancy {figure(found['occupancy'], 2)} × kept {figure(found['kept'], 2)}\n"
        f"predicted {figure(found['predicted'], 2, '×')} = {figure(result['tokens_per_step'], 2)} tokens/step over a "
        f"step time of {figure(found['step_time_ratio'], 2, '×')} the baseline's"
    )


def printable(text: str) -> str:
    """`text` with a dot for every control character, which a terminal would obey instead of showing it."""
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)


def sample_panel(record: Result, tail: int = 300) -> Panel:
    """The end of one prompt and its output. `record` is a line of requests.jsonl."""
    prompt = record["prompt"] if len(record["prompt"]) <= tail else "…" + record["prompt"][-tail:]
    prompt, output = printable(prompt), printable(record["text"])
    steps = counted(max(1, len(record["accepted_counts"])), "step")
    verdict = f" · {'truncated' if record['verdict'] == 'cut' else record['verdict']}" if record["verdict"] else ""
    title = f"request {record['id']} · {counted(len(record['token_ids']), 'token')} in {steps}{verdict}"
    return Panel(Text.assemble((prompt, "dim"), "\n\n", output), title=title, title_align="left", width=PANEL_WIDTH)
