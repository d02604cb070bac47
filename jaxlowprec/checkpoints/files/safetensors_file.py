"""Safetensors files: a reader that trusts nothing in the file, and a writer that takes tensors one by one."""

from __future__ import annotations

import math
import os
import pathlib
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping

import numpy as np

from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.dtypes import file_dtype, numpy_dtype
from jaxlowprec.checkpoints.files.open_files import OpenFile, TensorFile, copy_range, memory
from jaxlowprec.checkpoints.files.safetensors_header import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    Header,
    TensorEntry,
    TensorSpec,
    layout_header,
    parse_header,
)
from jaxlowprec.checkpoints.files.written_whole import FilledFile

METADATA = {"format": "pt"}
"""Metadata that Hugging Face's loaders require in a file."""


class SafetensorsFile(TensorFile[TensorEntry, Header]):
    """A safetensors file, open for reading.

    Tensors are read when they are asked for. The arrays are read-only and stay valid after `close`. If the file becomes
    shorter or the disk fails, asking for the tensor raises an error.

    Raises:
        CheckpointError: the file is missing, truncated, or its header is wrong in any way; see `parse_header`.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path, read_header)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Dtype and shape of each tensor."""
        return {name: entry.spec for name, entry in self.header.tensors.items()}

    def raw(self, name: str) -> np.ndarray:
        """The bytes of a tensor, uint8 [nbytes]."""
        data = memory(self._entry(name).spec.nbytes)
        self.read_into(name, data)
        data.flags.writeable = False
        return data

    def read_into(self, name: str, destination: np.ndarray, begin: int = 0) -> None:
        """Fills contiguous memory with a tensor's bytes.

        Arguments:
            name: the tensor's name.
            destination: memory, not longer than the rest of the tensor.
            begin: the first byte to read, counted from the start of the tensor.

        Raises:
            CheckpointError: there is no such tensor, it has fewer bytes, or the file became shorter.
        """
        entry = self._entry(name)
        if begin + destination.nbytes > entry.spec.nbytes:
            wanted = f"{destination.nbytes} at {begin} are asked for"
            raise CheckpointError(f"{self.path}: tensor {name!r} has {entry.spec.nbytes} bytes; {wanted}")
        self._file.read(entry.offset + begin, destination)

    def pieces(self, name: str, nbytes: int) -> Iterator[np.ndarray]:
        """A tensor's bytes, `nbytes` at a time; each piece reuses the memory of the piece before."""
        total = self._entry(name).spec.nbytes
        buffer = memory(min(nbytes, total))
        for begin in range(0, total, nbytes):
            piece = buffer[: total - begin]
            self.read_into(name, piece, begin)
            yield piece

    def read(self, name: str) -> np.ndarray:
        """A tensor. Raises CheckpointError for elements of 4 or 6 bits, which numpy arrays cannot hold: see `raw`."""
        spec = self._entry(name).spec
        dtype = numpy_dtype(spec.dtype)
        if dtype is None:
            raise CheckpointError(f"{self.path}: tensor {name!r} is {spec.dtype}, packed bits that no array holds")
        return self.raw(name).view(dtype).reshape(spec.shape)

    def read_at(self, name: str, index: int) -> np.ndarray:
        """A tensor at one index of its first axis, without that axis. Raises CheckpointError as `read` does."""
        spec = self._entry(name).spec
        dtype = numpy_dtype(spec.dtype)
        if dtype is None:
            raise CheckpointError(f"{self.path}: tensor {name!r} is {spec.dtype}, packed bits that no array holds")
        data = memory(math.prod(spec.shape[1:]) * dtype.itemsize)
        self.read_into(name, data, index * data.nbytes)
        return data.view(dtype).reshape(spec.shape[1:])

    def copy_to(self, name: str, destination: OpenFile, offset: int) -> None:
        """Copies a tensor's bytes into another file, inside the kernel where possible."""
        entry = self._entry(name)
        copy_range(self._file, entry.offset, destination, offset, entry.spec.nbytes)


