import argparse
import os
import sys
from collections.abc import Iterable

from specdec_kernels import FAMILIES
from specdec_kernels.launch import CHIPS, interpreting
from tools.compile_gate.jobs import Job, jobs_of, kernels_of, sample
from tools.compile_gate.usage import compile_all
from tools.compile_gate.verdict import Row, table


def run(families: Iterable[str], chips: list[str], workers: int, sampled: bool = False) -> tuple[list[Row], list[str]]:
    """Lines of the table, and complaints: kernels that no gate case launches."""
    jobs: dict[Job, None] = {}
    complaints = []
    for family in families:
        found = jobs_of(family, chips)
        jobs |= dict.fromkeys(found)
        launched = {job.name for job in found}
        complaints += [f"{family}: no gate case launches {name}" for name in sorted(kernels_of(family) - launched)]
    wanted = sample(jobs) if sampled else list(jobs)
    # Long compilations first, so that no worker is left alone with one at the end.
    wanted.sort(key=lambda job: (job.family != "attention", job.chip))
    rows = [Row(job, result) for job, result in zip(wanted, compile_all(wanted, workers), strict=True)]
    return rows, complaints


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 0 when every kernel is there and within its limits, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.compile_gate",
        description="Compile every kernel for every chip and check the limits of the chips.",
    )
    parser.add_argument("--family", action="append", choices=FAMILIES, help="default: all")
    parser.add_argument("--chip", action="append", choices=CHIPS, help="default: all")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--sample", action="store_true", help="two variants per kernel, the chips in turn")
    chosen = parser.parse_args(arguments)
    if interpreting():
        print("compile_gate: TRITON_INTERPRET=1 replaces the compiler; unset it", file=sys.stderr)
        return 1
    rows, complaints = run(chosen.family or FAMILIES, chosen.chip or list(CHIPS), chosen.workers, chosen.sample)
    print(table(rows))
    failed = [row for row in rows if not row.passes]
    for complaint in complaints:
        print(complaint)
    print(f"{len(rows)} compiled, {len(failed)} over a limit, {len(complaints)} complaints")
    return 1 if failed or complaints else 0


if __name__ == "__main__":
    sys.exit(main())
