"""Several methods on the same prompts in one run: one target, one cache, one verifier, one clock; only drafters differ.

Every prompt set is decoded once by the target alone; speedups, identity and accuracy of each method are held against
that. Writes compare.md, compare.csv, compare.jsonl, report.html and summary.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from experiments.app.distributed import output_folder
from experiments.app.errors import user_errors
from experiments.app.plan import Setup, check_drafters, load_prompt_set, prepare
from experiments.app.provenance import run_conditions
from experiments.app.schema import GenerateConfig, to_plain
from experiments.report import metrics as figures
from experiments.report.console import NOT_A_GPU, figure, plain_console
from experiments.report.page import configuration, note, page, provenance_table, section
from experiments.report.plots import legend, lines, phase_legend, stacked
from experiments.report.run_folder import CONFIG, REPORT, SUMMARY, open_run_folder, to_json
from experiments.report.tables import Column, console_table, html_table, write_tables
from experiments.report.tracking import track_rows
from experiments.tasks.decoding import AUTOREGRESSIVE, Decoded, baseline_config, decode
from experiments.tasks.schemas import chosen_methods

if TYPE_CHECKING:
    from algorithms.runtime.engine import Generation

Row = dict[str, Any]


def run(config: GenerateConfig, composed: DictConfig) -> float:
    """Decode everything, write the tables; returns the best method's pooled tokens per step."""
    console = plain_console()
    task = config.task
    methods = chosen_methods(task)
    check_drafters(config, methods.values())
    with user_errors(ValueError, OSError):
        sets = [load_prompt_set(data, task.limit) for data in task.data]
    setup = prepare(config)
    with open_run_folder(output_folder(Path(HydraConfig.get().runtime.output_dir))) as folder:
        folder.write(CONFIG, OmegaConf.to_yaml(composed, resolve=True))
        rows: list[Row] = []
        for prompts in sets:
            rows += compare_on(config, setup.with_prompts(config, prompts), methods, console)
        conditions = run_conditions(config, setup.hardware)
        write_tables(folder, "compare", COLUMNS, rows, conditions)
        folder.write(REPORT, render(config.name, rows, conditions, to_plain(composed)))
        folder.write(SUMMARY, to_json({"name": config.name, "task": task.name, "rows": rows, **conditions}) + "\n")
    console.print(console_table(f"{conditions['model']} · {config.backend.name}", COLUMNS, rows))
    for warning in [*row_warnings(rows, conditions), *track_rows(config.tracker, folder.path, config.name, rows)]:
        console.print(f"[bold yellow]warning:[/] {warning}", highlight=False)
    console.print(f"report: {folder.path / REPORT}", highlight=False, soft_wrap=True)
    return max((row["tokens_per_step"] for row in rows if row["tokens_per_step"]), default=0.0)


def compare_on(config: GenerateConfig, setup: Setup, methods: Mapping[str, Any], console: Console) -> list[Row]:
    """One row a method on one prompt set, the baseline first."""
    name = setup.prompts.name
    plain = decode(config, setup, baseline_config(), console, label=f"{name} {AUTOREGRESSIVE}")
    rows = [method_row(setup, AUTOREGRESSIVE, AUTOREGRESSIVE, plain, None)]
    for label, algo in methods.items():
        found = decode(config, setup, algo, console, label=f"{name} {label}")
        rows.append(method_row(setup, label, algo.name, found, plain.generation, rows[0]))
    return rows


def method_row(
    setup: Setup,
    label: str,
    algo: str,
    decoded: Decoded,
    plain: Generation | None,
    baseline: Row | None = None,
) -> Row:
    """The figures of one method on one prompt set."""
    generation = decoded.generation
    row: Row = {"data": setup.prompts.name, "method": label, "algo": algo, "rule": decoded.rule}
    row["graph"] = generation.graphs.level
    row |= figures.summarize_method(generation, decoded.max_depth)
    row["accuracy"] = setup.accuracy(generation.completions)
    row["attention"] = decoded.served
    exact = plain is not None and decoded.comparable(setup.requests)
    row["lossless"] = figures.lossless(generation.completions, plain.completions if plain and exact else None)
    row["speedup"] = row["prediction"] = None
    if baseline is not None:
        row["speedup"] = figures.ratio(row["decode_tokens_per_s"] or 0.0, baseline["decode_tokens_per_s"] or 0.0)
        row["prediction"] = figures.predict_speedup(row, baseline)
    return row


