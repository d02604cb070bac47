"""Files of shared memory in the form in which torch maps them as a tensor's memory. torch is not needed.

Such a file has a name, so that a process of another program on the same machine, and of the same user, can open it.
Source: torch 2.13 and 2.14, ATen's MapAllocator and libshm.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import pathlib
import secrets

import numpy as np

from jaxlowprec.locks import locked
from jaxlowprec.weight_sync.errors import Refused

SHARED_MEMORY = pathlib.Path("/dev/shm")
"""The folder of POSIX shared memory, where torch looks for names."""

_PREFIX = "jaxlowprec-sglang-"
_BEFORE = 64  # bytes before the tensor, which begin with the number of torch's holders, an int32
_HOLDERS = 1 << 30  # torch removes the file when the number is 0: `SharedBytes` removes it
_LOCKED = 1.0  # seconds that another trainer may look at a new file


class SharedBytes:
    """A file of shared memory that torch maps as a tensor uint8 [nbytes].

    Arguments:
        nbytes: at least 1.

    Attributes:
        name: the file's name in `SHARED_MEMORY`.
        array: its bytes, uint8 [nbytes], aligned to 64 bytes.

    Raises:
        Refused: there is no such memory, or not enough.

    >>> held = SharedBytes(3)
    >>> held.array[:] = 7
    >>> (SHARED_MEMORY / held.name).read_bytes()[-4:]
    b'\\x00\\x07\\x07\\x07'
    >>> held.close()
    >>> (SHARED_MEMORY / held.name).exists()
    False
    """

    def __init__(self, nbytes: int):
        try:
            self._descriptor, self.name = _new_file()
        except OSError as error:
            raise Refused(f"send: {SHARED_MEMORY}: {error.strerror}; pass memory='copied'") from error
        try:
            os.posix_fallocate(self._descriptor, 0, _BEFORE + nbytes)  # a hole would end the process with SIGBUS
            whole = np.frombuffer(mmap.mmap(self._descriptor, _BEFORE + nbytes), np.uint8)
        except OSError as error:
            self.close()
            raise Refused(
                f"send: {SHARED_MEMORY} does not hold {nbytes} more bytes: {error.strerror}; make it larger (Docker: "
                "--shm-size, or --ipc=host), or pass memory='copied'"
            ) from error
        whole[:_BEFORE].view(np.int32)[0] = _HOLDERS
        self.array = whole[_BEFORE:]

    def close(self) -> None:
        """Removes the file. Memory that is mapped stays until it is not."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            (SHARED_MEMORY / self.name).unlink(missing_ok=True)
            os.close(descriptor)


def remove_leftovers() -> None:
    """Removes the files of trainers that were killed: those that nobody has locked."""
    for path in SHARED_MEMORY.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # it is gone, or another user's
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:  # a trainer has it
            pass
        finally:
            os.close(descriptor)


def _new_file() -> tuple[int, str]:
    """A new file, which is locked: (descriptor, name)."""
    while True:
        name = _PREFIX + secrets.token_hex(16)
        descriptor = os.open(SHARED_MEMORY / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if locked(descriptor, _LOCKED) and os.fstat(descriptor).st_nlink:
            return descriptor, name
        os.close(descriptor)  # another trainer took it for a leftover before it was locked
