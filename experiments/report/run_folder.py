"""The folder of a run. Every file but requests.jsonl appears whole or not at all, summary.json only when a run is done.

docs/reading_a_report.md lists the files. `kv_scales.safetensors` has the scales of a float8 cache (task=kv_scales).
"""

import os
import shlex
import shutil
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from uuid import uuid4

from experiments.app.errors import UserError, disk_is_full, user_errors
from experiments.app.files import JsonLog, take, to_json, write_whole
from experiments.app.resume import CONFIG, STATUS, read_status

REPORT, SUMMARY, REQUESTS, DECODINGS = "report.html", "summary.json", "requests.jsonl", "decodings.jsonl"
KV_SCALES = "kv_scales.safetensors"
HEARTBEAT_S = 10.0


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class RunFolder:
    """A folder that one run owns: the given path, or that path with a number where another run owns it."""

    def __init__(self, path: Path, about: Mapping[str, Any] | None = None, resumed: bool = False) -> None:
        """`about` is added to status.json. `resumed` goes on in `path` itself, with what an earlier run has left."""
        self.path, self.resumed = path if resumed else _claim(path), resumed
        self.process = uuid4().hex
        """Names this process among those of a run that is resumed."""
        self._lock = take(self.path)
        if self._lock is None:
            raise UserError(f"{self.path} is in use by another run")
        self._older = {entry for entry in self.path.iterdir() if entry.name != STATUS}
        self.requests, self.decodings = JsonLog(self.path / REQUESTS), JsonLog(self.path / DECODINGS)
        earlier = read_status(path) if resumed else {}
        started = {"started": earlier.get("started", _now())} | ({"resumed": _now()} if resumed else {})
        who = {"pid": os.getpid(), "host": socket.gethostname()}
        self._status: dict[str, Any] = {"status": "running", **who, **started, **(about or {})}
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True)

    def start(self) -> None:
        """Write status.json, and go on to write it as long as the run lasts."""
        self._heart.start()
        self.write(STATUS, self._status_text())

    def record(self, request: Mapping[str, Any]) -> None:
        """Append a request that has ended to requests.jsonl, so that nothing which ends the run can lose it."""
        self.requests.append(request)

    def write(self, name: str, content: str | bytes) -> None:
        """Write one file, whole."""
        write_whole(self.path / name, content)

    def write_results(self, files: Mapping[str, str], summary: Mapping[str, Any]) -> None:
        """All files of a finished run. The summary comes last, so it is never alone."""
        for name, text in files.items():
            self.write(name, text)
        self.write(SUMMARY, to_json(summary) + "\n")

    def finish(self, status: str, error: str | None = None) -> None:
        """Record how the run ended."""
        self._stop()
        self._status |= {"status": status, "ended": _now()} | ({"error": error} if error else {})
        self._write_status()

    def discard(self) -> None:
        """Remove all that the run has left, a tracker's files too, and the folder unless it held something before."""
        self._stop()
        for path in set(self.path.iterdir()) - self._older:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        with suppress(OSError):
            self.path.rmdir()

    def _stop(self) -> None:
        """End the heartbeat and release the folder."""
        self._ended.set()
        if self._heart.is_alive():
            self._heart.join()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            self._status["heartbeat"] = _now()
            self._write_status()

    def _status_text(self) -> str:
        return to_json({**self._status, "requests": len(self.requests.entries)})

    def _write_status(self) -> None:
        """Write status.json. On a full disk the new text goes into the place that the old one has."""
        text = self._status_text()
        try:
            self.write(STATUS, text)
        except OSError:
            with suppress(OSError), open(self.path / STATUS, "r+", encoding="utf-8") as file:
                file.write(text)
                file.truncate()


def _claim(path: Path) -> Path:
    """Own a folder: the status file is created exclusively, which settles a race between two runs."""
    for attempt in range(1, 1000):
        candidate = path if attempt == 1 else path.with_name(f"{path.name}-{attempt}")
        candidate.mkdir(parents=True, exist_ok=True)
        try:
            os.close(os.open(candidate / STATUS, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            continue
        return candidate
    raise FileExistsError(f"{path}: 999 runs started with this name in this second; give another name")


@contextmanager
def open_run_folder(
    path: Path, about: Mapping[str, Any] | None = None, resumed: bool = False, can_resume: bool = True
) -> Iterator[RunFolder]:
    """Own `path` during the block. status.json then says how the block ended, and what `about` holds.

    A `resumed` folder is one that an earlier run has left, and with `can_resume` a later run may do the same with this
    one. A `UserError` removes a folder in which no request has ended. A full disk becomes a `UserError`. That and an
    interrupt say what is kept.
    """
    with user_errors(OSError):
        folder = RunFolder(path, about, resumed)
    try:
        with user_errors(OSError):
            folder.start()
        yield folder
    except KeyboardInterrupt as error:
        folder.finish("interrupted")
        raise KeyboardInterrupt(_kept(folder, can_resume)) from error
    except UserError as error:
        if folder.requests.entries or folder.resumed:
            folder.finish("failed", str(error))
        else:
            folder.discard()
        raise
    except BaseException as error:
        folder.finish("failed", f"{type(error).__name__}: {error}")
        if isinstance(error, OSError) and disk_is_full(error):
            raise UserError(f"the disk is full, make room: {error}\n{_kept(folder, can_resume)}") from error
        raise
    folder.finish("done")


def _kept(folder: RunFolder, can_resume: bool) -> str:
    """The files of a run that ended early, and how to resume it."""
    if not (folder.path / CONFIG).is_file():
        return "nothing was decoded: start the run again"
    kept = f"requests that had ended: {len(folder.requests.entries)}, in {folder.path / REQUESTS}"
    resumed = shlex.join(["python", "run.py", f"resume={folder.path}"])
    return f"{kept}\ngo on with {resumed}" if can_resume else kept
