"""A file of JSON lines that grows while a program runs, and that a later program can go on with."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from experiments.app.atomic_write import write_whole


def to_json(value: Any, indent: int | None = 2) -> str:
    """Strict JSON: NaN and infinity raise ValueError; a figure without meaning is None, hence null."""
    return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)


def json_lines(values: Iterable[Any]) -> str:
    """One JSON object per line."""
    return "".join(to_json(value, indent=None) + "\n" for value in values)


def read_json_lines(path: Path) -> list[Any]:
    """The values of a file of JSON lines. Lines end at line feeds alone: JSON strings may hold U+2028 and the like.
    Raises OSError and ValueError."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip()]


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
