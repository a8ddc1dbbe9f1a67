"""A mutant: one plausible bug, as an exact replacement in one file, and the tests that must fail because of it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What the tests of kernels and algorithms need.
COPIED = ("specdec_kernels", "algorithms", "experiments", "tools", "configs", "tests", "pyproject.toml", "run.py")
LINKED = ("assets", "docs")


@dataclass(frozen=True)
class Mutant:
    """`old` must occur exactly once in `path` and becomes `new`; `tests` are pytest arguments.

    `bug` says what goes wrong; it begins with "historical:" where the bug shipped somewhere.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    bug: str

    def changed(self, root: Path = ROOT) -> str:
        """The text of the file with the bug in it. Raises ValueError where `old` does not occur exactly once."""
        source = (root / self.path).read_text(encoding="utf-8")
        found = source.count(self.old)
        if found != 1:
            raise ValueError(f"{self.name}: expected its text once in {self.path}, found it {found} times")
        return source.replace(self.old, self.new)

    def apply(self, root: Path) -> None:
        (root / self.path).write_text(self.changed(root), encoding="utf-8")


def bugs_in(path: str) -> Callable[[str, str, tuple[str, ...], str], Mutant]:
    """A maker of mutants of one file: name, source text with `{{old -> new}}` where it changes, tests, bug."""

    def mutant(name: str, text: str, tests: tuple[str, ...], bug: str) -> Mutant:
        old, new = (re.sub(r"\{\{(.*?) -> (.*?)\}\}", rf"\{side}", text, flags=re.S) for side in (1, 2))
        return Mutant(name, path, old, new, tests, bug)

    return mutant


def parity(family: str, *cases: str) -> tuple[str, ...]:
    """The parity tests of the named cases of a family."""
    test = "tests/kernels/test_parity.py::test_kernel_is_the_reference"
    return tuple(f"{test}[{family}-{case}-float32]" for case in cases)


def copy_tree(target: Path) -> None:
    """Copy what the tests need into `target`, so that the working tree stays as it is."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignored)
        else:
            shutil.copy2(source, target / name)
    for name in LINKED:
        (target / name).symlink_to(ROOT / name)
