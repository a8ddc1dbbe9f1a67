"""Finds launch settings of a kernel family on the card at hand, and writes a table that the kernels load.

    python -m experiments.kernel_tune family=attention out=tuning.json
    SPECDEC_TUNING=tuning.json python run.py …

Needs a GPU. The table holds what was found for each row of the static table that was searched, with the times of both,
card, versions and revision. `fields` is empty where the static settings stay.
As specdec_kernels/tuned/CARD.json it is used on every card of that name without SPECDEC_TUNING.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig
from rich.console import Console

from experiments.app import cli
from experiments.app.errors import UserError, user_errors
from experiments.bench.row import DTYPES, Bench
from experiments.bench.selection import chosen_cases
from experiments.bench.timing import Limits, provenance
from experiments.bench.tune import CANDIDATES, compile_ahead, free, groups, prepared, search
from experiments.report.console import plain_console
from experiments.report.run_folder import to_json, write_whole
from experiments.report.tables import Column, console_table, figure
from specdec_kernels.checks import expect_at_least, expect_choice
from specdec_kernels.tuning import VARIABLE


@dataclass
class KernelTuneConfig:
    """Schema of `configs/kernel_tune.yaml`. `budget_s` bounds the run: rows of the table that it leaves out keep the
    static settings. `shapes` as in kernel_bench. `processes` compile ahead."""

    family: str = "attention"
    shapes: str = "full"
    dtype: str = "bfloat16"
    repeats: int = 10
    budget_ms: float = 30.0
    budget_s: float | None = None
    seed: int = 0
    processes: int = 8
    out: str = "tuning.json"

    def __post_init__(self) -> None:
        expect_choice("family", self.family, tuple(CANDIDATES))
        expect_choice("dtype", self.dtype, tuple(DTYPES))
        expect_at_least("repeats", self.repeats, 1)
        expect_at_least("budget_ms", self.budget_ms, 1)
        expect_at_least("budget_s", self.budget_s, 1, nullable=True)
        expect_at_least("processes", self.processes, 1)


ConfigStore.instance().store(name="kernel_tune_schema", node=KernelTuneConfig)


def tune(config: KernelTuneConfig, device: torch.device, card: str, console: Console) -> Iterator[dict[str, Any]]:
    """A row for each row of the static table that the cases ask for, as soon as it is found; `fields` is empty where
    nothing is faster."""
    os.environ[VARIABLE] = ""  # the search starts from the static table
    bench = Bench(device, DTYPES[config.dtype], None, (), config.seed, Limits(2, config.repeats, config.budget_ms))
    cases = [case for _, case in chosen_cases((config.family,), config.shapes, device.type == "cuda")]
    began = time.monotonic()

    def time_left() -> bool:
        return config.budget_s is None or time.monotonic() - began < config.budget_s

    where, rows_of_the_table = provenance(device.type), groups(config.family, cases, bench)
    searched = [case for members in rows_of_the_table.values() for case in members]
    compile_ahead(config.family, searched, bench, config.processes)
    for key, members in rows_of_the_table.items():
        if not time_left():
            console.print(f"budget_s={config.budget_s:g} is used up: {key} keeps the static settings", style="yellow")
            continue
        found = search(config.family, [prepared(config.family, case, bench) for case in members], bench, time_left)
        yield {"family": config.family, "card": card, "key": list(key), "dtype": config.dtype, **found, **where}
        free()


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Each row of the static table with what was found for it."""
    columns = [
        Column("row of the table", lambda row: " ".join(map(str, row["key"])), numeric=False),
        Column("cases", lambda row: str(len(row.get("table_us", ())))),
        Column("tried", lambda row: str(row.get("tried", 0))),
        Column("gain", lambda row: figure(100 * row["gain"], 1, "%") if "gain" in row else row["problem"]),
        Column("fields", lambda row: " ".join(f"{k}={v}" for k, v in row["fields"].items()), numeric=False),
    ]
    console.print(console_table("tuned settings", columns, rows))


def keep(rows: list[dict[str, Any]], out: str) -> None:
    """Write the table `out` of the rows that were searched to the end."""
    write_whole(Path(out), to_json([row for row in rows if "gain" in row]) + "\n")


def job(config: KernelTuneConfig, composed: DictConfig) -> None:
    """The job."""
    if not torch.cuda.is_available():
        raise UserError("kernel_tune measures on a GPU, and torch sees none")
    console, card = plain_console(), torch.cuda.get_device_name()
    rows: list[dict[str, Any]] = []
    with user_errors(ValueError):
        for row in tune(config, torch.device("cuda"), card, console):
            rows.append(row)
            keep(rows, config.out)  # an interrupted search leaves what it has found
            console.print(
                f"{' '.join(map(str, row['key']))}: {row['fields'] or 'the static settings'}", highlight=False
            )
    show(rows, console)
    faster = sum(bool(row["fields"]) for row in rows)
    console.print(f"{faster} of {len(rows)} rows beat the static table: {VARIABLE}={config.out}", highlight=False)


def main() -> None:
    """Command line entry."""
    cli.main(job, "kernel_tune")


if __name__ == "__main__":
    main()