def read_header(file: OpenFile) -> Header:
    """The checked header of an open file. Reads only the header."""
    path, size = file.path, os.fstat(file.descriptor).st_size
    if size < LENGTH_BYTES:
        raise CheckpointError(f"{path}: the file is truncated: {size} bytes hold no safetensors header")
    prefix = memory(LENGTH_BYTES)
    file.read(0, prefix)
    length = int.from_bytes(prefix.tobytes(), "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: a header of {length} bytes; safetensors allows {MAX_HEADER_BYTES}")
    if LENGTH_BYTES + length > size:
        raise CheckpointError(f"{path}: the file is truncated: a header of {length} bytes in a file of {size}")
    text = memory(length)
    file.read(LENGTH_BYTES, text)
    return parse_header(str(path), text.tobytes(), size)


class SafetensorsWriter(FilledFile):
    """Writes a file whose tensors are all known beforehand; they may come in any order, from any thread.

    Use it as a context manager: the file gets its name when the block ends and every tensor was written. If the block
    raises, nothing stays behind. Until the end, the file has a temporary name in the same folder.

    Arguments:
        path: the final path.
        specs: dtype and shape of every tensor.
        metadata: the file's metadata.

    Raises:
        CheckpointError: a tensor is unknown, written twice, not what was announced, or missing at the end.
    """

    def __init__(self, path: pathlib.Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] = METADATA):
        prefix, self.header = layout_header(str(path), specs, metadata)
        self._missing = set(specs)
        self._lock = threading.Lock()
        super().__init__(path, prefix, self.header.size)

    def write(self, name: str, array: np.ndarray) -> None:
        """Writes a tensor."""
        entry = self._claim(name)
        given = TensorSpec(file_dtype(array.dtype), tuple(array.shape))
        if given != entry.spec:
            raise CheckpointError(f"{self.path}: tensor {name!r} was announced as {entry.spec}, given as {given}")
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._file.write(entry.offset, data.data)

    def write_parts(self, names: Collection[str], parts: Iterable[Mapping[str, np.ndarray]]) -> None:
        """Writes tensors that come piece by piece along their first axes, in order; one piece is in memory.

        Arguments:
            names: the tensors.
            parts: the pieces that come next, by the tensors' names.
        """
        entries, written = {name: self._claim(name) for name in names}, dict.fromkeys(names, 0)
        for name, array in (item for part in parts for item in part.items()):
            spec, data = entries[name].spec, np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            fits = written[name] + data.nbytes <= spec.nbytes
            if (file_dtype(array.dtype), array.shape[1:]) != (spec.dtype, spec.shape[1:]) or not fits:
                given = TensorSpec(file_dtype(array.dtype), tuple(array.shape))
                raise CheckpointError(f"{self.path}: tensor {name!r} was announced as {spec}, and a part is {given}")
            self._file.write(entries[name].offset + written[name], data.data)
            written[name] += data.nbytes
        for name, entry in entries.items():
            if written[name] != entry.spec.nbytes:
                raise CheckpointError(f"{self.path}: {written[name]} bytes of tensor {name!r} came; it is {entry.spec}")

    def copy(self, name: str, source: SafetensorsFile, source_name: str) -> None:
        """Copies a tensor from another file."""
        entry = self._claim(name)
        if source.header.tensors[source_name].spec != entry.spec:
            raise CheckpointError(f"{self.path}: tensor {name!r} was announced as {entry.spec}; the source's differs")
        source.copy_to(source_name, self._file, entry.offset)

    def unwritten(self) -> Collection[str]:
        """See `FilledFile`."""
        return self._missing

    def _claim(self, name: str) -> TensorEntry:
        with self._lock:
            if name not in self._missing:
                fault = "was written before" if name in self.header.tensors else "was not announced"
                raise CheckpointError(f"{self.path}: tensor {name!r} {fault}")
            self._missing.remove(name)
        return self.header.tensors[name]


def write_tensors(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes arrays as one file."""
    specs = {name: TensorSpec(file_dtype(tensor.dtype), tensor.shape) for name, tensor in tensors.items()}
    with SafetensorsWriter(path, specs) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
