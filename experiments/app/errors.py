"""Errors that the user can fix: one screen of text with the fix and the nearest valid keys, without a traceback."""

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import SequenceMatcher

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MOST_SHOWN = 24
LIKENESS, SAME_GROUP = 0.8, 0.2
"""Least likeness of the last parts of two keys for a suggestion, and what keys of one group have in advance."""


class UserError(Exception):
    """An error with its fix, in a few lines."""

    exit_code = 2


class NotLossless(UserError):
    """A run that is done, and whose texts are not what they must be."""

    exit_code = 3


@contextmanager
def user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turn exceptions of `kinds` into `UserError`, keeping the original as the cause."""
    try:
        yield
    except kinds as error:
        raise UserError(str(error)) from error


def disk_is_full(error: BaseException | None) -> bool:
    """Whether `error` says that nothing more can be written: no space, no quota, or a bound on the size of a file.
    Libraries that write weights raise errors of their own: torch's has the system's error as its cause, and
    safetensors' quotes it."""
    while error is not None:
        quoted = any(f"(os error {number})" in str(error) for number in _FULL)
        if quoted or (isinstance(error, OSError) and error.errno in _FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


def nearest(name: str, valid: Sequence[str], count: int = 3) -> list[str]:
    """The entries of `valid` most like `name`, best first. Dotted keys are compared by their last parts."""
    group, _, leaf = name.rpartition(".")

    def likeness(key: str) -> float:
        ratio = SequenceMatcher(None, leaf, key.rpartition(".")[2]).ratio()
        return ratio + SAME_GROUP * (key.rpartition(".")[0] == group)

    close = [key for key in valid if key != name and likeness(key) >= LIKENESS]
    return sorted(close, key=likeness, reverse=True)[:count]


def listing(names: Sequence[str]) -> str:
    """`names` in one line, shortened where a screen would overflow."""
    shown = ", ".join(names[:MOST_SHOWN])
    return shown if len(names) <= MOST_SHOWN else f"{shown}, … ({len(names)} in all)"


def unknown_key_message(key: str, valid: Sequence[str], elsewhere: Mapping[str, str]) -> str:
    """Message for a key that does not exist. `elsewhere` maps keys of other options to that option."""
    lines, hints = [f"unknown key '{key}'"], [f"{name}=…" for name in nearest(key, valid)]
    others = [key] if hints or key in elsewhere else nearest(key, list(elsewhere))
    hints += [f"{name}=… (with {elsewhere[name]})" for name in others if name in elsewhere and name not in valid]
    if hints:
        lines.append("did you mean: " + ", ".join(hints[:3]))
    parent = key.rpartition(".")[0]
    if siblings := [name for name in valid if name.rpartition(".")[0] == parent]:
        lines.append(f"keys of {parent or 'a run'}: {listing(siblings)}")
    return "\n".join(lines)


def unknown_option_message(group: str, option: str, valid: Sequence[str]) -> str:
    """Message for a group of the configuration that has no such option."""
    close = ", ".join(f"{group}={name}" for name in nearest(option, valid))
    hint = [f"did you mean: {close}"] if close else []
    return "\n".join([f"unknown {group} '{option}'", *hint, f"{group} can be: {listing(valid)}"])
