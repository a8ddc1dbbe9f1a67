"""docs/kernels.md is what the docstrings give, and names everything that the wheel offers."""

from __future__ import annotations

from importlib import import_module

import pytest

from specdec_kernels import FAMILIES
from tools import api_reference

PACKAGES = [f"specdec_kernels.{family}" for family in FAMILIES]


def test_the_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert api_reference.main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_an_entry(package: str) -> None:
    section = api_reference.page().split(f"\n## {package}\n")[1].split("\n## ")[0]
    assert [name for name in import_module(package).__all__ if f"\n### {name}\n" not in section] == []


def test_sections_of_a_docstring_become_lists() -> None:
    text = (
        "What it does.\n\nArgs:\n    x, y: [B]\n        int32.\n    z: a number.\n\nReturns:\n    A sum\n    of both.\n"
    )
    expected = "What it does.\n\n**Args**\n\n- `x, y`: [B] int32.\n- `z`: a number.\n\n**Returns** A sum of both.\n"
    assert api_reference._prose(text) == expected


def test_a_stale_page_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(api_reference, "page", lambda: "other")
    assert api_reference.main(["--check"]) == 1
    assert "run `python -m tools.api_reference`" in capsys.readouterr().err
