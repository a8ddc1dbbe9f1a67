"""Compiled libraries of other projects, out of an installed wheel or a folder."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

FOLDER_VARIABLE = "SPECDEC_PEERS"
"""Environment variable: a folder with libraries of wheels that are not installed."""


class Unavailable(Exception):
    """Why a peer cannot be compared on a case."""


def load_library(package: str, pattern: str) -> None:
    """Load the library of `package` whose file name matches `pattern`, without importing the package.

    Raises:
        Unavailable: it is not there, or cannot be loaded.
    """
    if not torch.cuda.is_available():
        raise Unavailable("runs on a GPU only")
    _load(package, pattern)


@cache
def _load(package: str, pattern: str) -> None:
    found = [path for folder in _folders(package) for path in sorted(folder.rglob(pattern))]
    if not found:
        raise Unavailable(f"{package} is not installed, and {FOLDER_VARIABLE} names no folder with {pattern}")
    try:
        torch.ops.load_library(str(found[0]))
    except OSError as problem:
        reason = str(problem.__cause__ or problem).splitlines()[0]
        raise Unavailable(f"{found[0].name} cannot be loaded: {reason}") from problem


def _folders(package: str) -> list[Path]:
    named = os.environ.get(FOLDER_VARIABLE)
    spec = find_spec(package)
    installed = spec.submodule_search_locations if spec is not None else None
    return [Path(folder) for folder in (*([named] if named else []), *(installed or []))]
