"""Errors that the user can fix. They are shown as one screen of text with the fix, without a traceback."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(Exception):
    """What is wrong and how to fix it, in a few lines."""

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

    Libraries that write weights raise errors of their own: torch's has the system's behind it, safetensors' quotes it.
    """
    while error is not None:
        quoted = any(f"(os error {number})" in str(error) for number in _FULL)
        if quoted or (isinstance(error, OSError) and error.errno in _FULL):
            return True
        error = error.__cause__ or error.__context__
    return False
