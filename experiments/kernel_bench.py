"""Unit benchmark of the kernels: parity first, then time.

    python -m experiments.kernel_bench family=attention limit=3

Goes through the cases marked `bench` of each family's case table. A kernel that disagrees with its reference
gets no time. Rows go to outputs/kernel_bench/<time>/results.jsonl with all that a number depends on. Without
a GPU one small case a family runs in Triton's interpreter, which shows that the path works and measures
nothing about a GPU.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import hydra
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from experiments.config import expect_at_least, expect_choice
from experiments.measure import cold_copies, provenance, tensors_in, time_function
from specdec_kernels import FAMILIES
from specdec_kernels.cases import Case, Maker

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_ROUNDINGS = 4
NO_GPU = "no GPU: Triton's interpreter on a CPU, these times say nothing about the speed on a GPU"


@dataclass
class KernelBenchConfig:
    """Schema of `configs/kernel_bench.yaml`. `limit`: cases a family; `dtype` auto: bfloat16 on a GPU, else
    float32."""

    family: str = "all"
    limit: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    warmup: int = 3
    repeats: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        expect_choice("family", self.family, ("all", *FAMILIES))
        expect_choice("device", self.device, ("auto", "cpu", "cuda"))
        expect_choice("dtype", self.dtype, ("auto", *_DTYPES))
        expect_at_least("limit", self.limit, 1)
        expect_at_least("warmup", self.warmup, 0)
        expect_at_least("repeats", self.repeats, 1)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device=cuda: torch sees no CUDA device; use device=cpu")


ConfigStore.instance().store(name="kernel_bench_schema", node=KernelBenchConfig)


def choose_device(name: str) -> torch.device:
    """The device; on a CPU also switches Triton to its interpreter, which works only before Triton is
    imported."""
    device = torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")
    if device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    return device


def chosen_cases(config: KernelBenchConfig, device: torch.device) -> Iterator[tuple[str, Case]]:
    """(family, case) to time: the benchmark's cases on a GPU, the first that is small enough elsewhere."""
    for family in FAMILIES if config.family == "all" else (config.family,):
        cases: tuple[Case, ...] = import_module(f"specdec_kernels.{family}.cases").CASES
        if device.type == "cuda":
            timed = [case for case in cases if case.bench]
        else:
            small = [case for case in cases if "large" not in case.tags]
            timed = sorted((case for case in small if case.bench or case.gate), key=lambda c: not c.bench)[:1]
        yield from ((family, case) for case in timed[: config.limit])


def disagreement(function: Callable[..., Any], inputs: dict[str, Any]) -> str | None:
    """What differs between the kernel and its reference on `inputs`, results and changed arguments alike."""
    sides = []
    for impl in ("triton", "reference"):
        own = deepcopy(inputs)
        sides.append(list(tensors_in((function(**own, impl=impl), own))))
    for index, (kernel, reference) in enumerate(zip(*sides, strict=True)):
        if kernel.shape != reference.shape or kernel.dtype != reference.dtype:
            return f"tensor {index}: {kernel.dtype} {list(kernel.shape)}, not {reference.dtype} {list(reference.shape)}"
        if not _close(kernel, reference):
            return f"tensor {index} of shape {list(kernel.shape)} differs from the reference"
    return None


def _close(kernel: torch.Tensor, reference: torch.Tensor) -> bool:
    """Integers equal; floats within a few roundings of the largest value, NaN and infinities in the same
    places."""
    if not kernel.is_floating_point():
        return torch.equal(kernel, reference)
    finite = reference.isfinite()
    if not torch.equal(kernel.isfinite(), finite) or not finite.any():
        return torch.equal(kernel.isfinite(), finite)
    gap = (kernel[finite].double() - reference[finite].double()).abs().max()
    bound = _ROUNDINGS * torch.finfo(kernel.dtype).eps * reference[finite].double().abs().max()
    return bool(gap <= bound)


def measure(family: str, case: Case, config: KernelBenchConfig, device: torch.device) -> dict[str, Any]:
    """One row: parity, and with it the time and, where the family says what the work is, the rates."""
    function = getattr(import_module(f"specdec_kernels.{family}"), case.function)
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if device.type == "cuda" else "float32"
    inputs = case.build(Maker.seeded(device, _DTYPES[dtype], config.seed))
    problem = disagreement(function, inputs)
    row: dict[str, Any] = dict(family=family, case=case.name, function=case.function, dtype=dtype, parity="ok")
    if problem is not None:
        return row | dict(parity=problem)
    copies = cold_copies(inputs, device)

    def call(**arguments: Any) -> Any:
        return function(**arguments, impl="triton")

    timing = time_function(call, copies, device, warmup=config.warmup, repeats=config.repeats)
    row |= asdict(timing) | dict(input_copies=len(copies))
    work = getattr(import_module(f"specdec_kernels.{family}.cases"), "WORK", {}).get(case.function)
    if work is not None and device.type == "cuda":
        moved_bytes, flop = work(inputs)
        row |= dict(moved_bytes=moved_bytes, flop=flop)
        row |= dict(bytes_per_s=moved_bytes / timing.median_ms * 1e3, flop_per_s=flop / timing.median_ms * 1e3)
    return row


def run(config: KernelBenchConfig, folder: Path, console: Console) -> bool:
    """Measure, print and write; returns whether every kernel agreed with its reference."""
    device = choose_device(config.device)
    context = provenance(device.type) | dict(device=device.type, config=asdict(config))
    rows = []
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "results.jsonl").open("w", encoding="utf-8") as file:
        for family, case in chosen_cases(config, device):
            row = measure(family, case, config, device)
            rows.append(row)
            file.write(json.dumps(row | context) + "\n")
            file.flush()
    console.print(_table(rows, context["machine"], device))
    if device.type == "cpu":
        console.print(NO_GPU, style="yellow")
    console.print(f"wrote {folder / 'results.jsonl'}")
    return all(row["parity"] == "ok" for row in rows)


def _table(rows: list[dict[str, Any]], machine: str, device: torch.device) -> Table:
    table = Table(title=f"kernels on {machine}" + (" (interpreter)" if device.type == "cpu" else ""))
    for column in ("family", "case", "parity"):
        table.add_column(column)
    for column in ("median us", "20 %", "80 %", "GB/s", "TFLOP/s"):
        table.add_column(column, justify="right")
    for row in rows:
        times = [_scaled(row, key, 1e3, ".1f") for key in ("median_ms", "low_ms", "high_ms")]
        rates = [_scaled(row, "bytes_per_s", 1e-9, ".0f"), _scaled(row, "flop_per_s", 1e-12, ".1f")]
        table.add_row(row["family"], row["case"], row["parity"], *times, *rates)
    return table


def _scaled(row: dict[str, Any], key: str, scale: float, style: str) -> str:
    return format(row[key] * scale, style) if key in row else "-"


@hydra.main(version_base="1.3", config_path="../configs", config_name="kernel_bench")
def main(composed: DictConfig) -> None:
    """Command line entry: exit code 1 when a kernel disagrees with its reference."""
    try:
        config = cast(KernelBenchConfig, OmegaConf.to_object(composed))
        agreed = run(config, Path(HydraConfig.get().runtime.output_dir), Console())
    except ValueError as error:
        sys.exit(f"kernel_bench: {error}")
    if not agreed:
        sys.exit("kernel_bench: a kernel disagrees with its reference; it was not timed")


if __name__ == "__main__":
    main()
