"""The folder of a sweep, and the state of each of its rows.

<row>/              the run folder of a row, as experiments.report.run_folder writes it
rows/<row>.json     what the row is (overrides, configuration), and how its last attempt ended
logs/<row>.log      what the last attempt printed
locks/<row>.lock    held by the process that runs the row; the system releases it whatever ends that process
baselines/          decodings of the target alone that rows share
sweep.json          the keys that were swept, and when the sweep was started with what

A row is done where its run folder has a summary. Nothing else is trusted: a process that was killed leaves no summary.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from experiments.report.run_folder import STATUS, SUMMARY, to_json, write_whole

DONE, RUNNING, REFUSED, FAILED, KILLED, OPEN = "done", "running", "refused", "failed", "killed", "open"
UNFINISHED = ("running", "interrupted")
"""What status.json says of a run whose process was killed or interrupted."""
LOOKS, LOOK_S = 5, 0.1  # another process that looks at the state of a row holds its lock for a moment
SWEEP, ROWS, LOGS, LOCKS = "sweep.json", "rows", "logs", "locks"


@dataclass
class RowRecord:
    """What rows/<row>.json holds. `program` with `overrides` makes the row again."""

    id: str
    overrides: list[str]
    program: list[str]
    config: dict[str, Any] = field(default_factory=dict)
    """The resolved configuration that matters."""
    ended: str | None = None
    """How the last attempt ended: done, refused, failed or killed; None where there was none."""
    reason: str = ""
    exit_code: int | None = None
    wall_s: float | None = None
    value: float | None = None
    """The figure that a sweep maximises."""


class SweepFolder:
    """The folder of one sweep. Several processes and machines may use it at one time."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.name = self.path.name

    def run_folder(self, row: str) -> Path:
        return self.path / row

    def log(self, row: str) -> Path:
        return self.path / LOGS / f"{row}.log"

    def record(self, row: str) -> RowRecord | None:
        """What is known of a row; None where it is not in the sweep."""
        found = _read(self.path / ROWS / f"{row}.json")
        return None if found is None else RowRecord(**found)

    def records(self) -> list[RowRecord]:
        """All rows of the sweep, in the order in which they entered it."""
        paths = sorted((self.path / ROWS).glob("*.json"))
        found = {path.stem: self.record(path.stem) for path in paths}
        order = {row: i for i, row in enumerate(self.settings()["rows"])}
        kept = [record for record in found.values() if record is not None]
        return sorted(kept, key=lambda record: (order.get(record.id, len(order)), record.id))

    def write(self, record: RowRecord) -> None:
        """Keep what is known of a row."""
        self._make(ROWS)
        write_whole(self.path / ROWS / f"{record.id}.json", to_json(asdict(record)) + "\n")

    def summary(self, row: str) -> dict[str, Any] | None:
        """The whole summary.json of a row; None where it is missing or broken."""
        found = _read(self.run_folder(row) / SUMMARY)
        return found if found is not None and "rows" in found else None

    def state(self, row: str) -> str:
        """done, running, refused, failed, killed or open (never begun)."""
        if self.summary(row) is not None:
            return DONE
        if self._is_locked(row):
            return RUNNING
        if (_read(self.run_folder(row) / STATUS) or {}).get("status") in UNFINISHED:
            return KILLED
        record = self.record(row)
        return OPEN if record is None or record.ended is None else KILLED if record.ended == DONE else record.ended

    def settings(self) -> dict[str, Any]:
        """What sweep.json holds: `keys` that were swept, ids of `rows` in their order, and `starts`."""
        return _read(self.path / SWEEP) or {"keys": [], "rows": [], "starts": []}

    def swept(self, record: RowRecord, keys: Sequence[str] = ()) -> str:
        """What tells a row from others of the sweep: its overrides of `keys` and of all that were swept before."""
        every = {*keys, *self.settings()["keys"]}
        return " ".join(text for text in record.overrides if text.partition("=")[0].lstrip("+~") in every)

    def begin(self, keys: Sequence[str], rows: Sequence[str], command: Sequence[str]) -> None:
        """Note a start of the sweep with `keys` and `rows` that it may have had before."""
        self._make(LOCKS)
        with _locked(self.path / LOCKS / "sweep.lock", wait=True):
            known = self.settings()
            known["keys"] = list(dict.fromkeys([*known["keys"], *keys]))
            known["rows"] = list(dict.fromkeys([*known["rows"], *rows]))
            known["starts"].append({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "command": list(command)})
            write_whole(self.path / SWEEP, to_json(known) + "\n")

    @contextmanager
    def claim(self, row: str) -> Iterator[bool]:
        """Own a row during the block. False where another process owns it."""
        self._make(LOCKS)
        path = self.path / LOCKS / f"{row}.lock"
        for _ in range(LOOKS):
            with _locked(path, wait=False) as owned:
                if owned:
                    yield True
                    return
            time.sleep(LOOK_S)
        yield False

    def clear(self, row: str) -> None:
        """Remove what an earlier attempt left of a row that this process owns."""
        shutil.rmtree(self.run_folder(row), ignore_errors=True)

    def _is_locked(self, row: str) -> bool:
        path = self.path / LOCKS / f"{row}.lock"
        if not path.exists():
            return False
        with _locked(path, wait=False) as free:
            return not free

    def _make(self, name: str) -> None:
        (self.path / name).mkdir(parents=True, exist_ok=True)


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where the file is missing, empty or broken."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, Mapping) else None  # type: ignore[return-value]


@contextmanager
def _locked(path: Path, wait: bool) -> Iterator[bool]:
    """Hold the lock `path`, waiting for it with `wait`. False where another process holds it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            owned = True
        except BlockingIOError:
            owned = False
        yield owned
    finally:
        os.close(handle)  # which releases the lock
