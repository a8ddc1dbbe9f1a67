"""The folder of a sweep, and the state of each of its jobs.

<job>/              the run folder of a job, as experiments.report.run_folder writes it
jobs/<job>.json     what the job is (overrides, configuration), and how its last attempt ended
logs/<job>.log      what the last attempt printed
locks/<job>.lock    held by the process that runs the job
baselines/          decodings of the target alone that jobs share
sweep.json          the keys that were swept, and when the sweep was started with what

A job is done where its run folder has a summary. A process that was killed leaves none.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from experiments.app.files import locked, read_object, to_json, write_whole
from experiments.report.run_folder import SUMMARY
from experiments.report.tables import Column

DONE, RUNNING, REFUSED, FAILED, KILLED, OPEN = "done", "running", "refused", "failed", "killed", "open"
_TONES = {DONE: "good", FAILED: "bad", KILLED: "bad"}
STATE = Column("state", lambda job: job["state"], numeric=False, tone=lambda job: _TONES.get(job["state"]))
LOOKS, LOOK_S = 5, 0.1  # another process that looks at the state of a job holds its lock for a moment
SWEEP, JOBS, LOGS, LOCKS = "sweep.json", "jobs", "logs", "locks"


@dataclass
class JobRecord:
    """The content of jobs/<job>.json. `program` with `overrides` makes the job again."""

    id: str
    overrides: list[str]
    program: list[str]
    config: dict[str, Any] = field(default_factory=dict)  # the resolved configuration that matters
    ended: str | None = None
    """How the last attempt ended: done, refused, failed or killed; running until then. None where there was none."""
    reason: str = ""
    exit_code: int | None = None
    wall_s: float | None = None
    value: float | None = None  # the figure of the task, for the table of the sweep


class SweepFolder:
    """The folder of one sweep. Several processes and machines may use it at one time."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.name = self.path.name

    def log(self, job: str) -> Path:
        return self.path / LOGS / f"{job}.log"

    def record(self, job: str) -> JobRecord | None:
        """The record of a job; None where it is not in the sweep."""
        found = read_object(self.path / JOBS / f"{job}.json")
        return None if found is None else JobRecord(**found)

    def records(self) -> list[JobRecord]:
        """All jobs of the sweep, in the order in which they entered it."""
        found = [self.record(path.stem) for path in sorted((self.path / JOBS).glob("*.json"))]
        order = {job: i for i, job in enumerate(self.settings()["jobs"])}
        return sorted(filter(None, found), key=lambda record: (order.get(record.id, len(order)), record.id))

    def write(self, record: JobRecord) -> None:
        """Keep what is known of a job."""
        self._make(JOBS)
        write_whole(self.path / JOBS / f"{record.id}.json", to_json(asdict(record)) + "\n")

    def summary(self, job: str) -> dict[str, Any] | None:
        """The whole summary.json of a job; None where it is missing or broken."""
        found = read_object(self.path / job / SUMMARY)
        return found if found is not None and "rows" in found else None

    def state(self, job: str) -> str:
        """done, running, refused, failed, killed or open (never begun)."""
        if self.summary(job) is not None:
            return DONE
        lock = self.path / LOCKS / f"{job}.lock"
        if lock.exists():
            with locked(lock) as free:
                if not free:
                    return RUNNING
        record = self.record(job)
        if record is None or record.ended is None:
            return OPEN
        # A process that is killed cannot note its end, and a done job may have lost its summary.
        return KILLED if record.ended in (RUNNING, DONE) else record.ended

    def settings(self) -> dict[str, Any]:
        """The content of sweep.json: `keys` that were swept, ids of `jobs` in their order, and `starts`."""
        return read_object(self.path / SWEEP) or {"keys": [], "jobs": [], "starts": []}

    def swept(self, record: JobRecord, keys: Sequence[str] = ()) -> str:
        """The overrides that distinguish a job in the sweep, of `keys` and of all keys that were swept before."""
        every = {*keys, *self.settings()["keys"]}
        return " ".join(text for text in record.overrides if text.partition("=")[0].lstrip("+~") in every)

    def begin(self, keys: Sequence[str], jobs: Sequence[str], command: Sequence[str]) -> None:
        """Note a start of the sweep with `keys` and `jobs` that it may have had before."""
        self._make(LOCKS)
        with locked(self.path / LOCKS / "sweep.lock", wait=True):
            known = self.settings()
            known["keys"] = list(dict.fromkeys([*known["keys"], *keys]))
            known["jobs"] = list(dict.fromkeys([*known["jobs"], *jobs]))
            known["starts"].append({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "command": list(command)})
            write_whole(self.path / SWEEP, to_json(known) + "\n")

    @contextmanager
    def claim(self, job: str) -> Iterator[bool]:
        """Own a job during the block. False where another process owns it."""
        self._make(LOCKS)
        for _ in range(LOOKS):
            with locked(self.path / LOCKS / f"{job}.lock") as owned:
                if owned:
                    yield True
                    return
            time.sleep(LOOK_S)
        yield False

    def _make(self, name: str) -> None:
        (self.path / name).mkdir(parents=True, exist_ok=True)
