"""What a run shows in the terminal beside its table: live progress, acceptance, the time of a step, samples."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from experiments.app.distributed import is_main_process
from experiments.report.page import position_counts
from experiments.report.plots import PHASE_COLOURS
from experiments.report.tables import Row, counted, figure

if TYPE_CHECKING:
    from algorithms.runtime.session import StepReport

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
    """A bar over finished requests. Where the output is no terminal, a line every `PLAIN_INTERVAL_S` seconds."""
    if not console.is_terminal:
        yield _plain_progress(console, title)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("[bold]{task.description:<14}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rates]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=total, rates="")
        yield lambda report: progress.update(task, completed=report.num_finished, rates=rates(report))


def _plain_progress(console: Console, title: str) -> OnStep:
    last = time.monotonic()

    def on_step(report: StepReport) -> None:
        nonlocal last
        done = report.num_finished == report.num_requests
        if done or time.monotonic() - last >= PLAIN_INTERVAL_S:
            last = time.monotonic()
            console.print(f"{title}: {report.num_finished}/{report.num_requests}  {rates(report)}", highlight=False)

    return on_step


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """A bar of `share` of `width` characters, to an eighth of a character."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]


def acceptance_chart(row: Row) -> Table:
    """Acceptance of each draft position, among the steps that reached it and had a draft, with its counts."""
    chart = Table.grid(padding=(0, 1))
    chart.add_row("", Text("acceptance by draft position", style="bold"))
    for index, rate in enumerate(row["acceptance_at"]):
        if rate is not None:
            counts = position_counts(row, index)
            chart.add_row(f"{index + 1:>4}", Text(bar(rate), style="green"), f"{rate:6.1%} {counts}")
    return chart


def ledger_chart(row: Row) -> Table:
    """Milliseconds per step by phase."""
    ledger, steps = row["ledger_ms"], max(1, row["num_steps"])
    total = sum(ledger.values()) or 1.0
    chart = Table.grid(padding=(0, 1))
    chart.add_row("", Text("time of a step", style="bold"))
    for phase, spent in ledger.items():
        filled = Text(bar(spent / total), style=PHASE_COLOURS[phase])
        chart.add_row(f"{phase:>7}", filled, f"{spent / steps:9.2f} ms {spent / total:6.1%}")
    return chart


def prediction_line(row: Row) -> str:
    """The decode speedup as the product of what predicts it and of the factors between that and the measured one."""
    found = row["prediction"]
    return (
        f"decode speedup {figure(row['speedup_decode'], 2, '×')} = predicted {figure(found['predicted'], 2, '×')} · "
        f"occupancy {figure(found['occupancy'], 2)} · kept {figure(found['kept'], 2)}\n"
        f"predicted = {figure(row['tokens_per_step'], 2)} tokens/step / {figure(found['step_time_ratio'], 2)}, "
        "the time of a step over the baseline's"
    )


def printable(text: str) -> str:
    """`text` with a dot for every control character, which a terminal would obey instead of showing it."""
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)


def sample_panel(record: Row, tail: int = 300) -> Panel:
    """The end of one prompt and the text that followed. `record` is a line of requests.jsonl."""
    prompt = record["prompt"] if len(record["prompt"]) <= tail else "…" + record["prompt"][-tail:]
    prompt, text = printable(prompt), printable(record["text"])
    steps = counted(max(1, len(record["accepted_counts"])), "step")
    verdict = f" · {record['verdict']}" if record["verdict"] else ""
    title = f"request {record['id']} · {counted(len(record['token_ids']), 'token')} in {steps}{verdict}"
    return Panel(Text.assemble((prompt, "dim"), "\n\n", text), title=title, title_align="left", width=PANEL_WIDTH)
