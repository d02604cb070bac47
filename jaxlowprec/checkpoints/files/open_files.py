"""Open files: bytes by position, either all that were asked for or an error with the file's name, and tensors by name.

Files are read and never mapped. If a mapped file becomes shorter, touching the missing bytes ends the process with
SIGBUS, which Python code cannot catch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, Protocol, Self, TypeVar

import numpy as np

from jaxlowprec.checkpoints.errors import CheckpointError

_ALIGNMENT = 64  # of memory for tensors: JAX takes such arrays over without a copy
_AT_ONCE = 1 << 30  # bytes: the system reads and writes at most 2 GiB in one call
_COPIED_AT_ONCE = 1 << 22

Entry = TypeVar("Entry")
Entry_co = TypeVar("Entry_co", covariant=True)
H = TypeVar("H", bound="Header")


def memory(nbytes: int) -> np.ndarray:
    """Uninitialised uint8 [nbytes], aligned to 64 bytes.

    >>> memory(5).shape, memory(5).ctypes.data % 64
    ((5,), 0)
    """
    room = np.empty(nbytes + _ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % _ALIGNMENT
    return room[begin : begin + nbytes]


class OpenFile:
    """An open file and its name, which the system's errors about an open file do not contain.

    Arguments:
        path: the file's path, for errors.
        descriptor: the open file, which `close` closes.
    """

    def __init__(self, path: pathlib.Path, descriptor: int):
        self.path, self.descriptor = path, descriptor

    @classmethod
    def to_read(cls, path: pathlib.Path) -> OpenFile:
        """A file, open for reading. Raises CheckpointError if it is missing or cannot be read."""
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file")
        try:
            return cls(path, os.open(path, os.O_RDONLY))
        except OSError as error:
            remedy = "; raise the limit of open files (ulimit -n)" if error.errno == errno.EMFILE else ""
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}{remedy}") from None

    def read(self, begin: int, destination: np.ndarray) -> None:
        """Fills contiguous memory from a position in the file.

        Raises:
            CheckpointError: the file ends before that.
            OSError: the disk fails.
        """
        left = destination.reshape(-1).view(np.uint8).data
        end = begin + left.nbytes
        with about(self.path):
            while left.nbytes:
                got = os.preadv(self.descriptor, [left[:_AT_ONCE]], begin)
                if not got:
                    raise CheckpointError(
                        f"{self.path}: became shorter while it was read: {end} bytes are needed, "
                        f"{os.fstat(self.descriptor).st_size} are left; start again when nothing writes to it"
                    )
                left, begin = left[got:], begin + got

    def write(self, begin: int, data: memoryview) -> None:
        """Writes all data to a position in the file. Raises OSError if the disk fails or is full."""
        with about(self.path):
            while data.nbytes:
                written = os.pwrite(self.descriptor, data[:_AT_ONCE], begin)
                data, begin = data[written:], begin + written

    def close(self) -> None:
        """Closes the file. May be called more than once."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def copy_range(source: OpenFile, begin: int, destination: OpenFile, offset: int, count: int) -> None:
    """Copies bytes between two open files, inside the kernel where possible.

    Raises:
        CheckpointError: the source ends before that.
        OSError: a disk fails or is full.
    """
    done = _copied_in_kernel(source, begin, destination, offset, count)
    buffer = memory(min(count - done, _COPIED_AT_ONCE))
    while done < count:
        piece = buffer[: count - done]
        source.read(begin + done, piece)
        destination.write(offset + done, piece.data)
        done += piece.size


def _copied_in_kernel(source: OpenFile, begin: int, destination: OpenFile, offset: int, count: int) -> int:
    """Copies as far as the kernel can; returns the number of bytes. The next step raises the error that stopped it."""
    done = 0
    with contextlib.suppress(AttributeError, OSError):  # the call is missing, or cannot copy between these file systems
        while done < count:
            left = min(count - done, _AT_ONCE)
            copied = os.copy_file_range(source.descriptor, destination.descriptor, left, begin + done, offset + done)
            if not copied:
                break
            done += copied
    return done


@contextlib.contextmanager
def about(path: str | os.PathLike[str]) -> Iterator[None]:
    """Adds the name of the file to the system's errors that have none.

    >>> with about("model.safetensors"):
    ...     raise OSError(27, "File too large")
    Traceback (most recent call last):
    OSError: [Errno 27] File too large: 'model.safetensors'
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


class Header(Protocol[Entry_co]):
    """The least that a header states: the place of each tensor."""

    @property
    def tensors(self) -> Mapping[str, Entry_co]:
        """The entries by the tensors' names."""


class TensorFile(Generic[Entry, H]):
    """A file of tensors, open for reading. Use it as a context manager, or close it.

    Arguments:
        path: the file.
        read_header: reads and checks the header of the open file.
    """

    def __init__(self, path: str | os.PathLike[str], read_header: Callable[[OpenFile], H]):
        self.path = pathlib.Path(path)
        self._file = OpenFile.to_read(self.path)
        try:
            self.header = read_header(self._file)
        except BaseException:
            self.close()
            raise

    def _entry(self, name: str) -> Entry:
        try:
            return self.header.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: no tensor {name!r}") from None

    def close(self) -> None:
        """Closes the file; arrays that were read stay valid."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
