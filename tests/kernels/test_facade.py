"""One list of names: what a family's `__all__` names is importable from `specdec_kernels`, and nothing else is."""

import ast
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

import specdec_kernels
from specdec_kernels import FAMILIES

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
