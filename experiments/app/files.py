"""Files that appear whole or not at all, locks, which the system releases when their process ends, and files of JSON
lines that grow while a program runs, and that a later program can go on with."""

import fcntl
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` in one move where the block succeeds, and is removed where it fails."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write `path` so that a reader, or a crash, sees the old content or all of the new."""
    with whole_file(path) as temporary, open(temporary, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def take(path: Path, wait: bool = False) -> int | None:
    """The descriptor of a lock on an existing folder, or on a file that is made; None where another process holds it.
    Closing the descriptor releases the lock. A file system without locks grants every one."""
    handle = os.open(path, os.O_RDONLY) if path.is_dir() else os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:
        pass
    return handle


@contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[bool]:
    """Hold the lock `path` during the block. False where another process holds it, which `wait` waits for."""
    handle = take(path, wait)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            os.close(handle)


def to_json(value: Any, indent: int | None = 2) -> str:
    """Strict JSON: NaN and infinity raise ValueError; a figure without meaning is None, hence null."""
    return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)


def json_lines(values: Iterable[Any]) -> str:
    """One JSON object per line."""
    return "".join(to_json(value, indent=None) + "\n" for value in values)


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where the file is missing, empty or broken."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


class JsonLog:
    """Objects in the order in which they were added; each is on disk when `append` returns."""

    def __init__(self, path: Path) -> None:
        """Take in what `path` holds. A last line without its end, of a program that was killed, is cut off."""
        self.path = path
        self.entries: list[dict[str, Any]] = []
        if not path.exists():
            return
        whole = 0
        with suppress(ValueError):
            for line in path.read_bytes().splitlines(keepends=True):
                entry = json.loads(line)
                if line.endswith(b"\n"):
                    self.entries.append(entry)
                    whole += len(line)
        os.truncate(path, whole)

    def append(self, entry: Mapping[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json_lines([entry]))
        self.entries.append(dict(entry))

    def replace(self, entries: Sequence[dict[str, Any]]) -> None:
        """Hold `entries` from now on, in the file too, which changes in one move."""
        write_whole(self.path, json_lines(entries))
        self.entries = list(entries)
