"""Python source that every Python installation already has: the standard library.

Files are found at run time, not copied into the repository. The pure-Python modules of `HELDOUT_MODULES` are
kept out of training, and the code prompts are beginnings of functions from exactly these modules.
"""

import ast
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
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
    """The first lines of a function, and the module that holds it."""

    module: str
    prompt: str


def stdlib_folder() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def heldout_files() -> list[Path]:
    """Source files of the held-out modules that this interpreter ships."""
    return [path for module in HELDOUT_MODULES if (path := stdlib_folder() / f"{module}.py").is_file()]


def training_files() -> list[Path]:
    """Standard-library source files used for training, sorted; never a held-out module."""
    root, heldout = stdlib_folder(), set(heldout_files())

    def generated(path: Path) -> bool:
        parts = path.relative_to(root).parts
        return any(part in EXCLUDED_FOLDERS or part.startswith("config-") for part in parts)

    return [path for path in sorted(root.rglob("*.py")) if path not in heldout and not generated(path)]


def read_source(path: Path) -> str | None:
    """Text of a source file, or None where it is empty or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8") or None
    except UnicodeDecodeError:
        return None


def source_windows(count: int, length: int) -> list[str]:
    """`count` texts of `length` characters, one after another in the modules that are used for training. Where these
    end, they begin anew."""
    source = "\n".join(filter(None, map(read_source, training_files())))
    whole = source * -(-count * length // len(source))
    return [whole[at : at + length] for at in range(0, count * length, length)]


def beginnings_of(path: Path) -> Iterator[FunctionBeginning]:
    """Beginnings of the functions of one file that are long enough to be continued, in source order."""
    source = read_source(path)
    if source is None:
        return
    lines = source.splitlines()
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    for node in sorted(nodes, key=lambda node: node.lineno):
        total = (node.end_lineno or node.lineno) - node.lineno + 1
        header = node.body[0].lineno - node.lineno
        keep = min(MAX_PROMPT_LINES, max(MIN_PROMPT_LINES, header + total // 3))
        prompt = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.lineno - 1 + keep])) + "\n"
        if total - keep >= MIN_REMAINING_LINES and header < keep and len(prompt) <= MAX_PROMPT_CHARS:
            yield FunctionBeginning(path.stem, prompt)


@cache
def _heldout_beginnings() -> tuple[FunctionBeginning, ...]:
    rounds = zip_longest(*(beginnings_of(path) for path in heldout_files()))
    return tuple(found for of_round in rounds for found in of_round if found is not None)


def function_beginnings(count: int = DEFAULT_COUNT) -> list[FunctionBeginning]:
    """`count` prompts, from each held-out module one after another. Raises ValueError where the modules have fewer."""
    available = _heldout_beginnings()
    if count > len(available):
        raise ValueError(f"data=code has {len(available)} function beginnings in {stdlib_folder()}, got count={count}")
    return list(available[:count])
