"""Reads a file from its beginning, value by value. No length that the file claims is believed before it is compared."""

from __future__ import annotations

import os

import numpy as np

from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.file_bytes import OpenFile, memory

MAX_HEADER_BYTES = 1 << 28
"""The most that is read: headers of published files have some megabytes."""

_AT_ONCE = 1 << 20


class Cursor:
    """A position in a file that moves forward.

    Attributes:
        where: the file's path, for errors.
        size: bytes of the file.
        position: the next byte to read.
    """

    def __init__(self, file: OpenFile):
        self._file = file
        self.where = str(file.path)
        self.size = os.fstat(file.descriptor).st_size
        self.position = 0
        self._held = memoryview(b"")  # what was read and not yet taken

    def require(self, count: int, what: str) -> None:
        """Raises CheckpointError if the file, or the part that may be a header, has fewer bytes left."""
        if count > self.size - self.position:
            raise CheckpointError(
                f"{self.where}: the file is truncated or damaged: {what} takes {count} bytes at byte {self.position}, "
                f"the file has {self.size}; copy or download it again"
            )
        if self.position + count > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{self.where}: {what} ends {self.position + count} bytes after the start; a header of at most "
                f"{MAX_HEADER_BYTES} is read: the file is damaged, or made to exhaust memory"
            )

    def take(self, count: int, what: str) -> memoryview:
        """The next bytes."""
        self.require(count, what)
        if count > len(self._held):
            ahead = min(max(count, _AT_ONCE), self.size - self.position)
            data = memory(ahead)
            self._file.read(self.position, data)
            self._held = data.data
        taken, self._held = self._held[:count], self._held[count:]
        self.position += count
        return taken

    def array(self, dtype: np.dtype, count: int, what: str) -> np.ndarray:
        """The next numbers, in an array of their own."""
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype).astype(dtype.newbyteorder("="))

    def number(self, dtype: str, what: str) -> int:
        """The next whole number."""
        return int.from_bytes(self.take(np.dtype(dtype).itemsize, what), "little")

    def text(self, what: str, longest: int | None = None) -> str:
        """The next string: its length, and UTF-8."""
        length = int.from_bytes(self.take(8, what), "little")
        if longest is not None and length > longest:
            raise CheckpointError(f"{self.where}: {what} has {length} bytes; at most {longest} are read")
        data = self.take(length, what)
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.where}: {what} is not text in UTF-8") from None
