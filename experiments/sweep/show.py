"""What a sweep prints: its rows and their states, and at the end what went wrong."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console

from experiments.app.cli import report
from experiments.app.errors import NotLossless
from experiments.app.provenance import git_revision
from experiments.report.tables import Column, Row, console_table, figure, words
from experiments.sweep.driver import Sweep
from experiments.sweep.folder import DONE, FAILED, KILLED, OPEN, REFUSED, RUNNING, RowRecord

TONES = {DONE: "good", FAILED: "bad", KILLED: "bad"}


def listing(console: Console, sweep: Sweep) -> None:
    """All rows of the sweep with their states, and how long the rest may take."""
    states = sweep.states()
    _table(console, sweep, states)
    _say(console, f"{_counts(states)} · {sweep.folder.path}")
    _tell_rest(console, sweep, states)


def start(console: Console, sweep: Sweep, todo: Sequence[RowRecord]) -> None:
    """What is done, what will be run, and where."""
    states = sweep.states()
    done = sum(state == DONE for state in states.values())
    counts = f"{done} of {len(sweep.rows)} done before, {len(todo)} to run"
    _say(console, f"sweep {sweep.folder.name}: {counts} · {sweep.folder.path}")
    revision = git_revision()
    summaries = (sweep.folder.summary(row) for row, state in states.items() if state == DONE)
    if old := sum(summary is not None and summary.get("revision") != revision for summary in summaries):
        _say(console, f"warning: {old} of them ran at another revision; sweep.force=true runs them again", "yellow")
    _tell_rest(console, sweep, states)


def ending(console: Console, sweep: Sweep) -> int:
    """The table of all rows, the rows that are not done with their overrides and reasons. Returns the exit code."""
    states = sweep.states()
    _table(console, sweep, states)
    for record in sweep.rows:
        known = sweep.folder.record(record.id) or record
        if states[record.id] in (FAILED, KILLED, REFUSED) or known.exit_code == NotLossless.exit_code:
            told = known.reason or f"see {sweep.folder.log(record.id)}"
            report(f"{states[record.id]}: {' '.join(record.overrides)}\n{told}")
    _say(console, f"{_counts(states)} · python -m experiments.collect {sweep.folder.path}")
    return exit_code(sweep, states)


def exit_code(sweep: Sweep, states: dict[str, str]) -> int:
    """0, or what is wrong with the worst row; refused rows count where there are no others."""
    known = [sweep.folder.record(row) for row in states]
    if any(state in (FAILED, KILLED) for state in states.values()):
        return 1
    if any(record is not None and record.exit_code == NotLossless.exit_code for record in known):
        return NotLossless.exit_code
    return 2 if set(states.values()) == {REFUSED} else 0


def _tell_rest(console: Console, sweep: Sweep, states: dict[str, str]) -> None:
    """How long the rest may take, where that is a second or more."""
    rest = estimated_rest_s(sweep, states)
    if rest is not None and rest >= 1:
        _say(console, f"the rest takes about {_duration(rest)}, one row after the other")


def estimated_rest_s(sweep: Sweep, states: dict[str, str]) -> float | None:
    """Seconds of the rows that are to run, from the mean of those that are done; None where nothing is known."""
    taken = [record.wall_s for record in sweep.folder.records() if record.wall_s is not None and record.ended == DONE]
    rest = sum(state in (OPEN, KILLED, FAILED) for state in states.values())
    return rest * sum(taken) / len(taken) if taken and rest else None


def _table(console: Console, sweep: Sweep, states: dict[str, str]) -> None:
    """Print the rows, the figure that the sweep maximises among their columns."""
    summaries = (sweep.folder.summary(row) for row, state in states.items() if state == DONE)
    objectives = {summary["objective"] for summary in summaries if summary and "objective" in summary}
    heading = words(objectives.pop()) if len(objectives) == 1 else "value"
    columns = [
        Column("row", lambda row: str(row["id"]), numeric=False),
        Column("overrides", lambda row: str(row["overrides"]), numeric=False),
        Column("state", lambda row: str(row["state"]), numeric=False, tone=lambda row: TONES.get(row["state"])),
        Column("seconds", lambda row: figure(row["wall_s"])),
    ]
    rows = _shown(sweep, states)
    if any(row["value"] is not None for row in rows):
        columns.append(Column(heading, lambda row: figure(row["value"], 2)))
    console.print(console_table(f"sweep {sweep.folder.name}", columns, rows))


def _shown(sweep: Sweep, states: dict[str, str]) -> list[Row]:
    """One row of a table for each row of the sweep."""
    found: list[Row] = []
    for record in sweep.rows:
        known = sweep.folder.record(record.id) or record
        kept = states[record.id] == DONE
        found.append(
            {
                "id": record.id,
                "overrides": sweep.folder.swept(record, sweep.keys),
                "state": states[record.id],
                "wall_s": known.wall_s if kept else None,
                "value": known.value if kept else None,
            }
        )
    return found


def _counts(states: dict[str, str]) -> str:
    order = (DONE, RUNNING, OPEN, KILLED, FAILED, REFUSED)
    counts = Counter(states.values())
    return ", ".join(f"{counts[state]} {state}" for state in order if counts[state])


def _duration(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(round(seconds))) if seconds >= 60 else f"{seconds:.0f} s"


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
