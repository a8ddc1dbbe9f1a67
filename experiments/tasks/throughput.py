"""Tokens per second, time to the first token and latency between tokens as more requests share the batch.

Each level of concurrency serves the same requests with autoregressive decoding and with the run's algorithm, in batches
of up to that many. The clock of a request starts when it enters the batch. A step's tokens share the time since the
step before (`inter_token_ms`, pooled over tokens), so a speculative step is not counted as one slow token and some free
ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from experiments.app.distributed import output_folder
from experiments.app.plan import Setup, check_drafters, prepare
from experiments.app.provenance import run_conditions
from experiments.app.schema import GenerateConfig, to_plain
from experiments.report import metrics as figures
from experiments.report.console import NOT_A_GPU, figure, plain_console
from experiments.report.page import configuration, note, page, provenance_table, section
from experiments.report.plots import legend, lines
from experiments.report.run_folder import CONFIG, REPORT, SUMMARY, open_run_folder, to_json
from experiments.report.tables import Column, console_table, html_table, write_tables
from experiments.report.tracking import track_rows
from experiments.tasks.decoding import AUTOREGRESSIVE, Decoded, baseline_config, decode

if TYPE_CHECKING:
    from algorithms.runtime.request import Completion, Request

Row = dict[str, Any]


def run(config: GenerateConfig, composed: DictConfig) -> float:
    """Measure every level; returns the algorithm's best tokens per second."""
    console = plain_console()
    check_drafters(config, [config.algo])
    setup = prepare(config)
    with open_run_folder(output_folder(Path(HydraConfig.get().runtime.output_dir))) as folder:
        folder.write(CONFIG, OmegaConf.to_yaml(composed, resolve=True))
        rows = [row for level in config.task.concurrency for row in measure_level(config, setup, level, console)]
        conditions = run_conditions(config, setup.hardware)
        write_tables(folder, "throughput", COLUMNS, rows, conditions)
        folder.write(REPORT, render(config.name, rows, conditions, to_plain(composed)))
        folder.write(SUMMARY, to_json({"name": config.name, "task": "throughput", "rows": rows, **conditions}) + "\n")
    console.print(console_table(f"{conditions['model']} · {setup.prompts.name}", COLUMNS, rows))
    if conditions["device"] == "cpu":
        console.print(NOT_A_GPU[conditions["impl"]], style="yellow")
    for warning in [*row_warnings(rows), *track_rows(config.tracker, folder.path, config.name, rows)]:
        console.print(f"[bold yellow]warning:[/] {warning}", highlight=False)
    console.print(f"report: {folder.path / REPORT}", highlight=False, soft_wrap=True)
    return max(row["tokens_per_s"] or 0.0 for row in rows if row["method"] == config.algo.name)


def measure_level(config: GenerateConfig, setup: Setup, concurrency: int, console: Console) -> list[Row]:
    """Baseline and algorithm with up to `concurrency` requests at a time."""
    level = replace(config, runtime=replace(config.runtime, max_batch=concurrency, num_pages=None))
    count = max(concurrency * config.task.requests, len(setup.requests) if concurrency == 1 else 0)
    asked = repeated(setup.requests, count)
    rows: list[Row] = []
    algos = [baseline_config()] + ([config.algo] if config.algo.name != AUTOREGRESSIVE else [])
    for algo in algos:
        decoded = decode(level, setup, algo, console, asked, f"{algo.name} ×{concurrency}")
        rows.append(level_row(setup, algo.name, concurrency, decoded, asked))
        rows[-1]["speedup"] = figures.ratio(rows[-1]["tokens_per_s"] or 0.0, rows[0]["tokens_per_s"] or 0.0)
    return rows


