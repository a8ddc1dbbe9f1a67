"""A row, from both sides: the process that runs it, and the process that starts that one and waits.

A row runs in a process of its own, so a job that is killed or leaves a broken device behind costs no other row. The
process is a plain run: `program` with `overrides`, which anyone can type again.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from experiments.app.errors import NotLossless, UserError
from experiments.app.identity import row_id, what_matters
from experiments.app.resume import check_unchanged, read_status
from experiments.app.schema import REPO_ROOT
from experiments.sweep.folder import DONE, FAILED, KILLED, REFUSED, RUNNING, UNFINISHED, RowRecord, SweepFolder

PARENT = "SPECDEC_PARENT"
"""Process id of the parent that a row must not outlive."""
PROGRAM = "SPECDEC_PROGRAM"
"""The program of a search, for the processes of its launcher."""
PR_SET_PDEATHSIG = 1
TAIL_LINES = 3
Task = Callable[[Any, DictConfig], Any]


def as_row(task: Task, program: Sequence[str]) -> Task:
    """`task`, run as a row where `sweep.name` names a sweep: a done row is not run again, a broken one is."""

    def run(config: Any, composed: DictConfig) -> Any:
        if config.sweep.name is None:
            return task(config, composed)
        output = Path(HydraConfig.get().runtime.output_dir)
        folder, row = SweepFolder(output.parent), output.name
        with folder.claim(row) as owned:
            if not owned:
                raise UserError(f"row {row} of sweep {folder.name} is run by another process")
            if not config.sweep.force and folder.summary(row) is not None:
                print(f"done before: {output}")
                return getattr(folder.record(row), "value", None)
            record = folder.record(row) or new_record(composed, list(HydraConfig.get().overrides.task), program)
            return _run_owned(task, config, composed, folder, record)

    return run


def _run_owned(task: Task, config: Any, composed: DictConfig, folder: SweepFolder, record: RowRecord) -> Any:
    """Run `task` in the folder of the row, and keep how it ended."""
    config = _gone_on_with(config, composed, folder, record.id)
    record.ended, record.reason, record.exit_code, record.value = None, "", None, None
    folder.write(record)
    begun = time.monotonic()

    def ended(how: str, code: int, reason: str = "") -> None:
        record.ended, record.exit_code, record.reason = how, code, reason
        record.wall_s = round(time.monotonic() - begun, 3)
        folder.write(record)

    try:
        record.value = task(config, composed)
    except NotLossless as error:
        ended(DONE, error.exit_code, str(error))
        raise
    except UserError as error:
        ended(REFUSED, error.exit_code, str(error))
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        ended(FAILED, 1, f"{type(error).__name__}: {error}")
        raise
    ended(DONE, 0)
    return record.value


def _gone_on_with(config: Any, composed: DictConfig, folder: SweepFolder, row: str) -> Any:
    """`config`, set to resume the row that was killed before it ended. What cannot be resumed is cleared."""
    left = folder.run_folder(row)
    if hasattr(config, "resume") and not config.sweep.force:
        try:
            if read_status(left).get("status") in UNFINISHED:
                check_unchanged(left, composed, forced=False)
                return replace(config, resume=str(left))
        except (UserError, ValueError, OSError):
            pass  # another revision, a task that keeps no part, or a file that is not whole: the row begins anew
    folder.clear(row)
    return config


def new_record(cfg: DictConfig, overrides: list[str], program: Sequence[str]) -> RowRecord:
    """The record of a row that has not begun."""
    kept = [text for text in overrides if not text.startswith(("sweep.", "sweep=", "hydra."))]
    return RowRecord(row_id(cfg), kept, list(program), what_matters(cfg))


def quoted(text: str) -> str:
    """`text` as one value of Hydra's command line."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def arguments_of(record: RowRecord, folder: SweepFolder, force: bool) -> list[str]:
    """The arguments that make the row in its folder."""
    own = [f"sweep.name={quoted(folder.name)}", f"hydra.run.dir={quoted(str(folder.run_folder(record.id)))}"]
    return [*record.overrides, *own, *(["sweep.force=true"] if force else [])]


def environment(**more: str) -> dict[str, str]:
    """The environment of a process that runs rows: it finds this repository and ends with its parent."""
    path = os.pathsep.join(filter(None, [str(REPO_ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, PARENT: str(os.getpid()), **more}


def end_with_parent() -> None:
    """Let the system kill this process when its parent ends, so that no row goes on unseen. Linux only."""
    parent = os.environ.pop(PARENT, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit(f"the process {parent} that started this one has ended")


def run_one(cfg: DictConfig) -> float | None:
    """What a launcher calls, in any process and on any machine: run one row and return the figure to maximise."""
    return objective(run_row(*located(cfg)))


def objective(record: RowRecord) -> float | None:
    """What a search maximises: the figure of the row, 0 where its texts are not what they must be, None without one."""
    return 0.0 if record.exit_code == NotLossless.exit_code else record.value


def located(cfg: DictConfig) -> tuple[SweepFolder, str, bool]:
    """(sweep, row, force) of a job that Hydra has composed, either the name of a row or a whole configuration."""
    if "row" in cfg:
        return SweepFolder(Path(cfg.folder)), str(cfg.row), bool(cfg.force)
    composed = HydraConfig.get()
    folder = SweepFolder(Path(composed.sweep.dir))
    record = new_record(cfg, list(composed.overrides.task), json.loads(os.environ[PROGRAM]))
    if folder.record(record.id) is None:
        folder.begin([], [record.id], sys.argv)
        folder.write(record)
    return folder, record.id, bool(cfg.sweep.force)


def run_row(
    folder: SweepFolder,
    row: str,
    force: bool = False,
    variables: Mapping[str, str] | None = None,
    running: set[subprocess.Popen[bytes]] | None = None,
) -> RowRecord:
    """Run a row in a process of its own, wait for it, and return what is known of it then. A done row is not run.

    `variables` are added to the environment. The process is among `running` while it runs, so that others can end it.
    """
    record = _known(folder, row)
    if not force and folder.state(row) == DONE:
        return record
    log = folder.log(row)
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *record.program, *arguments_of(record, folder, force)]
    with log.open("wb") as output:
        environ = environment(**(variables or {}))
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ)
        running = set() if running is None else running
        running.add(process)
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            running.discard(process)
    return settle(folder, row, code)


def _known(folder: SweepFolder, row: str) -> RowRecord:
    record = folder.record(row)
    if record is None:
        raise KeyError(f"sweep {folder.name} has no row {row}")
    return record


def settle(folder: SweepFolder, row: str, code: int) -> RowRecord:
    """The record of a row whose process ended with `code`. A process that could not tell is told of here."""
    record, state = _known(folder, row), folder.state(row)
    if record.ended is None and state not in (DONE, RUNNING):  # with exit code 0 too: it may not have been a run at all
        record.ended = REFUSED if code == UserError.exit_code else KILLED if code in (-9, -15, 130) else FAILED
        record.exit_code, record.reason = code, _last_words(folder.log(row), code)
        folder.write(record)
    print(f"{folder.state(row):8} {folder.swept(record) or row}", flush=True)
    return record


def _last_words(log: Path, code: int) -> str:
    """Why a process ended that did not say so itself."""
    ending = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return "\n".join([ending, *lines[-TAIL_LINES:]])
