"""The words of a command line, arranged and checked before Hydra parses them.

Hydra's parser wants its options before the settings, and answers a stray word with a grammar. Here options may stand
anywhere, and a word that is neither gets a message of its own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser

from experiments.app.errors import UserError
from experiments.app.suggest import unknown_key_message

HELP = ("-h", "--help")

_SETTING = re.compile(r"[+~\w][^=\s]*=|~")


def arranged(words: Sequence[str]) -> list[str]:
    """`words` with the options before the settings. Raises UserError for a word that is neither."""
    settings = [word for word in words if _SETTING.match(word)]
    options = [word for word in words if not _SETTING.match(word)]
    parser: Any = get_args_parser()
    parser.error = _refuse_option
    parsed = parser.parse_args(options)
    for stray in parsed.overrides:
        raise UserError(_stray_word(stray, words))
    if sum(map(bool, (parsed.run, parsed.multirun, parsed.cfg, parsed.info, parsed.shell_completion))) > 1:
        raise UserError("give one of --run, --multirun, --cfg, --info and --shell-completion")
    return options + settings


def _refuse_option(message: str) -> NoReturn:
    raise UserError(f"{message}\noptions and settings are listed by --help")


def _stray_word(word: str, words: Sequence[str]) -> str:
    """The message for a word without a value; a setting that was typed with spaces is shown without them."""
    at = words.index(word)
    around = " ".join(words[max(0, at - 2) : at + 3])
    spaced = re.search(r"([\w.+~]+)\s*=\s*([^\s=]+)", around)
    if word.startswith("=") or (spaced and word in (spaced[1], spaced[2])):
        fixed = f"{spaced[1]}={spaced[2]}" if spaced else "key=value"
        return f"{spaced[0] if spaced else word!r}: a setting has no spaces around '='\nwrite {fixed}"
    return f"{word!r} is no setting: expected key=value, such as algo=dflash, or an option such as -m"


def assign(settings: Any, words: Sequence[str], manual: str) -> list[str]:
    """Set the fields of the dataclass `settings` that `words` of the form key=value name; return the other words.

    For a program without Hydra. `--help` prints `manual` and ends the program. Raises UserError for an unknown key, and
    for a value that is no whole number where one is expected.
    """
    if set(words) & set(HELP):
        print(manual.strip())
        sys.exit()
    kinds = {key: type(value) for key, value in vars(settings).items()}
    others = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or Path(word).exists():
            others.append(word)
            continue
        if key not in kinds:
            raise UserError(unknown_key_message(key, list(kinds), {}))
        try:
            setattr(settings, key, kinds[key](value))
        except ValueError as error:
            raise UserError(f"{key}: expected a whole number, got {value!r}") from error
    return others
