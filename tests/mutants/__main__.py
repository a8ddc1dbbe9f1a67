"""Puts known bugs into copies of the tree, one at a time, and shows which test fails for each.

    python -m tests.mutants [--only 'tree_*'] [--jobs 2]

Exit code 1 where the tests of a mutant pass, where its replacement no longer fits the code, or where one of the tests
fails without it.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase

from tests.mutants.mutant import Mutant
from tests.mutants.runner import BROKEN, CAUGHT, SURVIVED, Outcome, baseline, load_heavy_modules, run_mutant
from tests.mutants.table import MUTANTS


def _timed(mutant: Mutant) -> tuple[Outcome, float]:
    start = time.monotonic()
    return run_mutant(mutant), time.monotonic() - start


def main(arguments: list[str] | None = None) -> int:
    """Print one line per mutant and the counts; 0 when all are caught."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description="Check that the tests fail for known bugs."
    )
    parser.add_argument("--only", default="*", help="pattern of mutant names")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if fnmatchcase(mutant.name, options.only)]
    if not chosen:
        print(f"no mutant is called {options.only!r}", file=sys.stderr)
        return 1
    load_heavy_modules()
    if problems := baseline(sorted({test for mutant in chosen for test in mutant.tests})):
        print("these tests fail without any mutant:", *problems, sep="\n  ")
        return 1
    counts = dict.fromkeys((CAUGHT, SURVIVED, BROKEN), 0)
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, (outcome, seconds) in zip(chosen, pool.map(_timed, chosen), strict=True):
            counts[outcome.status] += 1
            print(f"{outcome.status:<9}{seconds:5.1f} s  {mutant.name:<36}{outcome.detail}", flush=True)
            if outcome.status != CAUGHT:
                print(f"{'':17}{mutant.path}: {mutant.bug}")
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return 0 if counts[CAUGHT] == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
