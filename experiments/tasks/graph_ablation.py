"""What capturing more of a step gains: the same run at each level, with the host's and the device's time a step.

`launch` is the host's time to start a step; `device` the time between the device events around its phases. Captured
or not, the tokens must be the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from experiments.app.distributed import output_folder
from experiments.app.plan import Setup, check_combination, check_drafters, prepare, resolve_hardware
from experiments.app.provenance import run_conditions
from experiments.app.schema import GenerateConfig
from experiments.report import metrics as figures
from experiments.report.console import NOT_A_GPU, figure, plain_console
from experiments.report.run_folder import CONFIG, SUMMARY, open_run_folder, to_json
from experiments.report.tables import Column, console_table, write_tables
from experiments.report.tracking import track_rows
from experiments.tasks.decoding import decode

Row = dict[str, Any]
NEEDS_GPU = "needs a CUDA device"


def run(config: GenerateConfig, composed: DictConfig) -> float:
    """Measure every level; returns the best tokens per second."""
    console = plain_console()
    check_drafters(config, [config.algo])
    hardware = resolve_hardware(config.runtime)
    if hardware.device == "cuda":
        for level in config.task.levels:
            check_combination(at_level(config, level), hardware)
    setup = prepare(config)
    with open_run_folder(output_folder(Path(HydraConfig.get().runtime.output_dir))) as folder:
        folder.write(CONFIG, OmegaConf.to_yaml(composed, resolve=True))
        rows = measure_levels(config, setup, console)
        conditions = run_conditions(config, setup.hardware)
        write_tables(folder, "graph_ablation", COLUMNS, rows, conditions)
        summary = {"name": config.name, "task": "graph_ablation", "rows": rows, **conditions}
        folder.write(SUMMARY, to_json(summary) + "\n")
    console.print(console_table(f"{conditions['model']} · {config.algo.name} · {config.backend.name}", COLUMNS, rows))
    if conditions["device"] == "cpu":
        console.print(NOT_A_GPU[conditions["impl"]], style="yellow")
    for warning in [*row_warnings(rows), *track_rows(config.tracker, folder.path, config.name, rows)]:
        console.print(f"[bold yellow]warning:[/] {warning}", highlight=False)
    console.print(f"results: {folder.path}", highlight=False, soft_wrap=True)
    return max(row["decode_tokens_per_s"] or 0.0 for row in rows)


def measure_levels(config: GenerateConfig, setup: Setup, console: Console) -> list[Row]:
    """One row a level. Without a GPU nothing can be captured, and the row says so."""
    rows: list[Row] = []
    first: list[list[int]] | None = None
    for level in config.task.levels:
        if level != "none" and setup.hardware.device != "cuda":
            rows.append(EMPTY | {"level": level, "note": NEEDS_GPU})
            continue
        decoded = decode(at_level(config, level), setup, config.algo, console, label=f"graph={level}")
        generation = decoded.generation
        tokens = [completion.token_ids for completion in generation.completions]
        first = first or tokens
        steps = max(1, generation.num_steps)
        device_ms = sum(ms for phase, ms in generation.ledger_ms.items() if phase != "host")
        output = sum(map(len, tokens))
        accepted = [count for completion in generation.completions for count in completion.accepted_counts]
        rows.append(
            {
                "level": level,
                "note": _note(config, level, generation.graphs.level, _differing(tokens, first)),
                "launch_ms_per_step": generation.launch_ms / steps,
                "device_ms_per_step": device_ms / steps,
                "decode_tokens_per_s": figures.ratio(output * 1e3, generation.decode_ms),
                "acceptance_at": figures.acceptance_at(figures.num_accepted_histogram(accepted, decoded.max_depth)),
                "graphs": asdict(generation.graphs),
            }
        )
    return rows


def row_warnings(rows: Sequence[Row]) -> list[str]:
    """What a reader of the table must know of the levels that ran."""
    ran = [row for row in rows if "acceptance_at" in row]
    return [f"{row['level']}: {text}" for row in ran for text in figures.acceptance_warnings(row["acceptance_at"])]


EMPTY: Row = dict.fromkeys(("launch_ms_per_step", "device_ms_per_step", "decode_tokens_per_s"))


def at_level(config: GenerateConfig, level: str) -> GenerateConfig:
    return replace(config, runtime=replace(config.runtime, graph=level))


def _note(config: GenerateConfig, asked: str, used: str, differing: int) -> str:
    """What a reader of the row must know; an algorithm may insist on a level of its own."""
    if used != asked:
        return f"algo={config.algo.name} ran with graph={used}"
    return f"{differing} requests differ" if differing else "same tokens"


def _differing(tokens: list[list[int]], first: list[list[int]]) -> int:
    return sum(a != b for a, b in zip(tokens, first, strict=True))


def _graphs(row: Mapping[str, Any], key: str, scale: float, digits: int, suffix: str) -> str:
    return figure(row["graphs"][key] * scale, digits, suffix) if row.get("graphs") else "–"


COLUMNS = (
    Column("captured", lambda row: row["level"], numeric=False),
    Column("host ms/step", lambda row: figure(row["launch_ms_per_step"], 3)),
    Column("device ms/step", lambda row: figure(row["device_ms_per_step"], 3)),
    Column("tokens/s", lambda row: figure(row["decode_tokens_per_s"])),
    Column("graphs", lambda row: _graphs(row, "num_graphs", 1, 0, "")),
    Column("capture ms", lambda row: _graphs(row, "warmup_ms", 1, 0, "")),
    Column("memory", lambda row: _graphs(row, "memory_bytes", 1 / 2**20, 0, " MiB")),
    Column("", lambda row: row["note"], numeric=False),
)
