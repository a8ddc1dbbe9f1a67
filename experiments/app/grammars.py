"""The grammars of requests on the command line: read from files, and compiled before weights load."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from algorithms.engine.grammar import GrammarError, Grammars
from algorithms.engine.request import Request
from algorithms.models.tokenizer import Tokenizer
from algorithms.step.sampling_params import GRAMMARS, GrammarParams
from experiments.app.errors import UserError

FILE = "@"  # on the command line a grammar that begins so is the name of a file; one that begins with two is text


def grammar_of(own: Mapping[str, Any] | None, params: GrammarParams, place: str = "") -> GrammarParams:
    """The grammar of a prompt: its `own`, always as text, with the other settings of `params`, or `params`, with the
    text of the file where the grammar is `@FILE`, and `@…` where it is `@@…`. Raises UserError where the file cannot be
    read, and that names the prompt's `place` where `own` is no grammar."""
    if own is None:
        return _from_file(params) if params.text.startswith(FILE) else params
    known = [item.name for item in fields(GrammarParams)]
    if unknown := [key for key in own if key not in known]:
        raise UserError(f"{place}: key 'grammar': expected {', '.join(known)}, got {unknown[0]!r}")
    changes: dict[str, Any] = dict.fromkeys(GRAMMARS) | dict(own)
    try:
        return replace(params, **changes)
    except ValueError as error:
        raise UserError(f"{place}: key 'grammar': {error}") from error


def _from_file(params: GrammarParams) -> GrammarParams:
    text = params.text.removeprefix(FILE)
    if not text.startswith(FILE):
        try:
            text = Path(text).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise UserError(f"sampling.grammar.{params.kind}: {text}: cannot be read: {reason}") from error
    changes: dict[str, Any] = {str(params.kind): text}
    return replace(params, **changes)


def compile_all(
    requests: Sequence[Request], tokenizer: Tokenizer, vocab_size: int, place: Callable[[Request], str]
) -> Grammars | None:
    """A compiler that has compiled what `requests` need; None if they need none. Raises UserError that names the place
    of the first request whose grammar cannot be compiled."""
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
