"""Reads prompt files: JSON lines or one JSON list, plain or gzipped. Errors name the file and the line."""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class DataError(ValueError):
    """A prompt source that cannot be used; the message names the file, the line and the fix."""


@dataclass(frozen=True)
class Record:
    """One JSON object and its place, as `file:line`."""

    fields: dict[str, Any]
    where: str

    def text(self, key: str) -> str:
        """The non-empty string under `key`, or DataError."""
        value = self.fields.get(key)
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"{self.where}: key '{key}': expected a non-empty string, got {_shown(value)}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """The non-empty list of non-empty strings under `key`, or DataError."""
        value = self.fields.get(key)
        strings = isinstance(value, list) and all(isinstance(item, str) and item.strip() for item in value)
        if not strings or not value:
            raise DataError(f"{self.where}: key '{key}': expected a list of non-empty strings, got {_shown(value)}")
        return tuple(value)


def _shown(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_records(path: str | Path) -> list[Record]:
    """All records of a `.jsonl` or `.json` file, also with `.gz`; blank lines are skipped. Raises DataError
    for a file that is missing, unreadable or empty, and for a malformed line."""
    file = Path(path).expanduser()
    text = _read_text(file)
    if text.lstrip().startswith("["):
        items = [(f"{file}: item {i}", item) for i, item in enumerate(_parse(str(file), text), start=1)]
    else:
        # str.splitlines would also split at U+0085, U+2028 and U+2029, which JSON strings may hold.
        lines = [(f"{file}:{i}", line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
        items = [(where, _parse(where, line)) for where, line in lines]
    if not items:
        raise DataError(f"{file}: the file holds no prompts; put one JSON object on each line, or change data.path")
    return [_record(where, item) for where, item in items]


def _read_text(file: Path) -> str:
    if not file.is_file():
        what = "is a folder, expected a file" if file.is_dir() else "no such file"
        raise DataError(f"{file.absolute()}: {what}; set data.path to a .jsonl file")
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        return raw.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read as UTF-8 text: {error}; set data.path to a .jsonl file") from error


def _parse(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from error


def _record(where: str, item: object) -> Record:
    if not isinstance(item, dict):
        raise DataError(f'{where}: expected a JSON object like {{"prompt": "..."}}, got {_shown(item)}')
    return Record(item, where)
