"""Launch settings that were found on one card, and that replace rows of the static tables on cards of that name.

A table of tuned settings is a JSON file, written by `experiments.kernel_tune`: a list of objects with `family`, `card`
(the name that torch gives the device), `key` (what the family's static table is read with) and `fields` (what replaces
the row's). `SPECDEC_TUNING` names the file; set to nothing, it switches tuned settings off. Otherwise the file of this
folder that is named after the card is read, where there is one. The interpreter and the compile gate use the static
tables alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

VARIABLE = "SPECDEC_TUNING"
SHIPPED = Path(__file__).with_name("tuned")
Key = tuple[Any, ...]
_seen: list[tuple[str, Key]] | None = None


def tuned_fields(family: str, key: Key) -> Mapping[str, Any]:
    """What replaces fields of the row `key` in the static table of `family` on the current card; empty for nothing.

    Raises ValueError where SPECDEC_TUNING names a file that is no table.
    """
    if _seen is not None:
        _seen.append((family, key))
    if not torch.cuda.is_available():
        return {}
    return _table(*_source()).get((family, key), {})


@contextmanager
def record_keys() -> Iterator[list[tuple[str, Key]]]:
    """Collect (family, key) of the rows that calls inside ask for."""
    global _seen
    found: list[tuple[str, Key]] = []
    before, _seen = _seen, found
    try:
        yield found
    finally:
        _seen = before


def card_file(card: str) -> Path:
    """The shipped table of a card."""
    return SHIPPED / f"{re.sub(r'[^a-z0-9]+', '_', card.lower()).strip('_')}.json"


def _source() -> tuple[str, str]:
    """(path of the table, name of the card); the path is empty for no table."""
    card = torch.cuda.get_device_name()
    named = os.environ.get(VARIABLE)
    if named is not None:
        return named, card
    shipped = card_file(card)
    return (str(shipped) if shipped.is_file() else ""), card


@lru_cache(maxsize=8)
def _table(path: str, card: str) -> dict[tuple[str, Key], dict[str, Any]]:
    if not path:
        return {}
    return read_table(Path(path), card)


def read_table(path: Path, card: str) -> dict[tuple[str, Key], dict[str, Any]]:
    """(family, key) to fields, for the rows of `card`. Raises ValueError where the file is no table."""
    try:
        rows: Sequence[Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        return {(str(row["family"]), tuple(row["key"])): dict(row["fields"]) for row in rows if row["card"] == card}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{VARIABLE}={path}: expected a list of rows with family, card, key and fields, as kernel_tune writes it: "
            f"{type(error).__name__}: {error}"
        ) from error
