"""Unit benchmark of the kernels: parity first, then time.

    python -m experiments.kernel_bench family=attention shapes=quick peers=sdpa
    python -m experiments.kernel_bench -m sweep=tiles family=attention dtype=float16,bfloat16 +tuning.block_n=32,64

Measures the cases marked `bench` of each family. `family` and `peers` are `all`, `none` or names joined by `+`;
`shapes` is `full`, `quick` or a pattern of case names. A kernel that disagrees with its reference is not timed. The run
folder outputs/kernel_bench/<time>/ holds results.jsonl, one result per case with all that a number depends on. Without
a GPU one small case per family runs in Triton's interpreter, which shows that the path works and measures nothing about
a GPU.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

from algorithms.checked import Between, Checked
from experiments.app.errors import user_errors
from experiments.app.files import JsonLog, to_json, write_whole
from experiments.app.hardware import INTERPRET, INTERPRETER, chosen_device
from experiments.app.provenance import measured_on
from experiments.app.schema import SweepConfig
from experiments.bench.measure_case import DTYPES, FAILED, NOT_RUN, OK, Bench, case_columns, measure
from experiments.bench.peers import PEERS
from experiments.bench.roofline import measure_ceilings
from experiments.bench.selection import chosen_cases, named
from experiments.bench.timing import Limits
from experiments.report.checks import NOT_A_GPU
from experiments.report.console import plain_console
from experiments.report.run_folder import SUMMARY
from experiments.report.tables import Result, console_table
from experiments.sweep.main import main as sweep_main
from specdec_kernels import FAMILIES
from specdec_kernels.cases import Case


@dataclass
class KernelBenchConfig(Checked):
    """Schema of `configs/kernel_bench.yaml`. `dtype` auto: bfloat16 on a GPU, else float32. `budget_ms` bounds
    one measurement, `budget_s` the run: cases that it leaves out are named as not run. `tuning` replaces fields of
    the launch table, for functions that take them."""

    family: str = "all"
    shapes: str = "full"
    peers: str = "all"
    device: Annotated[str, ("auto", "cpu", "cuda")] = "auto"
    dtype: Annotated[str, ("auto", *DTYPES)] = "auto"
    warmup: Annotated[int, Between(0)] = 3
    repeats: Annotated[int, Between(1)] = 20
    budget_ms: Annotated[float, Between(1)] = 100.0
    budget_s: Annotated[float | None, Between(1)] = None
    seed: int = 0
    tuning: dict[str, int] = field(default_factory=dict)
    sweep: SweepConfig = field(default_factory=SweepConfig)

    def __post_init__(self) -> None:
        named("family", self.family, FAMILIES)
        named("peers", self.peers, tuple(PEERS))
        super().__post_init__()
        self.device = chosen_device(self.device, "device")


ConfigStore.instance().store(name="kernel_bench_schema", node=KernelBenchConfig)


def run(config: KernelBenchConfig, folder: Path, console: Console) -> bool:
    """Measure, print and write; returns whether every kernel ran and agreed with its reference."""
    device = torch.device(config.device)
    if device.type == "cpu":
        os.environ.setdefault(INTERPRET, "1")  # works only before Triton is imported
    cases = chosen_cases(named("family", config.family, FAMILIES), config.shapes, device.type == "cuda")
    ceilings = measure_ceilings(device)
    found = asdict(ceilings) if ceilings is not None else None
    context = {**measured_on(device.type), "device": device.type, "config": asdict(config), "ceilings": found}
    bench = Bench(
        device=device,
        dtype=DTYPES[config.dtype if config.dtype != "auto" else "bfloat16" if device.type == "cuda" else "float32"],
        ceilings=ceilings,
        peers=named("peers", config.peers, tuple(PEERS)) if device.type == "cuda" else (),
        seed=config.seed,
        limits=Limits(config.warmup, config.repeats, config.budget_ms),
        tuning=dict(config.tuning),
    )
    folder.mkdir(parents=True, exist_ok=True)
    results, log = [], JsonLog(folder / "results.jsonl")
    log.replace([])
    for result in _results(cases, bench, config.budget_s, console):
        results.append(result)
        log.append(result | context)
    _present(results, bench, context["machine"], folder, console)
    agreed = all(result["status"] in (OK, NOT_RUN) for result in results)
    if agreed:
        impl = "triton" if device.type == "cuda" else INTERPRETER
        own = {"name": "kernel_bench", "task": "kernel_bench", "impl": impl}
        write_whole(folder / SUMMARY, to_json({**own, **context, "rows": results}) + "\n")
    return agreed


def _results(
    cases: list[tuple[str, Case]], bench: Bench, budget_s: float | None, console: Console
) -> Iterator[dict[str, Any]]:
    """Results of all cases, each announced before it runs: in the interpreter one can take minutes. Once the time is
    used up or the device is lost the rest is named as not run."""
    start, reason = time.monotonic(), None
    for number, (family, case) in enumerate(cases, 1):
        began = time.monotonic()
        if budget_s is not None and began - start > budget_s:
            reason = reason or f"budget_s={budget_s:g} is used up"
        if reason is not None:
            yield dict(family=family, case=case.name, function=case.function, status=NOT_RUN, problem=reason)
            continue
        console.print(f"{number}/{len(cases)}  {family}: {case.name}", highlight=False)
        result = measure(family, case, bench)
        yield result | dict(case_wall_s=round(time.monotonic() - began, 2))
        if result["status"] == FAILED and not _alive(bench.device):
            reason = f"the device was lost in {case.name}"
        elif bench.device.type == "cuda":
            torch.cuda.empty_cache()


def _alive(device: torch.device) -> bool:
    """Whether the device still computes: after an illegal access every later call fails too."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize()
        return bool(torch.ones(1, device=device).item() == 1.0)
    except RuntimeError:
        return False


