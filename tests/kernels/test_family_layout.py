"""Every family folder is laid out the same way, its names are those of the package and nothing else is, and no
kernel grows too large to read without saying why."""

import ast
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

import specdec_kernels
from specdec_kernels import FAMILIES

ROOT = Path(specdec_kernels.__file__).parent
MAX_KERNEL_LINES, MAX_RUN_TIME_ARGUMENTS = 100, 16


def folder(family: str) -> Path:
    return ROOT / family.replace(".", "/")


def kernels(path: Path) -> list[tuple[ast.FunctionDef, str]]:
    """Functions that Triton compiles, each with its head: the line above its decorator to the line of its name."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    marks = ("triton.jit", "gluon.jit")
    jitted = [node for node in found if any(ast.unparse(mark).startswith(marks) for mark in node.decorator_list)]
    heads = ["\n".join(lines[node.decorator_list[0].lineno - 2 : node.lineno]) for node in jitted]
    return [(node, head) for node, head in zip(jitted, heads, strict=True) if node.name.endswith("_kernel")]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_its_files(family: str) -> None:
    names = {path.stem for path in folder(family).glob("*.py")}
    assert {"__init__", "api", "cases", "reference"} <= names
    assert any(name == "kernel" or name.startswith("kernel_") for name in names)


@pytest.mark.parametrize("family", FAMILIES)
def test_init_only_imports_and_names(family: str) -> None:
    body = ast.parse((folder(family) / "__init__.py").read_text(encoding="utf-8")).body
    defined = [node for node in body[1:] if not isinstance(node, (ast.Import, ast.ImportFrom, ast.Assign))]
    assert [ast.unparse(node)[:60] for node in defined] == []


def dispatches(family: str) -> list[tuple[str, str]]:
    """(function, kernel module) of every call of `dispatch` in the family."""
    calls = [
        node
        for path in folder(family).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dispatch"
    ]
    places = [
        call.args[4] if len(call.args) > 4 else next((word.value for word in call.keywords), None) for call in calls
    ]
    modules = ["kernel" if place is None else ast.literal_eval(place) for place in places]
    return [(ast.literal_eval(call.args[0]), module) for call, module in zip(calls, modules, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_function_has_one_name_in_reference_and_kernel(family: str) -> None:
    package = f"specdec_kernels.{family}"
    found = dispatches(family)
    missing = [name for name, _ in found if not hasattr(import_module(f"{package}.reference"), name)]
    missing += [name for name, module in found if not hasattr(import_module(f"{package}.{module}"), name)]
    assert found and missing == []


def test_only_launch_decides_between_kernel_and_reference() -> None:
    users = [path for path in ROOT.rglob("*.py") if "use_triton" in path.read_text(encoding="utf-8")]
    assert [str(path.relative_to(ROOT)) for path in users] == ["launch.py"]


def test_a_large_kernel_says_why() -> None:
    """Above 100 lines or 16 run-time arguments, a comment above the decorator or behind the name says why."""
    silent = []
    for path in sorted(ROOT.rglob("*.py")):
        for node, head in kernels(path):
            kinds = [ast.unparse(one.annotation) if one.annotation else "" for one in node.args.args]
            arguments = [kind for kind in kinds if "constexpr" not in kind]
            length = (node.end_lineno or 0) - node.lineno + 1
            large = length > MAX_KERNEL_LINES or len(arguments) > MAX_RUN_TIME_ARGUMENTS
            if large and "#" not in head:
                silent.append(f"{path.relative_to(ROOT)} {node.name}: {length} lines, {len(arguments)} arguments")
    assert silent == []


CORE = [family for family in FAMILIES if not family.startswith("compat.")]


def public_names(family: str) -> list[str]:
    return import_module(f"specdec_kernels.{family}").__all__


def test_every_folder_with_code_is_a_family() -> None:
    folders = {path.parent for path in Path(specdec_kernels.__file__).parent.glob("*/*.py")}
    assert {folder.name for folder in folders} - {"compat"} == set(CORE)


def test_type_checkers_see_every_family() -> None:
    tree = ast.parse(Path(specdec_kernels.__file__).read_text())
    seen = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
    assert seen == [f"specdec_kernels.{family}" for family in CORE]


def test_no_name_belongs_to_two_families() -> None:
    owners = Counter([name for family in CORE for name in public_names(family)] + CORE)
    assert [name for name, count in owners.items() if count > 1] == []


@pytest.mark.parametrize("family", CORE)
def test_every_public_name_of_a_family_is_a_name_of_the_package(family: str) -> None:
    names = public_names(family)
    module = import_module(f"specdec_kernels.{family}")
    assert names and set(names) <= set(specdec_kernels.__all__)
    assert all(getattr(specdec_kernels, name) is getattr(module, name) for name in names)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'no_such_kernel'"):
        specdec_kernels.no_such_kernel  # noqa: B018
