"""Mutants that nobody chose: one operator of the kernels or of the runtime changed at random.

A comparison takes or leaves its bound (`<` and `<=`) or turns round (`==` and `!=`), `+ 1` and `- 1` become `+ 0`
and `- 0`, `min` and `max` change places, or two neighbouring names of a call do. The four kinds are equally likely.
Sites that no test can see are left alone: types, messages, sizes of tiles, what runs on a GPU or with another package
only, and comparisons whose bound decides nothing.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.meaningless import MEANINGLESS
from tests.mutants.mutant import ROOT, Mutant

_ALGORITHMS = "tests/algorithms/"
_ENGINE = tuple(
    f"{_ALGORITHMS}test_{name}.py"
    for name in ("request", "scheduler", "engine", "levels", "top_logprobs", "fuzz", "kv_dtype", "forbidden_tokens",
                 "lookup", "sampling_parameters", "faults", "graphs", "prefill", "drafters")
)  # fmt: skip
_MODELS = tuple(
    f"tests/runtime/test_{name}.py"
    for name in ("loading", "eagle", "models_parity", "architectures", "dense_mixer", "fusion", "tokenizer",
                 "deterministic")
)  # fmt: skip
_FAMILY_TESTS = {
    "": ("test_checks", "test_launch", "test_facade", "test_tuning", "test_interpreter"),
    "attention": (
        "test_attention", "test_attention_plan", "test_attention_features", "test_small_tiles", "test_batch_invariance"
    ),
    "compat.sglang": ("test_compat_sglang",),
    "compat.sglang.index": ("test_sglang_index",),
    "norm": ("test_norm", "test_projection"),
    "projection": ("test_projection", "test_batch_invariance"),
    "sampling": ("test_sampling", "test_sampling_filters", "test_exact_distribution"),
    "tree": ("test_tree", "test_tree_selection"),
    "verify": ("test_verify", "test_rejection_distribution", "test_target_only_distribution", "test_tree_distribution"),
}  # fmt: skip
"""Test files of a family where they are not `test_FAMILY`."""
_USERS = {
    "all_reduce": ("projection",),
    "sampling.device": ("tree", "verify"),
    "kv_index.reference": ("compat.sglang.index",),
}
"""Families whose cases run what no case of a file's own family does."""
_FILE_TESTS = {
    "algorithms/registry.py": ("tests/algorithms/test_plugin.py",),
    "algorithms/runtime/backends/packages.py": ("tests/runtime/test_packages.py", "tests/runtime/test_backends.py"),
    "algorithms/runtime/collectives.py": ("tests/algorithms/test_tensor_parallel.py",),
    "algorithms/runtime/models/sharding.py": ("tests/algorithms/test_tensor_parallel.py",),
    "algorithms/runtime/tensor_parallel.py": ("tests/algorithms/test_tensor_parallel.py",),
}
"""Test files of a file where they are not those of its folder."""
_UNSTEADY = f"--deselect={_ALGORITHMS}test_piggyback.py::test_the_ledger_adds_up_with_prompts_in_steps"
"""A test of times that other processes disturb would catch mutants in vain."""
_DRAFTERS = ("drafters", "drawn_trees", "adaptive")
_NEAREST = (
    dict.fromkeys(("dflash", "eagle", "eagle3", "naive_eagle", "standalone", "tree_drafting", "tree_shape"), _DRAFTERS)
    | dict.fromkeys(("drawing", "drawn_tree"), ("drawn_trees",))
    | dict.fromkeys(("adaptive", "backlog"), ("adaptive",))
    | dict.fromkeys(("chunk", "prefill", "staging"), ("prefill", "piggyback"))
    | dict.fromkeys(("constraints", "grammar", "join_trees"), ("constraints", "mixed"))
    | dict.fromkeys(("session", "step"), ("engine", "top_logprobs", "piggyback", "adaptive", "constraints"))
    | {"engine": ("engine", "piggyback"), "cuda_graph": ("graphs", "adaptive", "piggyback")}
    | dict.fromkeys(("lookup", "ngram", "suffix", "texts"), ("lookup",))
    | {"mixed": ("mixed",), "draft_check": ("plugin",)}
)
"""Test files of the runtime that come first for a file, beside the one of its name."""
_LEFT_OUT = {
    "*/cases*.py": "inputs of the tests themselves",
    "*/configs.py": "sizes of tiles, warps and stages for each chip: speed",
    "*/warmup.py": "what is compiled before the first step: speed",
    "*/__init__.py": "names",
    "algorithms/runtime/backends/flash*.py": "runs with another package only",
    "*/clock.py": "runs on a GPU only",
    "*/kernel_library.py": "runs on a GPU only",
    "*/*_hopper*.py": "runs on a GPU only",
}
"""Files that no mutant is drawn from, with the reason."""
_TILES = re.compile(r"(\w*_)?warps|block(_[a-z])?|BLOCK(_[A-Z])?")
"""Names that are given a value for speed alone, as keywords, by assignment, or as what a function returns."""
_FLAGGED = re.compile(r"(tl\.max\()+.*\.to\(tl\.int32\)(, \d\))+ > 0")
"""Whether one of the lanes is flagged."""
_GUESSES = ("guess_threshold", "sample_groups", "store_edges", "rows_per_program")
"""Functions whose results decide how fast something is and nothing else: where a search begins, a size of tiles."""
_ON_A_GPU = ("_held_weight", "_with_held_weight", "_team_sum", "received", "_received_sums", "half_queries",
             "half_queries_in_halves", "_in_groups")  # fmt: skip
