"""The command line of a program whose runs can be swept, and what a sweep prints.

    python run.py sweep=trees algo=dflash                        one job
    python run.py -m sweep=trees algo=dflash,eagle3 algo.topk=1,4   all jobs that are not done
    python run.py -m sweep=trees … sweep.list=true                what is done and what is not

Exit codes of a run are in `cli`. A sweep exits with 1 where a job failed or was killed, 3 where one is not lossless,
2 where all jobs were refused.
"""

import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial

from rich.console import Console

from experiments.app import cli
from experiments.app.cli import HELP
from experiments.app.compose import MAIN_CONFIG
from experiments.app.errors import NotLossless, UserError
from experiments.app.manual import manual
from experiments.app.provenance import git_revision
from experiments.report.console import plain_console
from experiments.report.tables import Column, console_table, figure, words
from experiments.sweep import driver
from experiments.sweep.driver import Sweep
from experiments.sweep.folder import DONE, FAILED, KILLED, OPEN, REFUSED, RUNNING, STATE, JobRecord
from experiments.sweep.job import Task, as_job

MULTIRUN = ("-m", "--multirun")
SHORT = {"sweep": "sweep.name", "shard": "sweep.shard"}  # keys that are typed shorter than they are called


def main(task: Task, program: Sequence[str], config_name: str = MAIN_CONFIG) -> None:
    """Run the job or the sweep of the command line; see `cli.main`. `program` is what Python runs to get here, `[path]`
    or `["-m", module]`: jobs start it in processes of their own."""
    sys.argv[1:] = [long_name(argument) for argument in sys.argv[1:]]
    overrides = [argument for argument in sys.argv[1:] if argument not in (*MULTIRUN, *HELP)]
    asked = set(HELP) & set(sys.argv)
    if asked and config_name == MAIN_CONFIG:
        with cli.exits_of_errors(config_name):
            print(manual(overrides))
        return
    if asked or not set(MULTIRUN) & set(sys.argv):
        cli.main(as_job(task, program), config_name)
        return
    with cli.exits_of_errors(config_name):
        if options := [argument for argument in overrides if argument.startswith("-")]:
            raise UserError(f"a sweep takes settings alone, got the option {options[0]}")
        code = _sweep(overrides, program, config_name)
    sys.exit(code)


def long_name(argument: str) -> str:
    """An argument with its key as the schema calls it."""
    key, equals, value = argument.partition("=")
    return f"{SHORT[key]}={value}" if equals and key in SHORT else argument


def _sweep(overrides: Sequence[str], program: Sequence[str], config_name: str) -> int:
    """Run the jobs of a grid that are not done, and show all of them. Returns the exit code."""
    console, sweep = plain_console(), driver.resolve(overrides, config_name, program)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    if sweep.settings.list:
        states = _table(console, sweep)
        say(f"{_counts(states)} · {sweep.folder.path}")
        return 0
    todo = driver.begin(sweep, [*sys.argv])
    states = sweep.states()
    summaries = [sweep.folder.summary(job) or {} for job, state in states.items() if state == DONE]
    counts = f"{len(summaries)} of {len(sweep.jobs)} done before, {len(todo)} to run"
    say(f"sweep {sweep.folder.name}: {counts} · {sweep.folder.path}")
    revision = git_revision()
    if old := sum(summary.get("revision") != revision for summary in summaries):
        say(f"warning: {old} of them ran at another revision; sweep.force=true runs them again", style="yellow")
    try:
        if todo:
            driver.launch(sweep, todo)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt("the same command runs the jobs that are missing") from error
    states = _table(console, sweep)
    lossy = [record for record in _records(sweep) if record.exit_code == NotLossless.exit_code]
    for record in _records(sweep):
        if states[record.id] in (FAILED, KILLED, REFUSED) or record in lossy:
            reason = record.reason or f"see {sweep.folder.log(record.id)}"
            cli.report(f"{states[record.id]}: {' '.join(record.overrides)}\n{reason}")
    say(f"{_counts(states)} · python -m experiments.collect {shlex.quote(str(sweep.folder.path))}")
    if {FAILED, KILLED} & set(states.values()):
        return 1
    return NotLossless.exit_code if lossy else 2 if set(states.values()) == {REFUSED} else 0


def _records(sweep: Sweep) -> list[JobRecord]:
    return [sweep.folder.record(record.id) or record for record in sweep.jobs]


def _table(console: Console, sweep: Sweep) -> dict[str, str]:
    """Print the jobs, with the figure of each, and return their states."""
    states = sweep.states()
    names = {(sweep.folder.summary(job) or {}).get("objective") for job, state in states.items() if state == DONE}
    heading = words(str(names.pop())) if len(names) == 1 and None not in names else "value"
    columns = [
        Column("job", lambda job: job["id"], numeric=False),
        Column("overrides", lambda job: job["overrides"], numeric=False),
        STATE,
        Column("seconds", lambda job: figure(job["wall_s"])),
    ]
    lines = [
        {"id": record.id, "state": states[record.id]}
        | {"overrides": sweep.folder.swept(record, sweep.keys) or " ".join(record.overrides)}
        | {name: getattr(record, name) if states[record.id] == DONE else None for name in ("wall_s", "value")}
        for record in _records(sweep)
    ]
    if any(line["value"] is not None for line in lines):
        columns.append(Column(heading, lambda job: figure(job["value"], 2)))
    console.print(console_table(f"sweep {sweep.folder.name}", columns, lines), crop=False)
    return states


def _counts(states: dict[str, str]) -> str:
    counts, order = Counter(states.values()), (DONE, RUNNING, OPEN, KILLED, FAILED, REFUSED)
    return ", ".join(f"{counts[state]} {state}" for state in order if counts[state])
