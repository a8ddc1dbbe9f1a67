"""Errors that the user can fix. They are shown as one screen of text with the fix, without a traceback."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager


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


def disk_is_full(error: OSError) -> bool:
    """Whether `error` says that nothing more can be written: no space, no quota, or a bound on the size of a file."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
