"""Puts known bugs into copies of the tree, one at a time, and shows which test fails for each; then random ones.

    python -m tests.mutants [--only '*/tree/*'] [--jobs 2]
    python -m tests.mutants --only '' --random 300 --seed 7

Exit code 1 where the tests of a known mutant pass, where its replacement no longer fits the code, or where one of the
tests fails without it. For random mutants the share that survives is reported; some of them are equivalent mutants. A
mutant that is caught by a test that fails without any mutant counts as surviving.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from functools import partial

from tests.mutants import runner
from tests.mutants.mutant import Mutant, known
from tests.mutants.random_mutants import random_mutants

RANDOM, SEED = 30, 1


def _timed(mutant: Mutant, limit_s: float) -> tuple[runner.Outcome, float]:
    start = time.monotonic()
    return runner.run_mutant(mutant, limit_s), time.monotonic() - start


def judge(mutants: Sequence[Mutant], jobs: int, limit_s: float) -> list[runner.Outcome]:
    """Run each of them, print a line for it and the counts, and return what became of them."""
    counts = Counter(dict.fromkeys((runner.CAUGHT, runner.CRASHED, runner.SURVIVED, runner.BROKEN), 0))
    outcomes = []
    with ThreadPoolExecutor(jobs) as pool:
        for mutant, (outcome, seconds) in zip(
            mutants, pool.map(partial(_timed, limit_s=limit_s), mutants), strict=True
        ):
            counts[outcome.status] += 1
            outcomes.append(outcome)
            print(f"{outcome.status:<9}{seconds:5.1f} s  {mutant.path}: {mutant.bug}", flush=True)
            print(f"{'':18}{outcome.detail}", flush=True)
    print(", ".join(f"{count} {status}" for status, count in counts.items()), flush=True)
    return outcomes


def failing_without(tests: Iterable[str], jobs: int) -> set[str]:
    """Those of the tests that fail without any mutant, which are printed."""
    each, failing = sorted(set(tests)), dict[str, str]()
    with ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(runner.baseline, filter(None, (each[turn::jobs] for turn in range(jobs)))):
            failing |= found
    if failing:
        lines = [f"{runner.short(test)}: {problem}" for test, problem in failing.items()]
        print("these tests fail without any mutant:", *lines, sep="\n  ")
    return set(failing)


def main(arguments: list[str] | None = None) -> int:
    """Print one line per mutant and the counts; 0 when all known ones are caught."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description="Check that the tests fail for known bugs."
    )
    parser.add_argument("--only", help="pattern of paths of known mutants; with it, no random ones by default")
    parser.add_argument("--random", type=int, help=f"number of random mutants (default: {RANDOM})")
    parser.add_argument("--seed", type=int, default=SEED, help="of the random mutants (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=runner.TIMEOUT_S, help="seconds for the tests of one mutant")
    options = parser.parse_args(arguments)
    pattern = "*" if options.only is None else options.only
    chosen = [mutant for mutant in known() if fnmatchcase(mutant.path, pattern)]
    number = options.random if options.random is not None else RANDOM if options.only is None else 0
    if not chosen and not number:
        print(f"no mutant is in {options.only!r}", file=sys.stderr)
        return 1
    runner.load_heavy_modules()
    if chosen and failing_without((test for mutant in chosen for test in mutant.tests), options.jobs):
        return 1
    judged = judge(chosen, options.jobs, options.limit) if chosen else []
    if number:
        print(f"{number} random mutants, --random {number} --seed {options.seed}", flush=True)
        outcomes = judge(random_mutants(number, options.seed), options.jobs, options.limit)
        in_vain = failing_without((outcome.test for outcome in outcomes if outcome.test), options.jobs)
        survived = sum(outcome.status == runner.SURVIVED or outcome.test in in_vain for outcome in outcomes)
        print(f"{survived / number:.1%} of the random mutants survive")
    return 0 if all(outcome.status == runner.CAUGHT for outcome in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
