"""A queue of rows over the slots of one machine: one slot, or one for each visible GPU.

Every row has a process of its own. With `share`, a slot keeps one worker over rows of the same target, which is loaded
once (`experiments.sweep.worker`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from experiments.app.errors import UserError
from experiments.app.identity import target_id
from experiments.app.plan import SHARE_TARGET
from experiments.sweep.folder import DONE, RowRecord, SweepFolder
from experiments.sweep.row import arguments_of, environment, run_row, settle

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Task:
    """A row that waits: where it is, and whether it runs though it is done."""

    folder: SweepFolder
    row: str
    force: bool

    @property
    def target(self) -> str:
        """Equal for rows that may share a loaded target."""
        record = self.folder.record(self.row)
        return target_id(record.config) if record else ""


def slots(gpus_per_row: int) -> list[dict[str, str]]:
    """Environment variables of the processes of each slot: one slot, or one for every `gpus_per_row` visible GPUs.

    Raises UserError where fewer GPUs are visible.
    """
    if gpus_per_row == 0:
        return [{}]
    named = os.environ.get(VISIBLE)
    found = named.split(",") if named else [str(index) for index in range(_num_gpus())]
    groups = [found[i : i + gpus_per_row] for i in range(0, len(found) - gpus_per_row + 1, gpus_per_row)]
    if not groups:
        raise UserError(
            f"hydra/launcher=gpus: a row needs {gpus_per_row} GPUs, and {len(found)} are visible\n"
            "use hydra/launcher=basic or hydra/launcher=joblib"
        )
    return [{VISIBLE: ",".join(group)} for group in groups]


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


@dataclass
class Queue:
    """Runs tasks over `slots`, each a set of environment variables for the processes of the slot."""

    slots: Sequence[dict[str, str]]
    share: bool = False
    _waiting: list[Task] = field(default_factory=list)
    _results: dict[str, RowRecord | BaseException] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set)

    def run(self, tasks: Sequence[Task]) -> dict[str, RowRecord | BaseException]:
        """Row to its record when all have ended, or to what went wrong in starting it."""
        self._waiting = list(tasks)
        threads = [threading.Thread(target=self._serve, args=(slot,)) for slot in self.slots]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            self._stop.set()
            with self._lock:
                for process in self._running:
                    process.terminate()
            for thread in threads:
                thread.join()
            raise
        return self._results

    def _serve(self, slot: dict[str, str]) -> None:
        """Take tasks until there is none."""
        worker: Worker | None = None
        while (task := self._take(worker.target if worker else None)) is not None:
            try:
                if self.share:
                    worker = self._worker_for(task, worker, slot)
                    self._results[task.row] = worker.run(task)
                else:
                    self._results[task.row] = run_row(task.folder, task.row, task.force, slot, self._running)
            except Exception as error:  # the other rows still run
                self._results[task.row] = error
        if worker is not None:
            worker.close()

    def _take(self, target: str | None) -> Task | None:
        """The next task, one of `target` where there is one."""
        with self._lock:
            if self._stop.is_set() or not self._waiting:
                return None
            same = (i for i, task in enumerate(self._waiting) if target is not None and task.target == target)
            return self._waiting.pop(next(same, 0))

    def _worker_for(self, task: Task, worker: Worker | None, slot: dict[str, str]) -> Worker:
        if worker is not None and worker.alive and worker.target == task.target:
            return worker
        if worker is not None:
            worker.close()
        return Worker(task.target, slot, self._running)


class Worker:
    """A process that runs one row after the other."""

    def __init__(self, target: str, variables: dict[str, str], running: set[subprocess.Popen[bytes]]) -> None:
        self.target, self._all = target, running
        self._process = subprocess.Popen(
            [sys.executable, "-m", "experiments.sweep.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(**variables, **{SHARE_TARGET: "1"}),
        )
        running.add(self._process)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, task: Task) -> RowRecord:
        """Run a row and wait for it."""
        record = task.folder.record(task.row)
        assert record is not None and self._process.stdin is not None and self._process.stdout is not None
        if not task.force and task.folder.state(task.row) == DONE:
            return record
        log = task.folder.log(task.row)
        log.parent.mkdir(parents=True, exist_ok=True)
        arguments = arguments_of(record, task.folder, task.force)
        asked = {"program": record.program, "arguments": arguments, "log": str(log)}
        try:
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        code = int(answer) if answer else self._process.wait()
        return settle(task.folder, task.row, code)

    def close(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._all.discard(self._process)
