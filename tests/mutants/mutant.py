"""A mutant: one plausible bug, as an exact replacement in one file, and the tests that must fail because of it."""

import re
import shutil
from collections.abc import Iterator
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
            raise ValueError(f"expected its text once in {self.path}, found it {found} times")
        return source.replace(self.old, self.new)

    def apply(self, root: Path) -> None:
        (root / self.path).write_text(self.changed(root), encoding="utf-8")


def known(root: Path = ROOT) -> list[Mutant]:
    """The mutants of the text files beside this one. There, below the path of a source file, each mutant is

        - what goes wrong
          its tests | source text with {{old -> new}} where it changes

    or has its text on lines that begin with `|`. `FAMILY-CASE` is a parity test; other tests are `FOLDER/FILE NAME`.
    """
    tables = [path.read_text(encoding="utf-8") for path in sorted((root / "tests/mutants").glob("*.txt"))]
    return [mutant for table in tables for mutant in _mutants_in(table)]


def _mutants_in(table: str) -> Iterator[Mutant]:
    for path, rows in re.findall(r"^(\S+\.py)\n((?:[- ] .*\n)+)", table, re.M):
        for bug, tests, text in re.findall(r"^- (.*)\n  (.*?)(?: |\n  )\| ((?:.*\n)(?:  \| .*\n)*)", rows, re.M):
            text = text.replace("\n  | ", "").rstrip("\n").replace("\\n", "\n")
            old, new = (re.sub(r"\{\{(.*?) -> (.*?)\}\}", rf"\{side}", text, flags=re.S) for side in (1, 2))
            yield Mutant(path, old, new, tuple(map(_pytest_name, tests.split(", "))), bug)


def _pytest_name(test: str) -> str:
    if " test_" not in test:
        return f"tests/kernels/test_parity.py::test_kernel_is_the_reference[{test}-float32]"
    file, name = test.split(" ", 1)
    folder, _, stem = file.rpartition("/")
    return f"tests/{folder}/test_{stem}.py::{name}"


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
