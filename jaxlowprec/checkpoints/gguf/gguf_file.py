"""GGUF files: a reader that trusts nothing in the file, a list, and a writer that takes tensors or parts one by one."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import threading
from collections.abc import Collection, Mapping

import numpy as np

from jaxlowprec.checkpoints.conversion.inspect import InspectedModule, Inspection
from jaxlowprec.checkpoints.errors import CheckpointError, brief, escaped
from jaxlowprec.checkpoints.files.open_files import OpenFile, TensorFile, memory
from jaxlowprec.checkpoints.files.written_whole import FilledFile
from jaxlowprec.checkpoints.gguf.block_types import DECODED, Decoder
from jaxlowprec.checkpoints.gguf.header import (
    ALIGNMENT,
    Cursor,
    Header,
    TensorEntry,
    TensorSpec,
    Value,
    layout_header,
    parse_header,
    shortest,
)

SUFFIX = ".gguf"
_SPLIT = "split.count"
_DECODED_AT_ONCE = 1 << 15  # blocks: the package gguf takes up to 150 MB of intermediate results for them


class GGUFFile(TensorFile[TensorEntry, Header]):
    """A GGUF file (version 2 or 3), open for reading.

    Tensors are read when they are asked for. The arrays stay valid after `close`. Shapes have numpy's order: the last
    axis is the contiguous one, so a weight is [N, K] as in a Hugging Face checkpoint.

    Raises:
        CheckpointError: the file is missing, truncated, wrong in any way (`parse_header`), or one of several parts.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path, _read_header)

    @property
    def metadata(self) -> Mapping[str, Value]:
        """The metadata: numbers as numpy scalars of their width, strings, bool, lists of strings, arrays."""
        return self.header.metadata

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Type and shape of each tensor, in the order of the file's table."""
        return {name: entry.spec for name, entry in self.header.tensors.items()}

    def blocks(self, name: str, part: int | None = None) -> np.ndarray:
        """A tensor's bytes, uint8 [..., bytes of a row].

        Arguments:
            name: the tensor's name.
            part: read only this index of the first axis, such as one expert of [E, N, K].
        """
        entry = self._entry(name)
        shape, offset = entry.spec.shape, entry.offset
        if part is not None:
            shape = shape[1:]
            offset += part * entry.spec.type.nbytes(shape)
        data = memory(entry.spec.type.nbytes(shape))
        self._file.read(offset, data)
        return data.reshape(*shape[:-1], entry.spec.type.row_bytes(shape)) if shape else data

    def read(self, name: str, part: int | None = None) -> np.ndarray:
        """A tensor as numbers: in its own dtype if numpy has it, otherwise decoded to float32 as ggml decodes it.

        Raises:
            CheckpointError: see `decoder`.
        """
        spec, decode = self._entry(name).spec, self.decoder(name)
        shape = spec.shape if part is None else spec.shape[1:]
        data = self.blocks(name, part)
        if spec.type.dtype is not None:
            return data.reshape(-1).view(spec.type.dtype).reshape(shape)
        blocks = data.reshape(-1, spec.type.block_bytes)
        numbers = np.empty((len(blocks), spec.type.elements), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for begin in range(0, len(blocks), _DECODED_AT_ONCE):
                numbers[begin : begin + _DECODED_AT_ONCE] = decode(blocks[begin : begin + _DECODED_AT_ONCE])
        return numbers.reshape(shape)

    def decoder(self, name: str) -> Decoder:
        """The function that decodes a tensor's blocks.

        Raises:
            CheckpointError: there is no such tensor, its type is not decoded, or the package gguf that decodes it is
                not installed.
        """
        block_type = self._entry(name).spec.type
        if block_type.decode is None:
            raise CheckpointError(
                f"{self.path}: tensor {brief(name)} is {block_type.name}, whose numbers are not decoded here; decoded "
                f"are {', '.join(DECODED)}: quantise the model to one of these with llama.cpp's llama-quantize"
            )
        if block_type.needs_package and importlib.util.find_spec("gguf") is None:
            raise CheckpointError(
                f"{self.path}: tensor {brief(name)} is {block_type.name}, which the package gguf decodes: pip install "
                "'jaxlowprec[gguf]'"
            )
        return block_type.decode


def _read_header(file: OpenFile) -> Header:
    """The checked header of an open file that holds a whole model."""
    header = parse_header(Cursor(file))
    parts = header.metadata.get(_SPLIT, 0)
    if not isinstance(parts, np.integer | int) or parts not in (0, 1):
        raise CheckpointError(
            f"{file.path}: is one of {brief(shortest(parts))} parts of a model; put them together with llama.cpp's "
            "llama-gguf-split --merge"
        )
    return header


class GGUFWriter(FilledFile):
    """Writes a GGUF file whose tensors are all known beforehand; they may come in any order, from any thread.

    Use it as a context manager: the file gets its name when the block ends and every byte was written. If the block
    raises, nothing stays behind. Until the end, the file has a temporary name in the same folder.

    Arguments:
        path: the final path.
        specs: type and shape of every tensor, in the order of the file.
        metadata: see `header.Value`: numpy scalars say the width of numbers.
        alignment: of the tensors, in bytes.

    Raises:
        CheckpointError: a tensor is unknown, written twice, not what was announced, or missing at the end.
    """

    def __init__(
        self,
        path: pathlib.Path,
        specs: Mapping[str, TensorSpec],
        metadata: Mapping[str, Value],
        alignment: int = ALIGNMENT,
    ):
        prefix, self.header = layout_header(str(path), specs, metadata, alignment)
        self._missing = {name: spec.nbytes for name, spec in specs.items() if spec.nbytes}
        self._parts: set[tuple[str, int]] = set()
        self._lock = threading.Lock()
        super().__init__(path, prefix, self.header.size)

    def write(self, name: str, array: np.ndarray, part: int | None = None) -> None:
        """Writes a tensor.

        Arguments:
            name: the tensor's name.
            array: its elements, or uint8 [..., bytes of a row] of its blocks.
            part: write only this index of the first axis.
        """
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        entry = self._claim(name, part, data.nbytes)
        self._file.write(entry.offset + (part or 0) * data.nbytes, data.data)

    def _claim(self, name: str, part: int | None, nbytes: int) -> TensorEntry:
        tensor = f"{self.path}: tensor {name!r}"
        entry = self.header.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{tensor} was not announced")
        shape = entry.spec.shape if part is None else entry.spec.shape[1:]
        parts = 1 if part is None else entry.spec.shape[0]
        if nbytes != entry.spec.type.nbytes(shape) or not 0 <= (part or 0) < parts:
            raise CheckpointError(f"{tensor} was announced as {entry.spec}; {nbytes} bytes of part {part} are given")
        with self._lock:
            if (name, part or 0) in self._parts:
                raise CheckpointError(f"{tensor} was written before")
            self._parts.add((name, part or 0))
            self._missing[name] = self._missing.get(name, 0) - nbytes
            if not self._missing[name]:
                del self._missing[name]
        return entry

    def unwritten(self) -> Collection[str]:
        """See `FilledFile`."""
        return self._missing


def inspect_gguf(path: str | pathlib.Path) -> Inspection:
    """The tensors of a GGUF file with types, shapes and bytes, in the file's order.

    Raises:
        CheckpointError: see `GGUFFile`.
    """
    with GGUFFile(path) as file:
        modules = [InspectedModule(name, spec.type.name, spec.shape, spec.nbytes) for name, spec in file.specs.items()]
        architecture = file.metadata.get("general.architecture")
        named = escaped(brief(architecture).strip("'\"")) if isinstance(architecture, str) else "unknown architecture"
        return Inspection(str(path), f"GGUF v{file.header.version} {named}", tuple(modules))
