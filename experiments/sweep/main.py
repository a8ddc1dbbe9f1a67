"""The command line of a program whose runs can be swept.

    python run.py sweep=trees algo=dflash                        one row
    python run.py -m sweep=trees algo=dflash,eagle3 algo.topk=1,4   all rows that are not done
    python run.py -m sweep=trees … sweep.list=true                what is done and what is not

Exit codes are those of a run. Of a sweep: 1 where a row failed or was killed, 3 where one is not lossless, 2 where all
rows were refused.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence

from experiments.app import cli
from experiments.app.errors import UserError
from experiments.app.explain import MAIN_CONFIG
from experiments.report.console import plain_console
from experiments.sweep import driver, show
from experiments.sweep.row import PROGRAM, Task, as_row, end_with_parent

MULTIRUN = ("-m", "--multirun")
HELP = ("-h", "--help", "--hydra-help", "--version")
SHORT = {"sweep": "sweep.name", "shard": "sweep.shard"}
"""Keys that are typed shorter than they are called."""
SEARCH = {
    "hydra.sweeper.direction": "maximize",
    "hydra.sweeper.n_jobs": "1",
    "hydra.sweeper.max_failure_rate": "1.0",
    "hydra.sweeper.sampler.seed": "0",
}
"""Settings of hydra/sweeper=optuna: a task's figure is maximised, and a refused combination ends no search."""
RESULTS = "optimization_results.yaml"


def main(task: Task, program: Sequence[str], config_name: str = MAIN_CONFIG) -> None:
    """Run the job or the sweep that the command line asks for; see `cli.main`.

    `program` is what Python runs to get here, `[path]` or `["-m", module]`: rows start it in processes of their own.
    """
    end_with_parent()
    sys.argv[1:] = [long_name(argument) for argument in sys.argv[1:]]
    overrides = [argument for argument in sys.argv[1:] if argument not in MULTIRUN]
    if len(overrides) == len(sys.argv) - 1 or any(argument in HELP for argument in overrides):
        cli.main(as_row(task, program), config_name)
        return
    with cli.exits_of_errors(config_name):
        if options := [argument for argument in overrides if argument.startswith("-")]:
            raise UserError(f"a sweep takes settings alone, got the option {options[0]}")
        run = _search if _searches(overrides) else _sweep
        code = run(overrides, program, config_name)
    sys.exit(code)


def long_name(argument: str) -> str:
    """An argument with its key as the schema calls it."""
    key, equals, value = argument.partition("=")
    return f"{SHORT[key]}={value}" if equals and key in SHORT else argument


def _sweep(overrides: Sequence[str], program: Sequence[str], config_name: str) -> int:
    """Run the rows of a grid that are not done, and show all of them. Returns the exit code."""
    console = plain_console()
    sweep = driver.resolve(overrides, config_name, program)
    if sweep.settings.list:
        show.listing(console, sweep)
        return 0
    todo = driver.begin(sweep, [*sys.argv])
    show.start(console, sweep, todo)
    try:
        if todo:
            driver.launch(sweep, todo)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt("the same command runs the rows that are missing") from error
    return show.ending(console, sweep)


def _searches(overrides: Sequence[str]) -> bool:
    """Whether a sweeper of Hydra chooses the jobs, one after the other."""
    return any(re.fullmatch(r"hydra/sweeper=(?!basic$).+", text) for text in overrides)


def _search(overrides: Sequence[str], program: Sequence[str], config_name: str) -> int:
    """Let the sweeper that was asked for choose the rows."""
    (sweeper,) = [text.partition("=")[2] for text in overrides if text.startswith("hydra/sweeper=")]
    driver.expect_plugin("hydra/sweeper", sweeper)
    typed = {text.partition("=")[0] for text in overrides}
    if "sweep.name" not in typed:
        raise UserError("a search is a sweep with a name: add sweep=NAME")
    preset = [f"{key}={value}" for key, value in SEARCH.items() if key not in typed]
    os.environ[PROGRAM] = json.dumps(list(program))
    driver.run_hydra(["-m", *preset, *overrides], config_name)
    folder = driver.folder_of(overrides, config_name)
    if (results := folder / RESULTS).exists():
        print(results.read_text(encoding="utf-8"), end="")
    print(f"python -m experiments.collect {folder}")
    return 0
