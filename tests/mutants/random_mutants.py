"""Random mutants: one operator of a kernel, a drafter or the engine, changed at a place that a seed chooses.

A comparison takes or leaves its bound (`<` and `<=`) or is negated (`==` and `!=`), `+ 1` and `- 1` become `+ 0` and
`- 0`, or `min` and `max` change places. The share that survives is an upper bound: some changes are equivalent.
"""

import ast
import random
from collections.abc import Iterator
from pathlib import Path

from tests.mutants.mutant import ROOT, Mutant

_SPEED_ONLY = ("cases*.py", "configs.py", "warmup.py", "__init__.py", "clock.py", "*hopper*.py", "flash*.py")
"""Files of inputs, of launch settings, and of code that the interpreter never runs."""
_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
}  # fmt: skip
_EXTREMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
_WHOLE_RUNS = tuple(
    f"tests/algorithms/{name}.py"
    for name in (
        "engine/test_engine", "test_identity", "test_lookup", "test_constraints", "test_graphs", "test_prefill",
    )
)  # fmt: skip


def mutated_files() -> list[Path]:
    """The files that random mutants come from, relative to the repository."""
    found = [path for package in ("specdec_kernels", "algorithms") for path in (ROOT / package).rglob("*.py")]
    return sorted(path.relative_to(ROOT) for path in found if not any(path.match(pattern) for pattern in _SPEED_ONLY))


def random_mutants(number: int, seed: int) -> list[Mutant]:
    """`number` mutants; equal seeds and sources give equal mutants."""
    chosen = random.Random(seed)
    sites = [(path, *site) for path in mutated_files() for site in sites_of((ROOT / path).read_text(encoding="utf-8"))]
    return [_mutant(*site) for site in chosen.sample(sites, number)]


def _mutant(path: Path, start: int, end: int, new: str) -> Mutant:
    source = (ROOT / path).read_text(encoding="utf-8")
    line = source.count("\n", 0, start)
    before = source.splitlines()[line].strip()
    changed = source[:start] + new + source[end:]
    bug = f"line {line + 1}: {before}  ->  {changed.splitlines()[line].strip()}"
    return Mutant(path.as_posix(), source, changed, tests_of(path), bug)


def tests_of(path: Path) -> tuple[str, ...]:
    """pytest arguments that run the tests of a file: those of its family or room, then whole runs."""
    if path.parts[0] == "specdec_kernels":
        family = ".".join(path.parts[1:-1])
        own = sorted((ROOT / "tests/kernels").glob(f"test_{family.rpartition('.')[2]}*.py")) if family else []
        files = [file.relative_to(ROOT).as_posix() for file in own]
        cases = " or ".join([f"[{family or 'kv_index'}-", *(Path(file).stem for file in files)])
        return ("tests/kernels/test_parity.py", *files, "-k", cases)
    room = ROOT / "tests/algorithms" / "/".join(path.parts[1:2])
    own = [room.relative_to(ROOT).as_posix()] if room.is_dir() else []
    same = f"tests/algorithms/test_{path.stem}.py"
    return (*own, *([same] if (ROOT / same).is_file() else []), *_WHOLE_RUNS)


def sites_of(source: str) -> Iterator[tuple[int, int, str]]:
    """Start, end and replacement of every change inside the functions of `source`; messages and checks are left out."""
    starts = [0]
    for line in source.split("\n"):
        starts.append(starts[-1] + len(line) + 1)

    def at(line: int, column: int) -> int:
        # The columns of `ast` count bytes.
        text = source[starts[line - 1] : starts[line]]
        return starts[line - 1] + len(text.encode()[:column].decode())

    for node in _expressions(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
            old, new = _COMPARISONS[type(node.ops[0])]
            place = source.index(old, at(node.left.end_lineno or 0, node.left.end_col_offset or 0))
            yield place, place + len(old), new
        elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)) and _is_one(node.right):
            place = at(node.right.lineno, node.right.col_offset)
            yield place, place + 1, "0"
        elif isinstance(node, ast.Call) and len(node.args) == 2:
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name in _EXTREMES:
                end = at(node.func.end_lineno or 0, node.func.end_col_offset or 0)
                yield end - len(name), end, _EXTREMES[name]


def _is_one(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 1 and not isinstance(node.value, bool)


def _expressions(tree: ast.AST) -> Iterator[ast.AST]:
    todo: list[tuple[ast.AST, bool]] = [(tree, False)]
    while todo:
        node, inside = todo.pop()
        if isinstance(node, (ast.Assert, ast.Raise, ast.JoinedStr)):
            continue
        if isinstance(node, ast.FunctionDef):
            todo += [(child, True) for child in node.body]
            continue
        if inside:
            yield node
        todo += [(child, inside) for child in ast.iter_child_nodes(node)]
