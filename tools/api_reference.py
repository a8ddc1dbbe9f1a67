"""Writes docs/kernels.md, the reference of the wheel's public functions and types, from their docstrings.

    python -m tools.api_reference [--check]

`--check` writes nothing and fails where the page is not what the docstrings give.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any

from specdec_kernels import FAMILIES

PAGE = Path(__file__).parents[1] / "docs" / "kernels.md"
_WIDTH = 100
_NAMES = r"[\w*]+(?:, [\w*]+)*"
_INTRODUCTION = """# Reference of the kernels

<!-- Written by `python -m tools.api_reference` from the docstrings; edit those. -->

Every name below can be imported from its package; the names of the families outside of `compat` also from
`specdec_kernels` itself. A function with an `impl` argument has two implementations with the same results: `triton` is
the kernel, compiled on a GPU and interpreted on a CPU where `TRITON_INTERPRET=1` was set before Triton was imported;
`reference` is its definition in plain torch. `auto` takes the kernel where it can run. An implementation that was asked
for by name is never replaced by the other.
"""


def page() -> str:
    """The whole page as Markdown."""
    packages = [f"specdec_kernels.{family}" for family in FAMILIES]
    contents = "\n".join(f"- [`{name}`](#{_anchor(name)}): {_first_sentence(name)}" for name in packages)
    text = "\n".join([_INTRODUCTION, contents, *(_package(name) for name in packages)])
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def _anchor(name: str) -> str:
    return name.replace(".", "")


def _first_sentence(package: str) -> str:
    text = " ".join((inspect.getdoc(import_module(package)) or "").split("\n\n")[0].split())
    return text.split(". ")[0].rstrip(".") + "."


def _package(name: str) -> str:
    module = import_module(name)
    parts = [f"\n## {name}\n\n{_prose(inspect.getdoc(module) or '')}"]
    return "\n".join(parts + [_entry(public, getattr(module, public)) for public in module.__all__])


def _entry(name: str, value: Any) -> str:
    """One public name: a class with its fields, a function with its signature, or a constant with its value."""
    if inspect.isclass(value):
        return f"\n### {name}\n\n{_prose(inspect.getdoc(value) or '')}{_fields(value)}{_methods(value)}"
    if callable(value):
        return f"\n### {name}\n\n```python\n{_signature(name, value)}\n```\n\n{_prose(inspect.getdoc(value) or '')}"
    return f"\n### {name}\n\n`{name} = {value!r}`\n"


def _signature(name: str, function: Any) -> str:
    signature = inspect.signature(function)
    parameters, starred = [], False
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parameters.append("*")
            starred = True
        stars: dict[Any, str] = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        kind = stars.get(parameter.kind, "")
        starred |= kind == "*"
        annotation = "" if parameter.annotation is parameter.empty else f": {_type(parameter.annotation)}"
        equals = " = " if annotation else "="
        default = "" if parameter.default is parameter.empty else f"{equals}{parameter.default!r}"
        parameters.append(f"{kind}{parameter.name}{annotation}{default}")
    returns = "" if signature.return_annotation is signature.empty else f" -> {_type(signature.return_annotation)}"
    line = f"{name}({', '.join(parameters)}){returns}"
    if len(line) <= _WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + f"){returns}"


def _type(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _fields(kind: type) -> str:
    """The annotated fields of a class, each with the string that follows it in the source."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    lines = []
    for field, following in zip(definition.body, [*definition.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign):
            continue
        default = f" = {ast.unparse(field.value)}" if field.value is not None else ""
        line = f"- `{ast.unparse(field.target)}: {ast.unparse(field.annotation)}{default}`"
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            line += ": " + " ".join(str(following.value.value).split())
        lines.append(line + "\n")
    return "\n" + "".join(lines) if lines else ""


def _methods(kind: type) -> str:
    """The public methods of a class that have a docstring, without those of its bases."""
    shown = []
    for name, member in vars(kind).items():
        method = member.__func__ if isinstance(member, classmethod) else member
        if not name.startswith("_") and inspect.isfunction(method) and method.__doc__:
            prose = _prose(inspect.getdoc(method) or "")
            shown.append(f"\n```python\n{_signature(f'{kind.__name__}.{name}', method)}\n```\n\n{prose}")
    return "".join(shown)


def _prose(docstring: str) -> str:
    """A docstring as Markdown: sections such as `Args:` become lists, indented blocks become code."""
    parts: list[str] = []
    section, block = "", list[str]()

    def close() -> None:
        if block:
            parts.append(_list(section, block) if section else _paragraphs(block))
        block.clear()

    for line in docstring.splitlines():
        if heading := re.fullmatch(r"(Args|Returns|Raises):", line):
            close()
            section = heading[1]
        else:
            block.append(line)
    close()
    return "\n".join(parts)


def _list(section: str, lines: list[str]) -> str:
    """Items begin at the indentation of the section's first line; what is indented further continues an item."""
    text = textwrap.dedent("\n".join(lines)).strip("\n")
    items = [" ".join(item.split()) for item in re.split(r"\n(?=\S)", text) if item.strip()]
    if section == "Returns":
        return f"**Returns** {' '.join(items)}\n"
    named = [re.sub(rf"^({_NAMES}):", lambda names: f"`{names[1]}`:", item) for item in items]
    return (f"**{section}**\n\n" if section else "") + "".join(f"- {item}\n" for item in named)


def _paragraphs(lines: list[str]) -> str:
    shown = []
    for block in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
        if block.startswith("    "):
            shown.append(f"```text\n{textwrap.dedent(block)}\n```")
        elif all(re.match(rf" |{_NAMES}:", line) for line in block.splitlines()):
            shown.append(_list("", block.splitlines()).strip("\n"))
        else:
            shown.append(block)
    return "\n\n".join(shown) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or say whether it is up to date."""
    parser = argparse.ArgumentParser(prog="python -m tools.api_reference", description="Write docs/kernels.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where the page would change")
    chosen = parser.parse_args(arguments)
    text = page()
    if not chosen.check:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        print(f"docs/{PAGE.name} is not what the docstrings give: run `python -m tools.api_reference`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