def _acceptance(row: Mapping[str, Any]) -> str:
    return " ".join("–" if rate is None else f"{100 * rate:.0f}" for rate in row["acceptance_at"][:6]) or "–"


def _lossless(row: Mapping[str, Any]) -> str:
    proof = row["lossless"]
    if row["algo"] == AUTOREGRESSIVE:
        return "reference"
    return f"{proof['identical']}/{proof['checked']}" if proof["checked"] else "by law"


def _predicted(row: Mapping[str, Any]) -> str:
    return figure(row["prediction"]["predicted"], 2, "×") if row["prediction"] else "–"


COLUMNS = (
    Column("data", lambda row: row["data"], numeric=False),
    Column("method", lambda row: row["method"], numeric=False),
    Column("speedup", lambda row: figure(row["speedup"], 2, "×")),
    Column("predicted", _predicted),
    Column("tokens/step", lambda row: figure(row["tokens_per_step"], 2)),
    Column("acceptance@1…6 %", _acceptance),
    Column("ms/step", lambda row: figure(row["step_ms"]["median"], 2)),
    Column("lossless", _lossless),
    Column("accuracy", lambda row: "–" if row["accuracy"] is None else f"{row['accuracy']:.0%}"),
)


def row_warnings(rows: Sequence[Row], conditions: Mapping[str, Any]) -> list[str]:
    """Warnings of every row, each with its place, and of rows that are no fair pair."""
    levels = {row["graph"] for row in rows}
    unfair = [f"methods differ in runtime.graph ({', '.join(sorted(levels))}): set it for all of them"]
    return (unfair if len(levels) > 1 else []) + [
        f"{row['data']}, {row['method']}: {text}"
        for row in rows
        for text in figures.warnings({**row, "dtype": conditions["dtype"]})
    ]


def render(name: str, rows: Sequence[Row], conditions: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The page: table, acceptance by position, where the time of a step goes."""
    parts = [section("Methods and tasks", html_table(COLUMNS, rows))]
    if conditions["device"] == "cpu":
        parts.insert(0, note(NOT_A_GPU[conditions["impl"]]))
    parts += [note(text) for text in row_warnings(rows, conditions)]
    for data in dict.fromkeys(row["data"] for row in rows):
        here = [row for row in rows if row["data"] == data]
        parts.append(section(f"Acceptance by draft position, {data}", _acceptance_chart(here)))
        parts.append(section(f"Time of a step, {data}", _ledgers(here)))
    parts += [configuration(config), provenance_table(conditions["versions"] | {"revision": conditions["revision"]})]
    lead = f"{conditions['model']}; {conditions['device']} {conditions['dtype']}, {conditions['impl']}; "
    return page(f"{name}: methods compared", lead + conditions["machine"], parts)


def _acceptance_chart(rows: Sequence[Row]) -> str:
    series = [
        (row["method"], [(i + 1.0, rate) for i, rate in enumerate(row["acceptance_at"]) if rate is not None])
        for row in rows
        if row["acceptance_at"]
    ]
    chart = lines(series, "acceptance by draft position", ("draft position", "acceptance"), top=1.0)
    return chart + legend([name for name, _ in series])


def _ledgers(rows: Sequence[Row]) -> str:
    shown = [
        (row["method"], {phase: ms / max(1, row["num_steps"]) for phase, ms in row["ledger_ms"].items()})
        for row in rows
    ]
    return stacked(shown, "ms") + phase_legend(shown)
