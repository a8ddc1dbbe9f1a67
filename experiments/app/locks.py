"""Locks on files and folders. The system releases a lock when its process ends, for any reason."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def take(path: Path, wait: bool = False) -> int | None:
    """The descriptor of a lock on an existing folder, or on a file that is made; None where another process holds it.
    Closing the descriptor releases the lock. A file system without locks grants every one."""
    handle = os.open(path, os.O_RDONLY) if path.is_dir() else os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:
        pass
    return handle


@contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[bool]:
    """Hold the lock `path` during the block. False where another process holds it, which `wait` waits for."""
    handle = take(path, wait)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            os.close(handle)