def repeated(requests: Sequence[Request], count: int) -> list[Request]:
    """`count` requests: the prompts in turn, each time with another seed."""
    rounds = [(turn, request) for turn in range(-(-count // len(requests))) for request in requests][:count]
    return [
        replace(r.with_sampling(seed=r.sampling.seed + turn * len(requests)), id=i)
        for i, (turn, r) in enumerate(rounds)
    ]


def level_row(setup: Setup, method: str, concurrency: int, decoded: Decoded, asked: Sequence[Request]) -> Row:
    generation = decoded.generation
    completions: list[Completion] = generation.completions
    output = sum(len(c.token_ids) for c in completions)
    accepted = [a for c in completions for a in c.accepted_counts]
    return {
        "method": method,
        "concurrency": concurrency,
        "num_requests": len(asked),
        "distinct_prompts": len({request.prompt_ids for request in asked}),
        "tokens_per_s": figures.ratio(output * 1e3, generation.wall_ms),
        "decode_tokens_per_s": figures.ratio(output * 1e3, generation.decode_ms),
        "tokens_per_step": figures.ratio(sum(accepted) + len(accepted), len(accepted)),
        "acceptance_at": figures.acceptance_at(figures.num_accepted_histogram(accepted, decoded.max_depth)),
        "ttft_ms": figures.quantiles([c.ttft_ms for c in completions], p50=0.5, p90=0.9),
        "inter_token_ms": figures.quantiles(inter_token_ms(completions), p50=0.5, p90=0.9),
        "accuracy": setup.accuracy(completions),
        "graphs": generation.graphs.level,
    }


def row_warnings(rows: Sequence[Row]) -> list[str]:
    """What a reader of the table must know of its rows."""
    found = [
        f"{row['method']} ×{row['concurrency']}: {text}"
        for row in rows
        for text in figures.acceptance_warnings(row["acceptance_at"])
    ]
    repeats = [row for row in rows if row["distinct_prompts"] < row["num_requests"]]
    if repeats:
        most = max(repeats, key=lambda row: row["num_requests"])
        found.append(
            f"prompts were asked more than once (×{most['concurrency']}: {most['num_requests']} requests, "
            f"{most['distinct_prompts']} prompts): an algorithm that learns from text, such as ngram, has seen the "
            "answers before and looks faster than it is; raise data.limit"
        )
    return found


def inter_token_ms(completions: Sequence[Completion]) -> list[float]:
    """One figure a token behind the first step's: the time since the step before over the tokens the step gave.

    Tokens past the end of a request are given to nobody.
    """
    found: list[float] = []
    for completion in completions:
        given = [accepted + 1 for accepted in completion.accepted_counts]
        given[-1] -= completion.num_truncated
        for (before, after), tokens in zip(pairwise(completion.emitted_at_ms), given[1:], strict=True):
            found += [(after - before) / tokens] * tokens
    return found


COLUMNS = (
    Column("concurrency", lambda row: str(row["concurrency"])),
    Column("method", lambda row: row["method"], numeric=False),
    Column("tokens/s", lambda row: figure(row["tokens_per_s"])),
    Column("speedup", lambda row: figure(row["speedup"], 2, "×")),
    Column("first token ms p50 / p90", lambda row: _pair(row["ttft_ms"], 1)),
    Column("between tokens ms p50 / p90", lambda row: _pair(row["inter_token_ms"], 2)),
    Column("tokens/step", lambda row: figure(row["tokens_per_step"], 2)),
    Column("accuracy", lambda row: "–" if row["accuracy"] is None else f"{row['accuracy']:.0%}"),
)


def _pair(found: Mapping[str, float | None], digits: int) -> str:
    return f"{figure(found['p50'], digits)} / {figure(found['p90'], digits)}"


def render(name: str, rows: Sequence[Row], conditions: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    methods = list(dict.fromkeys(row["method"] for row in rows))
    series = [
        (method, [(float(r["concurrency"]), r["tokens_per_s"] or 0.0) for r in rows if r["method"] == method])
        for method in methods
    ]
    chart = lines(series, "tokens per second", ("requests at a time", "tokens/s")) + legend(methods)
    parts = [section("Levels", html_table(COLUMNS, rows)), section("Tokens per second", chart), configuration(config)]
    if conditions["device"] == "cpu":
        parts.insert(0, note(NOT_A_GPU[conditions["impl"]]))
    parts[:0] = [note(text) for text in row_warnings(rows)]
    parts.append(provenance_table(conditions["versions"] | {"revision": conditions["revision"]}))
    lead = f"{conditions['model']}; {conditions['device']} {conditions['dtype']}, {conditions['impl']}; "
    return page(f"{name}: throughput", lead + conditions["machine"], parts)
