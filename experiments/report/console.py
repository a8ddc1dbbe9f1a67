"""What a run shows in the terminal: live progress, then a table, acceptance, the time ledger and samples."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from algorithms.runtime.engine import StepReport

OnStep = Callable[["StepReport"], None]
BAR_WIDTH = 40
PLAIN_INTERVAL_S = 15.0
PIPE_WIDTH = 110
PHASE_COLOURS = {
    "draft": "cyan",
    "verify": "blue",
    "accept": "magenta",
    "commit": "green",
    "host": "yellow",
    "graph": "blue",
}
NOT_A_GPU = {
    "triton-interpreter": "Times are of Triton's interpreter on the CPU and say nothing about a GPU; tokens, "
    "acceptance and identity do not depend on it.",
    "reference": "Times are of plain torch on the CPU and say nothing about a GPU.",
}


def plain_console() -> Console:
    """The terminal, or a wide page where the output is none; silence in a process that does not speak."""
    if not is_main_process():
        return Console(file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - lives as long as the process
    return Console(width=None if os.isatty(1) else PIPE_WIDTH)


def rates(report: StepReport) -> str:
    """Live figures of a run."""
    per_s = report.emitted_tokens / report.elapsed_s if report.elapsed_s else 0.0
    return f"{per_s:7.1f} tokens/s  {report.tokens_per_step:5.2f} tokens/step"


@contextmanager
def step_progress(console: Console, title: str, total: int) -> Iterator[OnStep]:
    """A bar over finished requests; where the output is no terminal, a line now and then."""
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


def figure(value: float | None, digits: int = 1, suffix: str = "") -> str:
    """A number for a table, a dash where there is none."""
    return "–" if value is None else f"{value:,.{digits}f}{suffix}"


def show(console: Console, summary: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
    """Everything after a run; `samples` are request records."""
    console.print(method_table(summary))
    if summary["acceptance_at"]:
        console.print(acceptance_chart(summary["acceptance_at"]))
    console.print(ledger_chart(summary))
    if summary["prediction"]:
        console.print(prediction_line(summary), highlight=False)
    for sample in samples:
        console.print(sample_panel(sample))
    if summary["device"] == "cpu":
        console.print(Text(NOT_A_GPU[summary["impl"]], style="yellow"))


def method_table(summary: Mapping[str, Any]) -> Table:
    """The algorithm beside its baseline."""
    table = Table(title=f"{summary['model']} · {summary['task']['name']} · {summary['num_requests']} requests")
    table.add_column("method")
    for column in ("tokens/s", "ms/step", "tokens/step", "speedup", "lossless", "accuracy"):
        table.add_column(column, justify="right")
    baseline = summary["baseline"]
    if baseline:
        _method_row(table, "autoregressive", baseline, "1.00×", "reference", baseline["accuracy"])
    checked, identical = summary["lossless"]["checked"], summary["lossless"]["identical"]
    style = "green" if identical == checked else "bold red"
    proof = f"[{style}]{identical}/{checked}[/]" if checked else "–"
    speedup = figure(summary["speedup"], 2, "×")
    _method_row(
        table,
        f"{summary['algo']} · {summary['backend']}",
        summary,
        speedup,
        proof,
        summary["task"]["accuracy"],
    )
    return table


def _method_row(
    table: Table, name: str, method: Mapping[str, Any], speedup: str, proof: str, accuracy: float | None
) -> None:
    table.add_row(
        name,
        figure(method["decode_tokens_per_s"]),
        figure(method["step_ms"]["median"], 2),
        figure(method["tokens_per_step"], 2),
        speedup,
        proof,
        "–" if accuracy is None else f"{accuracy:.0%}",
    )


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """A bar of `share` of `width` characters, to an eighth of a character."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]


def acceptance_chart(rates_at: Sequence[float | None]) -> Table:
    """Acceptance of each draft position, given that the step reached it."""
    chart = Table.grid(padding=(0, 1))
    chart.add_row("", Text("acceptance by draft position", style="bold"))
    for position, rate in enumerate(rates_at, start=1):
        if rate is not None:
            chart.add_row(f"{position:>4}", Text(bar(rate), style="green"), f"{rate:6.1%}")
    return chart


def ledger_chart(summary: Mapping[str, Any]) -> Table:
    """Milliseconds of a step by phase."""
    ledger, steps = summary["ledger_ms"], max(1, summary["num_steps"])
    total = sum(ledger.values()) or 1.0
    chart = Table.grid(padding=(0, 1))
    chart.add_row("", Text("time of a step", style="bold"))
    for phase, spent in ledger.items():
        filled = Text(bar(spent / total), style=PHASE_COLOURS[phase])
        chart.add_row(f"{phase:>7}", filled, f"{spent / steps:9.2f} ms {spent / total:6.1%}")
    return chart


def prediction_line(summary: Mapping[str, Any]) -> str:
    """Predicted speedup, and what lies between it and the measured one."""
    found = summary["prediction"]
    return (
        f"speedup: {figure(found['predicted'], 2, '×')} predicted "
        f"({figure(summary['tokens_per_step'], 2)} tokens/step, a step takes "
        f"{figure(found['step_time_ratio'], 2, '×')} the baseline's), "
        f"{figure(summary['speedup'], 2, '×')} measured (rows a step {figure(found['occupancy'], 2, '×')}, "
        f"kept tokens {figure(found['kept'], 2, '×')} the baseline's)"
    )


def printable(text: str) -> str:
    """`text` without characters that would command the terminal instead of being shown."""
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)


def sample_panel(record: Mapping[str, Any], tail: int = 300) -> Panel:
    """One prompt's end and what was written to it."""
    prompt = record["prompt"] if len(record["prompt"]) <= tail else "…" + record["prompt"][-tail:]
    prompt, text = printable(prompt), printable(record["text"])
    steps = max(1, len(record["accepted_counts"]))
    verdict = {True: " · right", False: " · wrong", None: ""}[record["correct"]]
    title = f"request {record['id']} · {len(record['token_ids'])} tokens in {steps} steps{verdict}"
    return Panel(Text.assemble((prompt, "dim"), "\n\n", text), title=title, title_align="left")
