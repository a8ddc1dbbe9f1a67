"""The frame of a report: one HTML file without script or network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

STYLE_FILE = Path(__file__).with_name("page.css")


def page(title: str, lead: str, parts: Sequence[str]) -> str:
    """`parts` are HTML; title and lead are text."""
    body = "\n".join([f"<h1>{escape(title)}</h1>", f"<p class=lead>{escape(lead)}</p>", *filter(None, parts)])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{STYLE_FILE.read_text(encoding='utf-8')}</style></head>\n<body><main>{body}</main></body></html>\n"
    )


def section(title: str, content: str) -> str:
    """A card over the whole width."""
    return f'<section class="card wide"><h2>{escape(title)}</h2>{content}</section>'


def note(text: str) -> str:
    """A line that a reader must not miss."""
    return f"<p class=note>{escape(text)}</p>"


def configuration(config: Mapping[str, Any]) -> str:
    return section("Configuration", f"<pre>{escape(json.dumps(config, indent=2, ensure_ascii=False))}</pre>")


def provenance_table(facts: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(str(name))}</td><td>{escape(str(value))}</td></tr>" for name, value in facts.items()
    )
    return section("Provenance", f"<table>{rows}</table>")
