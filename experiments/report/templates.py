"""The HTML and SVG of pages are macros of page.jinja."""

from functools import cache
from pathlib import Path
from typing import Any


def number(value: float) -> str:
    """Four digits, and no power of ten."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


@cache
def _macros() -> Any:
    from jinja2 import Environment, FileSystemLoader  # where a page is written: the command line starts without it

    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = number
    return environment.get_template("page.jinja").module


def html(macro: str, *arguments: Any) -> str:
    """What a macro makes of its arguments. Macros escape text, but not each other's HTML."""
    made: str = getattr(_macros(), macro)(*arguments)
    return made


def section(title: str, content: str) -> str:
    """A card over the whole width; nothing where there is no content."""
    return html("section", title, content)
