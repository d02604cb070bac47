"""Locks of open files and folders. The system releases them when the process ends that holds them."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator

_LOOK = 0.02  # seconds between two tries


def locked(descriptor: int, timeout: float) -> bool:
    """Whether an exclusive lock was obtained within `timeout` seconds. Closing the descriptor releases it.

    Raises:
        OSError: the open file cannot be locked.

    >>> import tempfile
    >>> with tempfile.TemporaryFile() as file:
    ...     locked(file.fileno(), timeout=1.0)
    True
    """
    until = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(min(_LOOK, timeout))


@contextlib.contextmanager
def alone(descriptor: int) -> Iterator[None]:
    """Waits for an exclusive lock and holds it; does nothing where the file system has no locks."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def held_elsewhere(descriptor: int) -> bool:
    """Whether somebody else has the exclusive lock. If not, it is held from now on, where the file system has locks."""
    try:
        return not locked(descriptor, timeout=0.0)
    except OSError:
        return False
