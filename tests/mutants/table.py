"""All mutants: the `MUTANTS` of every module in this folder."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

_OTHERS = ("__main__", "mutant", "random_mutants", "runner", "table", "test_mutants")
MUTANTS = tuple(
    mutant
    for path in sorted(Path(__file__).parent.glob("*.py"))
    if path.stem not in _OTHERS
    for mutant in import_module(f"tests.mutants.{path.stem}").MUTANTS
)
