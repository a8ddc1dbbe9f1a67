"""docs/models.md: its Python runs, and its tables name the architectures, their keys and their fields."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from algorithms.models.architectures import ARCHITECTURES, Architecture

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


def test_its_python_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    block = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "import" in block)
    names: dict[str, object] = {}
    exec(block, names)
    assert {"target", "drafter"} <= names.keys()


def test_its_tables_are_the_registry() -> None:
    for model_type, entry in ARCHITECTURES.items():
        row = next(line for line in PAGE.splitlines() if f"| `{model_type}` |" in line)
        for field in fields(entry):
            key = getattr(entry, field.name)
            assert not isinstance(key, str) or field.name == "hf_class" or f"`{key}`" in row, (model_type, key)
    described = PAGE.split("| field | meaning |")[1]
    assert all(f"`{field.name}`" in described for field in fields(Architecture))
