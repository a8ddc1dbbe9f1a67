"""Imports point down: kernels know no model, the shared rooms no algorithm, algorithms no experiment."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("specdec_kernels", "algorithms", "experiments")
KERNEL_IMPORTS = {"specdec_kernels", "torch", "triton"} | set(sys.stdlib_module_names)


@cache
def imported(path: Path) -> list[str]:
    """Absolute names of all modules that a file imports anywhere in it."""
    return list(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def files(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, f"no files under {folder}"
    return found


def offenders(folder: str, wrong) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {name}" for path in files(folder) for name in imported(path) if wrong(name)
    ]


def test_kernels_import_torch_and_triton_only() -> None:
    assert offenders("specdec_kernels", lambda name: name.split(".")[0] not in KERNEL_IMPORTS) == []


def test_algorithms_import_no_experiment_and_no_configuration() -> None:
    assert offenders("algorithms", lambda name: name.split(".")[0] in {"experiments", "run"}) == []


def test_the_tests_of_the_wheel_need_no_application() -> None:
    above = {"algorithms", "experiments", "run"}
    assert offenders("tests/kernels", lambda name: name.split(".")[0] in above) == []


SHARED = ("attention", "drafting", "engine", "models", "parallel", "step")


@pytest.mark.parametrize("room", SHARED)
def test_shared_rooms_import_no_algorithm(room: str) -> None:
    allowed = {*SHARED, "algorithm", "checked", "lazy"}

    def above(name: str) -> bool:
        return name.split(".")[0] == "algorithms" and name.split(".")[1:2] != [] and name.split(".")[1] not in allowed

    assert offenders(f"algorithms/{room}", above) == []


@pytest.mark.parametrize("folder", ["algorithms", "experiments"])
def test_kernels_are_called_through_their_families(folder: str) -> None:
    """A family's name, or a module beside the families; nothing from inside a family."""
    families = {path.parent.name for path in files("specdec_kernels") if path.name == "api.py"} - {"sglang"}

    def inside(name: str) -> bool:
        package, *rest = name.split(".")
        return package == "specdec_kernels" and len(rest) > 2 and rest[0] in families

    assert offenders(folder, inside) == []


@pytest.mark.parametrize("folder", PACKAGES)
def test_no_package_imports_the_developers_tools(folder: str) -> None:
    assert offenders(folder, lambda name: name.split(".")[0] == "tools") == []


def import_graph() -> dict[str, set[str]]:
    """Module to the modules of the three packages that it imports, inside functions and for types included."""
    paths = {path for folder in PACKAGES for path in files(folder)}
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}

    def module_of(name: str) -> str:
        while name and name not in names:
            name = name.rpartition(".")[0]
        return name

    return {name: {module_of(target) for target in imported(path)} - {name, ""} for name, path in names.items()}


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, todo = set[str](), [start]
        while todo:
            fresh = graph[todo.pop()] - seen
            seen |= fresh
            todo += fresh
        reached[start] = seen
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted(sorted(group) for group in groups if group)


def test_no_modules_import_each_other() -> None:
    """Not in a circle either, and not inside functions: a circle hides which of two modules stands on the other."""
    assert cycles(import_graph()) == []


def test_circles_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    sources = {
        "specdec_kernels/__init__.py": "",
        "specdec_kernels/a.py": "import specdec_kernels.b",
        "specdec_kernels/b.py": "def f():\n    from . import c",
        "specdec_kernels/c.py": "if TYPE_CHECKING:\n    from specdec_kernels.a import A",
        "algorithms/d.py": "from specdec_kernels.a import x",
        "experiments/e.py": "import algorithms.d",
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    circle = ["specdec_kernels.a", "specdec_kernels.b", "specdec_kernels.c"]
    assert cycles(import_graph()) == [circle]


def test_no_kernel_families_import_each_other() -> None:
    """A family builds on others as a whole, or they on it."""
    families: dict[str, set[str]] = {}
    for name, targets in import_graph().items():
        rooms = [each.split(".")[1:2] for each in (name, *targets) if each.startswith("specdec_kernels.")]
        if name.startswith("specdec_kernels."):
            families.setdefault(rooms[0][0], set()).update(room[0] for room in rooms[1:] if room != rooms[0])
    graph = {name: targets & families.keys() for name, targets in families.items()}
    assert cycles(graph) == []


def test_the_walk_sees_imports_inside_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "algorithms" / "engine").mkdir(parents=True)
    source = "def f():\n    from experiments.bench import timing as measure\n    from .. import dflash\n"
    bad = tmp_path / "algorithms" / "engine" / "bad.py"
    bad.write_text(source)
    assert imported(bad) == ["experiments.bench.timing", "algorithms.dflash"]


def test_importing_the_package_does_not_import_triton() -> None:
    program = (
        "import sys, specdec_kernels as s\n"
        "assert not {'torch', 'triton'} & set(sys.modules), 'heavy import'\n"
        "[getattr(s, name) for name in s.__all__]; import torch\n"
        "from specdec_kernels.kv_write import write_kv\n"
        "s.build_chain(torch.zeros(1, dtype=torch.int64), 3, impl='reference')\n"
        "assert 'triton' not in sys.modules, 'Triton imported without a kernel'\n"
        "assert set(s.__all__) <= set(dir(s))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name",
    ["rope_table", "LinearScaling", "Llama3Scaling", "YarnScaling"]
    + [f"{use}_STREAM" for use in ("TARGET", "DRAFT", "ACCEPT", "RECOVER", "BONUS")],
)
def test_what_a_caller_of_the_kernels_needs_beside_them_is_exported(name: str) -> None:
    import specdec_kernels

    assert name in specdec_kernels.__all__ and getattr(specdec_kernels, name) is not None