"""Functions of machine instructions, of bfloat16, of programs that wait for each other, or that choose a kernel of one
chip: the interpreter has none."""
_NOT_CALLED = ("_in_groups", "launch_in_groups", "_held_weight", "_with_held_weight")
"""Calls that are made on a GPU only, or whose answer is used there only."""
_MACHINES = ("'cuda'", "'interpreter'")
"""What a comparison asks for that is always so or never, where the tests run."""
_SPREAD = {"WARPS", "VECTOR"}
"""How entries are spread over threads. Which of the two is which changes the order of additions."""
_SYMMETRIC = ("min", "max", "minimum", "maximum", "zip", "isinstance", "getattr", "print", "equal", "logaddexp")
_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="
}  # fmt: skip
_WRITTEN = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_PAIRS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}


@dataclass(frozen=True)
class Site:
    """Characters `start` … `end` of a file, and what they become."""

    kind: str
    path: str
    line: int
    start: int
    end: int
    new: str


@dataclass(frozen=True)
class DrawnMutant(Mutant):
    """A mutant that knows its place instead of a text that occurs once."""

    site: Site | None = None

    def changed(self, root: Path = ROOT) -> str:
        assert self.site is not None
        source = (root / self.path).read_text(encoding="utf-8")
        return source[: self.site.start] + self.site.new + source[self.site.end :]


def mutated_files() -> list[Path]:
    """The files that mutants are drawn from."""
    found = [*(ROOT / "specdec_kernels").rglob("*.py"), *(ROOT / "algorithms").rglob("*.py")]
    files = sorted(path.relative_to(ROOT) for path in found)
    return [path for path in files if not any(path.match(pattern) for pattern in _LEFT_OUT)]


def tests_of(path: Path) -> tuple[str, ...]:
    """The pytest arguments that run what belongs to a file, the quickest first."""
    if path.parts[0] == "specdec_kernels":
        family = ".".join(path.parts[1:-1])
        files = [f"tests/kernels/{name}.py" for name in _FAMILY_TESTS.get(family, (f"test_{family}",))]
        files = [file for file in files if (ROOT / file).is_file()]
        users = [*_USERS.get(family, ()), *_USERS.get(f"{family}.{path.stem}", ())]
        cases = [f"[{name}-" for name in (family or "kv_index", *users)]
        names = " or ".join([*cases, *(Path(file).stem for file in files)])
        return ("tests/kernels/test_parity.py", *files, "-k", names)
    named = [f"{folder}test_{path.stem}.py" for folder in ("tests/runtime/", _ALGORITHMS)]
    own = [file for file in named if (ROOT / file).is_file()]
    if path.as_posix() in _FILE_TESTS:
        others: tuple[str, ...] = _FILE_TESTS[path.as_posix()]
    elif "models" in path.parts:
        others = (*_MODELS, f"{_ALGORITHMS}test_drafters.py")
    elif "backends" in path.parts:
        others = (
            "tests/runtime/test_backends.py",
            "tests/runtime/test_paged_attention.py",
            f"{_ALGORITHMS}test_engine.py",
        )
    else:
        others = (*(f"{_ALGORITHMS}test_{name}.py" for name in _NEAREST.get(path.stem, ())), *_ENGINE, _UNSTEADY)
    return tuple(dict.fromkeys((*own, *others)))


