"""The files that the page is made of, and their blocks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from experiments.app.schema import REPO_ROOT
from experiments.results_page.blocks import Curve, Made, Table
from experiments.results_page.picture import picture

SECTIONS = Path(__file__).parent / "sections"
SHARED = SECTIONS / "shared.yaml"
DOCS = REPO_ROOT / "docs"
PAGE = DOCS / "results.md"
FENCED = re.compile(r"^```(rows|made|curve)\n(.*?)^```\n", re.M | re.S)
KINDS: dict[str, type[Table] | type[Made] | type[Curve]] = {"rows": Table, "made": Made, "curve": Curve}
HEAD = "<!-- `python -m experiments.results_page` makes this page from experiments/results_page/sections. -->\n"


def files() -> dict[Path, str]:
    """Path to content of everything that the command writes: the page, and the pictures that it shows.

    Raises ValueError that names the section and the block, for rows that are missing or not unique.
    """
    shared = yaml.safe_load(SHARED.read_text(encoding="utf-8"))
    found: dict[Path, str] = {}
    parts = [HEAD]
    for section in sorted(SECTIONS.glob("*.md")):

        def replaced(block: re.Match[str], section: Path = section) -> str:
            try:
                return _made(block[1], block[2], shared, found)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{section.name}: block {block[1]}: {error}\n{block[2]}") from error

        parts.append(FENCED.sub(replaced, section.read_text(encoding="utf-8")))
    return {PAGE: "\n".join(parts), **found}


def _made(kind: str, text: str, shared: Mapping[str, Any], pictures: dict[Path, str]) -> str:
    settings: dict[str, Any] = yaml.safe_load(text)
    block_type = KINDS[kind]
    known = {item.name for item in fields(block_type)}
    if unknown := sorted(set(settings) - known):
        raise ValueError(f"expected keys of {', '.join(sorted(known))}, got {', '.join(unknown)}")
    if "names" in known:
        settings["names"] = {**shared["names"], **settings.get("names", {})}
    if isinstance(order := settings.get("order"), str):
        if order not in shared["orders"]:
            raise ValueError(f"order: expected a list or one of {', '.join(shared['orders'])}, got {order}")
        settings["order"] = shared["orders"][order]
    block = block_type(**settings)
    if isinstance(block, Curve):
        path = DOCS / f"{block.picture}.svg"
        pictures[path] = picture(block.series(), block.title, (block.axes[0], block.axes[1]))
        return f"![{block.title}]({path.name})\n"
    return block.text()
