"""Python source that every Python installation already has: the standard library.

Nothing is copied into the repository: files are found at run time. The pure-Python modules of `HELDOUT_MODULES` are
kept out of training, and the code prompts are beginnings of functions from exactly these modules.
"""

from __future__ import annotations

import ast
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# fmt: off
HELDOUT_MODULES = (
    "argparse", "bisect", "calendar", "colorsys", "configparser", "csv", "difflib", "filecmp", "fnmatch", "fractions",
    "graphlib", "heapq", "shlex", "statistics", "textwrap",
)
# fmt: on
DEFAULT_COUNT = 64
MAX_PROMPT_LINES = 8
MIN_PROMPT_LINES = 3
MIN_REMAINING_LINES = 4
MAX_PROMPT_CHARS = 600
# Tests repeat themselves, `encodings` and `pydoc_data` are tables, and the others are not the standard library.
EXCLUDED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "lib2to3", "lib-dynload", "pydoc_data"}
    | {"site-packages", "test", "tests"}
)


@dataclass(frozen=True)
class FunctionBeginning:
    """The first lines of a function and where they come from."""

    module: str
    name: str
    prompt: str


def stdlib_folder() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def heldout_files() -> list[Path]:
    """Source files of the held-out modules that this interpreter ships."""
    return [path for module in HELDOUT_MODULES if (path := stdlib_folder() / f"{module}.py").is_file()]


def training_files() -> list[Path]:
    """Standard-library source files used for training, sorted; never a held-out module."""
    root = stdlib_folder()
    files = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        generated = EXCLUDED_FOLDERS.intersection(parts) or any(part.startswith("config-") for part in parts)
        heldout = len(parts) == 1 and path.stem in HELDOUT_MODULES
        if not generated and not heldout:
            files.append(path)
    return files


def read_source(path: Path) -> str | None:
    """Text of a source file, or None where it is empty or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8") or None
    except UnicodeDecodeError:
        return None


def _beginning(module: str, lines: list[str], node: ast.FunctionDef) -> FunctionBeginning | None:
    total = (node.end_lineno or node.lineno) - node.lineno + 1
    header = node.body[0].lineno - node.lineno
    keep = min(MAX_PROMPT_LINES, max(MIN_PROMPT_LINES, header + total // 3))
    chosen = lines[node.lineno - 1 : node.lineno - 1 + keep]
    prompt = textwrap.dedent("\n".join(chosen)) + "\n"
    if total - keep < MIN_REMAINING_LINES or header >= keep or len(prompt) > MAX_PROMPT_CHARS:
        return None
    return FunctionBeginning(module, node.name, prompt)


def beginnings_of(path: Path) -> Iterator[FunctionBeginning]:
    """Beginnings of the functions of one file that are long enough to be continued, in source order."""
    source = read_source(path)
    if source is None:
        return
    lines = source.splitlines()
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    for node in sorted(nodes, key=lambda node: node.lineno):
        if beginning := _beginning(path.stem, lines, node):
            yield beginning


@cache
def _heldout_beginnings() -> tuple[FunctionBeginning, ...]:
    modules = [list(beginnings_of(path)) for path in heldout_files()]
    longest = max((len(found) for found in modules), default=0)
    return tuple(found[i] for i in range(longest) for found in modules if i < len(found))


def function_beginnings(count: int = DEFAULT_COUNT) -> list[FunctionBeginning]:
    """`count` prompts, one from each held-out module in turn. Raises ValueError where the modules have fewer."""
    available = _heldout_beginnings()
    if count > len(available):
        raise ValueError(f"data=code has {len(available)} function beginnings in {stdlib_folder()}, got count={count}")
    return list(available[:count])