def draw(number: int, seed: int) -> list[DrawnMutant]:
    """`number` mutants, the same ones for the same seed and code."""
    chosen, by_kind = random.Random(seed), dict[str, list[Site]]()
    for path in mutated_files():
        for site in sites_of(path):
            if not _is_meaningless(site):
                by_kind.setdefault(site.kind, []).append(site)
    return [_mutant(chosen.choice(by_kind[chosen.choice(sorted(by_kind))])) for _ in range(number)]


def _is_meaningless(site: Site) -> bool:
    return any(is_in(site, *change) for change in MEANINGLESS)


def is_in(site: Site, path: str, text: str, new: str) -> bool:
    """Whether a site is the change of MEANINGLESS that is given."""
    if (path, new) != (site.path, site.new):
        return False
    source = (ROOT / site.path).read_text(encoding="utf-8")
    place = source.find(text, max(0, site.start - len(text)), site.end + len(text))
    return place >= 0 and place <= site.start < place + len(text)


def _mutant(site: Site) -> DrawnMutant:
    source = (ROOT / site.path).read_text(encoding="utf-8")
    before, after = source.rfind("\n", 0, site.start) + 1, source.find("\n", site.end)
    old = source[before:after].strip()
    new = (source[before : site.start] + site.new + source[site.end : after]).strip()
    name = f"{Path(site.path).stem}:{site.line}"
    return DrawnMutant(name, site.path, old, new, tests_of(Path(site.path)), f"{old}  ->  {new}", site)


def sites_of(path: Path) -> Iterator[Site]:
    """Every change of one operator in the functions of a file."""
    source = (ROOT / path).read_text(encoding="utf-8")
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def at(line: int, column: int) -> int:
        # Columns count bytes.
        start = lines[line - 1]
        return start + len(source[start : lines[line]].encode()[:column].decode())

    def site(kind: str, start: int, end: int, node: ast.expr, new: str) -> Site:
        return Site(kind, path.as_posix(), node.lineno, start, end, new)

    tree = ast.parse(source)
    undecided = _undecided(tree)
    for node in _expressions(tree):
        if node in undecided:
            continue
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
            right = node.comparators[0]
            middle = at(node.left.end_lineno or 0, node.left.end_col_offset or 0), at(right.lineno, right.col_offset)
            kind = type(node.ops[0])
            place = source.find(_WRITTEN[kind], *middle)
            yield site("comparison", place, place + len(_WRITTEN[kind]), node, _COMPARISONS[kind])
        elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)) and _is_one(node.right):
            place = at(node.right.lineno, node.right.col_offset)
            yield site("one", place, place + 1, node.right, "0")
        elif isinstance(node, ast.Call):
            name = _name_of(node)
            if name in _PAIRS and len(node.args) == 2:
                place = at(node.func.end_lineno or 0, node.func.end_col_offset or 0) - len(name)
                yield site("extreme", place, place + len(name), node, _PAIRS[name])
            elif name not in _SYMMETRIC:
                yield from _swaps(node, at, site, source)


def _swaps(node: ast.Call, at, site, source: str) -> Iterator[Site]:  # type: ignore[no-untyped-def]
    """Two neighbouring names of a call change places."""
    # The first two are factors of one product, or a pointer and what is added to it.
    arguments = node.args[1:] if _name_of(node) in ("fma", "_row") else node.args
    for left, right in zip(arguments, arguments[1:], strict=False):
        if (
            isinstance(left, ast.Name)
            and isinstance(right, ast.Name)
            and left.id != right.id
            and {left.id, right.id} != _SPREAD
        ):
            start, end = at(left.lineno, left.col_offset), at(right.end_lineno or 0, right.end_col_offset or 0)
            between = source[start + len(left.id) : end - len(right.id)]
            yield site("names", start, end, left, right.id + between + left.id)


