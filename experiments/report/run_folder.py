"""The folder of a run. Every file appears whole or not at all, and summary.json only for a run that is done.

status.json      running, then done, failed or interrupted
config.yaml      the resolved configuration
requests.jsonl   one object a request: prompt, text, token ids, accepted counts, times
report.html      the same to look at, in one file
summary.json     the figures, see experiments/report/metrics.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from experiments.app.errors import UserError, user_errors

STATUS, CONFIG, REQUESTS, REPORT, SUMMARY = (
    "status.json",
    "config.yaml",
    "requests.jsonl",
    "report.html",
    "summary.json",
)


def write_whole(path: Path, text: str) -> None:
    """Write `path` so that a reader, or a crash, sees the old content or all of the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def to_json(value: Any, indent: int | None = 2) -> str:
    """Strict JSON: NaN and infinity are refused, a figure that means nothing is null."""
    return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class RunFolder:
    """A claimed folder; `path` is the one asked for, or that with a number where a run has it already."""

    def __init__(self, path: Path) -> None:
        self.path = _claim(path)
        self._status: dict[str, Any] = {"status": "running", "pid": os.getpid(), "started": _now()}
        self._write_status()

    def write(self, name: str, text: str) -> None:
        """One file, whole."""
        write_whole(self.path / name, text)

    def finish(self, status: str, error: str | None = None) -> None:
        """Say how it ended."""
        self._status |= {"status": status, "ended": _now()} | ({"error": error} if error else {})
        self._write_status()

    def discard(self) -> None:
        """Take the folder back: a run that its input forbids leaves nothing."""
        for name in (STATUS, CONFIG):
            (self.path / name).unlink(missing_ok=True)
        self.path.rmdir()

    def _write_status(self) -> None:
        self.write(STATUS, to_json(self._status))


def _claim(path: Path) -> Path:
    """Make the folder ours: exclusive creation of the status file settles a race between two runs."""
    for attempt in range(1, 1000):
        candidate = path if attempt == 1 else path.with_name(f"{path.name}-{attempt}")
        candidate.mkdir(parents=True, exist_ok=True)
        try:
            os.close(os.open(candidate / STATUS, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            continue
        return candidate
    raise FileExistsError(f"{path}: a thousand runs have this name and second")


@contextmanager
def open_run_folder(path: Path) -> Iterator[RunFolder]:
    """Claim `path` for the block; status.json says how it ended, except that a `UserError` leaves nothing."""
    with user_errors(OSError):
        folder = RunFolder(path)
    try:
        yield folder
    except KeyboardInterrupt:
        folder.finish("interrupted")
        raise
    except UserError:
        folder.discard()
        raise
    except BaseException as error:
        folder.finish("failed", f"{type(error).__name__}: {error}")
        raise
    folder.finish("done")


def write_results(
    folder: RunFolder, requests: Sequence[Mapping[str, Any]], report: str, summary: Mapping[str, Any]
) -> None:
    """Everything a finished run leaves; the summary comes last, so it never stands alone."""
    folder.write(REQUESTS, "".join(to_json(request, indent=None) + "\n" for request in requests))
    folder.write(REPORT, report)
    folder.write(SUMMARY, to_json(summary) + "\n")
