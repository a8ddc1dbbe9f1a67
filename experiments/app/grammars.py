"""The grammars of requests on the command line: read from files, and compiled before weights load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algorithms.runtime.sampling_params import GRAMMARS, GrammarParams
from experiments.app.errors import UserError

if TYPE_CHECKING:
    from algorithms.runtime.grammar import Grammars
    from algorithms.runtime.models.tokenizer import Tokenizer
    from algorithms.runtime.request import Request

FILE = "@"
"""A grammar that begins so is the name of a file."""


def from_files(params: GrammarParams) -> GrammarParams:
    """`params` with the text of the file where a grammar is `@FILE`. Raises UserError where it cannot be read."""
    name = params.text[len(FILE) :]
    if not params.text.startswith(FILE):
        return params
    try:
        text = Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UserError(f"sampling.grammar.{params.kind}: {name}: cannot be read: {reason}") from error
    changes: dict[str, Any] = {str(params.kind): text.strip()}
    return replace(params, **changes)


def of_row(row: Mapping[str, Any], params: GrammarParams) -> GrammarParams:
    """The grammar of a prompt that has its own, with the other settings of `params`. Raises UserError."""
    known = [item.name for item in fields(GrammarParams)]
    if unknown := [key for key in row if key not in known]:
        raise UserError(f"key 'grammar': expected {', '.join(known)}, got {unknown[0]!r}")
    changes: dict[str, Any] = dict.fromkeys(GRAMMARS) | dict(row)
    try:
        return from_files(replace(params, **changes))
    except ValueError as error:
        raise UserError(f"key 'grammar': {error}") from error


def compile_all(
    requests: Sequence[Request], tokenizer: Tokenizer, vocab_size: int, place: Callable[[Request], str]
) -> Grammars | None:
    """A compiler that has compiled what `requests` need; None if they need none. Raises UserError that names the place
    of the first request whose grammar cannot be compiled."""
    from algorithms.runtime.grammar import GrammarError, Grammars

    constrained = [request for request in requests if request.sampling.constrained]
    if not constrained:
        return None
    try:
        grammars = Grammars.of_tokenizer(tokenizer, vocab_size)
    except GrammarError as error:
        raise UserError(str(error)) from error
    for request in constrained:
        try:
            grammars.matcher(request.sampling.grammar, request.ends)
        except GrammarError as error:
            raise UserError(f"{place(request)}: {error}") from error
    return grammars