def _name_of(node: ast.AST) -> str:
    """Name of a function that is defined or called."""
    if isinstance(node, ast.Call):
        return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    return node.name if isinstance(node, ast.FunctionDef) else ""


def _given(node: ast.AST) -> list[str]:
    """Names that a keyword or an assignment gives a value to."""
    if isinstance(node, ast.keyword):
        return [node.arg or ""]
    targets = [item for target in node.targets for item in ast.walk(target)] if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _undecided(tree: ast.AST) -> set[ast.AST]:
    """Comparisons whose outcome where both sides are equal changes nothing: of two values that are then equal one is
    taken, as in `where(x > 0, x, 0)`; or they guard a value that an outer `where` of the same condition, alone or with
    others, drops; or they ask whether any lane takes part in what is written for lanes that do not."""
    found = set[ast.AST]()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) or (isinstance(node, ast.While) and isinstance(node.test, ast.BinOp)):
            # A loop has another bound, or it would never end.
            found.update(part for part in _bounds(node.test) if _FLAGGED.fullmatch(ast.unparse(part)))
        if isinstance(node, ast.IfExp):
            condition, chosen, other = node.test, node.body, node.orelse
        elif isinstance(node, ast.Call) and _name_of(node) == "where" and len(node.args) == 3:
            condition, chosen, other = node.args
        else:
            continue
        taken = {_written(chosen), _written(other)}
        found.update(
            part for part in _bounds(condition) if {_written(part.left), _written(part.comparators[0])} == taken
        )
        within = [inner.args[0] for inner in ast.walk(chosen) if _name_of(inner) == "where"]
        asked = set(map(ast.dump, _joined(condition)))
        found.update(*(_bounds(guard) for guard in within if ast.dump(guard) in asked))
    return found


def _joined(condition: ast.AST) -> list[ast.AST]:
    """The conditions that `&` joins, or the one alone."""
    if isinstance(condition, ast.BinOp) and isinstance(condition.op, ast.BitAnd):
        return [*_joined(condition.left), *_joined(condition.right)]
    return [condition]


def _bounds(condition: ast.AST) -> list[ast.Compare]:
    """The comparisons by size in a condition."""
    parts = [part for part in ast.walk(condition) if isinstance(part, ast.Compare)]
    return [part for part in parts if not isinstance(part.ops[0], (ast.Eq, ast.NotEq))]


def _written(node: ast.expr) -> str:
    """The text of an expression; 0 and 0.0 are one number."""
    value = node.value if isinstance(node, ast.Constant) else None
    return str(float(value)) if isinstance(value, (int, float)) else ast.unparse(node)


def _is_one(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 1 and not isinstance(node.value, bool)


def _expressions(tree: ast.AST) -> Iterator[ast.expr]:
    """Expressions inside functions that decide something: no annotations, defaults, messages, assertions or tiles."""
    stack: list[tuple[ast.AST, bool]] = [(tree, False)]
    while stack:
        node, inside = stack.pop()
        if isinstance(node, (ast.Assert, ast.Raise, ast.JoinedStr)) or _name_of(node) == "static_assert":
            continue
        if isinstance(node, ast.If) and all(isinstance(child, ast.Raise) for child in node.body) and not node.orelse:
            continue  # what is refused has tests of its own, and often a second guard behind it
        if isinstance(node, ast.Compare) and any(_written(each) in _MACHINES for each in node.comparators):
            continue  # a machine has a GPU or none: the tests run one side
        if any(_TILES.fullmatch(name) for name in _given(node)):
            continue
        if _name_of(node) in _GUESSES or _TILES.fullmatch(_name_of(node)):
            continue
        if isinstance(node, ast.FunctionDef) and node.name in _ON_A_GPU:
            continue
        if isinstance(node, ast.Call) and _name_of(node) in _NOT_CALLED:
            continue
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            body: Sequence[ast.AST] = node.body if isinstance(node.body, list) else [node.body]
            stack += [(child, True) for child in body]
            continue
        if inside and isinstance(node, ast.expr):
            yield node
        stack += [(child, inside) for child in ast.iter_child_nodes(node)]
