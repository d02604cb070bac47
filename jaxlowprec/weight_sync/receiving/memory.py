"""Reuses the memory of versions that nobody holds any more for the next version.

Fresh memory costs as much as the copy into it: the kernel clears every page that it hands out.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from jaxlowprec.checkpoints.files.open_files import memory

_LEAST_BYTES = 1 << 16
"""The smallest buffer in bytes that is reused; smaller ones come from the allocator, which reuses memory itself."""


class Memory:
    """Lends buffers. A buffer comes back when the last array that is a view of it is gone, whoever held that array.

    Arguments:
        keep: whether to keep buffers that came back.

    >>> memory = Memory()
    >>> buffer = memory.take(1 << 20)
    >>> view, address = buffer[:8], buffer.ctypes.data
    >>> del buffer
    >>> memory.kept_bytes  # the view still holds it
    0
    >>> del view
    >>> memory.kept_bytes, memory.take(1 << 20).ctypes.data == address
    (1048576, True)
    """

    def __init__(self, keep: bool = True):
        self._keep = keep
        self._free: dict[int, list[np.ndarray]] = {}

    @property
    def kept_bytes(self) -> int:
        """Bytes of the buffers that came back and are kept."""
        return sum(size * len(buffers) for size, buffers in list(self._free.items()))

    def take(self, nbytes: int) -> np.ndarray:
        """A buffer, uint8 [nbytes], that begins at a multiple of 64 bytes. Its content is undefined."""
        if not self._keep or nbytes < _LEAST_BYTES:
            return memory(nbytes)
        free = self._free.setdefault(nbytes, [])
        try:
            buffer = free.pop()
        except IndexError:
            buffer = memory(nbytes)
        lent = _Lent(buffer)
        weakref.finalize(lent, free.append, buffer).atexit = False
        return np.asarray(lent)

    def trim(self) -> None:
        """Returns the memory of all kept buffers to the system."""
        for free in self._free.values():
            free.clear()


class _Lent:
    """The object that all views of a buffer hold; unlike an array's own memory, its end can be observed."""

    def __init__(self, buffer: np.ndarray):
        self.__array_interface__: Any = buffer.__array_interface__
