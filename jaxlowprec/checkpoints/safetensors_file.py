"""Safetensors files: a reader that maps the file and trusts nothing, and a writer that takes tensors one by one."""

from __future__ import annotations

import mmap
import os
import pathlib
import threading
from collections.abc import Mapping
from types import TracebackType

import numpy as np

from jaxlowprec.checkpoints.dtypes import file_dtype, numpy_dtype
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files import publish, temporary_path
from jaxlowprec.checkpoints.safetensors_header import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    Header,
    TensorSpec,
    layout_header,
    parse_header,
)

METADATA = {"format": "pt"}
"""What Hugging Face's loaders ask of a file."""


class SafetensorsFile:
    """A file, open for reading.

    Its tensors are views of the mapped file: they cost no memory of their own, cannot be written to, and stay valid
    after `close`.

    Raises:
        CheckpointError: the file is missing, truncated, or its header is wrong in any way; see `parse_header`.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)
        if not self.path.is_file():
            raise CheckpointError(f"{self.path}: no such file")
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from None
        try:
            self.header = read_header(self.path, self._descriptor)
            self._map = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._bytes = np.frombuffer(self._map, np.uint8)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """What each tensor is."""
        return {name: entry.spec for name, entry in self.header.tensors.items()}

    def raw(self, name: str) -> np.ndarray:
        """A tensor's bytes, uint8 [nbytes]."""
        entry = self._entry(name)
        return self._bytes[entry.offset : entry.offset + entry.spec.nbytes]

    def read(self, name: str) -> np.ndarray:
        """A tensor. Raises CheckpointError for elements of 4 or 6 bits, which no numpy array holds: see `raw`."""
        spec = self._entry(name).spec
        dtype = numpy_dtype(spec.dtype)
        if dtype is None:
            raise CheckpointError(f"{self.path}: tensor {name!r} is {spec.dtype}, packed bits that no array holds")
        raw = self.raw(name)
        if raw.ctypes.data % dtype.itemsize:  # other writers may begin a tensor anywhere
            raw = raw.copy()
        return raw.view(dtype).reshape(spec.shape)

    def copy_to(self, name: str, descriptor: int, offset: int) -> None:
        """Copies a tensor's bytes into another file, inside the kernel where it can."""
        entry = self._entry(name)
        copy_range(self._descriptor, entry.offset, descriptor, offset, entry.spec.nbytes)

    def _entry(self, name: str):
        try:
            return self.header.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: no tensor {name!r}") from None

    def close(self) -> None:
        """Closes the file; arrays that were read stay valid."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_header(path: pathlib.Path, descriptor: int) -> Header:
    """The checked header of an open file. Reads the header alone."""
    size = os.fstat(descriptor).st_size
    if size < LENGTH_BYTES:
        raise CheckpointError(f"{path}: the file is truncated: {size} bytes hold no safetensors header")
    length = int.from_bytes(os.pread(descriptor, LENGTH_BYTES, 0), "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: a header of {length} bytes; safetensors allows {MAX_HEADER_BYTES}")
    if LENGTH_BYTES + length > size:
        raise CheckpointError(f"{path}: the file is truncated: a header of {length} bytes in a file of {size}")
    return parse_header(str(path), os.pread(descriptor, length, LENGTH_BYTES), size)


def copy_range(source: int, begin: int, destination: int, offset: int, count: int) -> None:
    """Copies bytes between two open files, inside the kernel where it can."""
    in_kernel = hasattr(os, "copy_file_range")
    while count:
        if in_kernel:
            try:
                copied = os.copy_file_range(source, destination, count, begin, offset)
            except OSError:  # between two file systems, or on one that has no such call
                in_kernel = False
                continue
        else:
            copied = os.pwrite(destination, os.pread(source, min(count, 1 << 22), begin), offset)
        if not copied:
            raise CheckpointError("safetensors: a file became shorter while it was copied")
        begin, offset, count = begin + copied, offset + copied, count - copied


class SafetensorsWriter:
    """Writes a file whose tensors are all known beforehand; they come in any order, from any thread.

    Use it as a context: the file gets its name when the block ends and every tensor was written, and leaves nothing
    behind when the block raises. Until then it lies beside its place, under a temporary name.

    Arguments:
        path: of the file to be.
        specs: of every tensor.
        metadata: of the file.

    Raises:
        CheckpointError: a tensor is unknown, written twice, not what was announced, or missing at the end.
    """

    def __init__(self, path: pathlib.Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] = METADATA):
        self.path = path
        prefix, self.header = layout_header(str(path), specs, metadata)
        self._missing = set(specs)
        self._lock = threading.Lock()
        self._descriptor = os.open(temporary_path(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            os.truncate(self._descriptor, self.header.size)
            _write_all(self._descriptor, memoryview(prefix), 0)
        except BaseException:
            self.abandon()
            raise

    def write(self, name: str, array: np.ndarray) -> None:
        """Writes a tensor."""
        entry = self._claim(name)
        given = TensorSpec(file_dtype(array.dtype), tuple(array.shape))
        if given != entry.spec:
            raise CheckpointError(f"{self.path}: tensor {name!r} was announced as {entry.spec}, given as {given}")
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        _write_all(self._descriptor, data.data, entry.offset)

    def copy(self, name: str, source: SafetensorsFile, source_name: str) -> None:
        """Copies a tensor from another file."""
        entry = self._claim(name)
        if source.header.tensors[source_name].spec != entry.spec:
            raise CheckpointError(f"{self.path}: tensor {name!r} was announced as {entry.spec}, the source's differs")
        source.copy_to(source_name, self._descriptor, entry.offset)

    def commit(self) -> None:
        """Puts the file on the disk and gives it its name; removes it where that fails."""
        try:
            if self._missing:
                missing = f"{len(self._missing)} tensors were not written: {min(self._missing)}"
                raise CheckpointError(f"{self.path}: {missing}")
            os.fsync(self._descriptor)
            publish(self.path)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Closes the file, and removes it if it has not got its name."""
        os.close(self._descriptor)
        temporary_path(self.path).unlink(missing_ok=True)

    def _claim(self, name: str):
        with self._lock:
            if name not in self._missing:
                fault = "was written before" if name in self.header.tensors else "was not announced"
                raise CheckpointError(f"{self.path}: tensor {name!r} {fault}")
            self._missing.remove(name)
        return self.header.tensors[name]

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.abandon()


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """pwrite takes at most 2 GiB at once, and may take less."""
    while data.nbytes:
        written = os.pwrite(descriptor, data[: 1 << 30], offset)
        data, offset = data[written:], offset + written