def _present(results: list[dict[str, Any]], bench: Bench, machine: str, folder: Path, console: Console) -> None:
    on_gpu = bench.device.type == "cuda"
    title = f"kernels on {machine}" + ("" if on_gpu else " (interpreter)")
    notes = [] if on_gpu else [NOT_A_GPU[INTERPRETER]]
    if bench.ceilings is not None:
        notes.append(
            f"measured ceilings: copy {bench.ceilings.bytes_per_s / 1e12:.2f} TB/s, matrix product "
            f"{bench.ceilings.flop_per_s / 1e12:.0f} TFLOP/s; 'us' is graph replay, 'us/call' includes the launch, "
            "'x' is the other side's time over ours by the same clock"
        )
    notes += problems(results)
    console.print(console_table(title, case_columns(bench.peers), results), crop=False)
    for note in notes:
        console.print(note, style="yellow")
    console.print(f"wrote {folder / 'results.jsonl'}")


def problems(results: Sequence[Result]) -> list[str]:
    """Reasons why a case failed, or why a peer has no number: each once."""
    own: dict[str, list[str]] = {}
    absent: Counter[tuple[str, str, str]] = Counter()
    for result in results:
        if result["status"] != OK:
            own.setdefault(f"{result['status']}: {result['problem']}", []).append(result["case"])
        others = result.get("peers", {}).items()
        absent.update((name, peer["status"], peer["problem"]) for name, peer in others if peer["status"] != OK)
    return [f"{', '.join(cases)}: {reason}" for reason, cases in own.items()] + [
        f"{name}: {status} in {count} cases, {problem}" for (name, status, problem), count in absent.items()
    ]


def job(config: KernelBenchConfig, composed: DictConfig) -> None:
    """The job: exit code 1 when a kernel fails or disagrees with its reference."""
    console = plain_console()
    with user_errors(ValueError):
        agreed = run(config, Path(HydraConfig.get().runtime.output_dir), console)
    if not agreed:
        sys.exit("kernel_bench: a kernel failed or disagrees with its reference; it was not timed")


def main() -> None:
    sweep_main(job, ["-m", "experiments.kernel_bench"], "kernel_bench")


if __name__ == "__main__":
    main()
