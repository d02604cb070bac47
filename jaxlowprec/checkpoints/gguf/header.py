"""The beginning of a GGUF file: counts, metadata and the table of tensors, parsed with every check and laid out anew.

    "GGUF", version (u32), number of tensors (u64), number of metadata entries (u64)
    an entry: key (string), type (u32), value
    a tensor: name (string), number of axes (u32), sizes (u64 each, the contiguous one first), type (u32), offset (u64)

A string is a length (u64) and UTF-8. All is little-endian. The tensors' bytes follow at the next multiple of the
alignment, from which offsets count. Shapes here have numpy's order: the contiguous axis is the last one.

Source: docs/gguf.md of ggml; the limits are those of gguf.cpp of llama.cpp.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxlowprec.checkpoints.errors import CheckpointError, brief
from jaxlowprec.checkpoints.files.open_files import OpenFile, memory
from jaxlowprec.checkpoints.gguf.block_types import BY_NUMBER, TYPES, BlockType

MAGIC, VERSION, READ_VERSIONS = b"GGUF", 3, (2, 3)
ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"
LONGEST_NAME = 63  # bytes of a tensor's name that llama.cpp reads
MAX_HEADER_BYTES = 1 << 28
"""The most bytes of a header that are read: headers of published files have some megabytes."""

_READ_AT_ONCE = 1 << 20

_MOST_KEYS, _MOST_TENSORS, _MOST_AXES = 1 << 16, 1 << 17, 4
_LONGEST_KEY = (1 << 16) - 1
_LARGEST_SIZE = 2**63 - 1
_LEAST_KEY_BYTES, _LEAST_TENSOR_BYTES = 13, 24  # of an entry, which bound the counts by the file's size
_SCALARS: dict[int, np.dtype] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {dtype: number for number, dtype in _SCALARS.items()}

Value = np.generic | bool | str | list[str] | np.ndarray
"""A value of metadata: a number of its own width, or an array of such numbers, of bool or of strings."""


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Type and shape of a tensor; the last axis is the contiguous one."""

    type: BlockType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.type.nbytes(self.shape)


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file: its spec, and the position of its first byte, counted from the start of the file."""

    spec: TensorSpec
    offset: int


@dataclasses.dataclass(frozen=True)
class Header:
    """A file's content: `metadata`, `tensors` in the order of the table, and `size`, the bytes of the whole file."""

    version: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorEntry]
    size: int


class Cursor:
    """Reads a file from its beginning, value by value. A length that the file claims is compared before it is believed.

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
            ahead = min(max(count, _READ_AT_ONCE), self.size - self.position)
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


def parse_header(cursor: Cursor) -> Header:
    """The checked header of a file. Memory and time are in proportion to the header, not to what it claims.

    Raises:
        CheckpointError: no GGUF, another version or byte order, a count, length, size, type or offset that the file
            cannot have, a name or key that comes twice, tensors that overlap, or a file that is too short.
    """
    where = cursor.where
    version, tensor_count, key_count = _counts(cursor)
    metadata: dict[str, Value] = {}
    for _ in range(key_count):
        key = cursor.text("a key of the metadata", _LONGEST_KEY)
        if not key or key in metadata:
            raise CheckpointError(f"{where}: the metadata has the key {brief(key)} {'twice' if key else ''}".rstrip())
        metadata[key] = _value(cursor, key)
    alignment = _alignment(where, metadata)
    table = {}
    for _ in range(tensor_count):
        name, spec, offset = _tensor(cursor)
        if name in table:
            raise CheckpointError(f"{where}: tensor {brief(name)} is in the table twice")
        if offset % alignment:
            raise CheckpointError(
                f"{where}: tensor {brief(name)} begins at {offset}, which is not a multiple of the alignment, "
                f"{alignment}"
            )
        table[name] = TensorEntry(spec, offset)
    start = -(-cursor.position // alignment) * alignment
    tensors = {name: TensorEntry(entry.spec, start + entry.offset) for name, entry in table.items()}
    _require_places(where, tensors, cursor.size)
    return Header(version, metadata, tensors, cursor.size)


def layout_header(
    where: str, specs: Mapping[str, TensorSpec], metadata: Mapping[str, Value], alignment: int = ALIGNMENT
) -> tuple[bytes, Header]:
    """The first bytes of a new file, and the positions of its tensors, which keep the order of `specs`.

    Raises:
        CheckpointError: a name is longer than llama.cpp reads, a tensor has more than four axes, or its rows are not
            whole blocks.
    """
    if alignment != ALIGNMENT:
        metadata = {**metadata, ALIGNMENT_KEY: np.uint32(alignment)}
    parts = [MAGIC, _u32(VERSION), _u64(len(specs)), _u64(len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), _encoded(value)]
    offset, offsets = 0, {}
    for name, spec in specs.items():
        tensor = f"{where}: tensor {brief(name)}"
        if len(name.encode()) > LONGEST_NAME:
            raise CheckpointError(f"{tensor} has a name of {len(name.encode())} bytes; llama.cpp reads {LONGEST_NAME}")
        if fault := _fault(spec):
            raise CheckpointError(f"{tensor} {fault}")
        parts += [_string(name), _u32(len(spec.shape)), *map(_u64, reversed(spec.shape)), _u32(spec.type.number)]
        parts.append(_u64(offset))
        offsets[name] = offset
        offset = -(-(offset + spec.nbytes) // alignment) * alignment
    prefix = b"".join(parts)
    prefix += bytes(-len(prefix) % alignment)
    tensors = {name: TensorEntry(spec, len(prefix) + offsets[name]) for name, spec in specs.items()}
    return prefix, Header(VERSION, dict(metadata), tensors, len(prefix) + offset)


def shortest(number: Any) -> Any:
    """A number of numpy as Python's; of a float32 number the shortest decimal that is rounded to it.

    >>> shortest(np.float32(1e-5))
    1e-05
    """
    if isinstance(number, np.float32):
        return float(np.format_float_scientific(number, unique=True))
    return number.item() if isinstance(number, np.generic) else number


def _counts(cursor: Cursor) -> tuple[int, int, int]:
    """Version, number of tensors and number of metadata entries."""
    where = cursor.where
    magic = bytes(cursor.take(4, "the magic number"))
    if magic != MAGIC:
        raise CheckpointError(f"{where}: begins with {brief(magic)}; a GGUF file begins with {MAGIC!r}")
    version = cursor.number("<u4", "the version")
    if version not in READ_VERSIONS:
        remedy = "convert it again with a llama.cpp of today"
        if version and not version % (1 << 16):
            remedy = "its bytes are in big-endian order; turn them around with gguf-convert-endian of the package gguf"
        raise CheckpointError(f"{where}: GGUF version {version}; versions 2 and 3 are read: {remedy}")
    tensor_count, key_count = (
        cursor.number("<u8", f"the number of {what}") for what in ("tensors", "metadata entries")
    )
    for count, what, least, most in (
        (tensor_count, "tensors", _LEAST_TENSOR_BYTES, _MOST_TENSORS),
        (key_count, "metadata entries", _LEAST_KEY_BYTES, _MOST_KEYS),
    ):
        if count * least > cursor.size - cursor.position or count > most:
            raise CheckpointError(
                f"{where}: {count} {what} in a file of {cursor.size} bytes; at most {most} are read, and each takes "
                f"{least} bytes or more: the file is damaged"
            )
    return version, tensor_count, key_count


def _value(cursor: Cursor, key: str) -> Value:
    what = f"the value of {brief(key)}"
    number = cursor.number("<u4", what)
    if number == _STRING:
        return cursor.text(what)
    if number != _ARRAY:
        single = _numbers(cursor, number, 1, what, f"has type {number}, which GGUF does not define")[0]
        return bool(single) if number == _BOOL else single
    number, count = cursor.number("<u4", what), cursor.number("<u8", what)
    if number == _STRING:
        cursor.require(8 * count, what)
        return [cursor.text(what) for _ in range(count)]
    return _numbers(cursor, number, count, what, f"is an array of type {number}, which GGUF does not define or nests")


def _numbers(cursor: Cursor, number: int, count: int, what: str, fault: str) -> np.ndarray:
    """The next numbers or bools of a type. `fault`: what is said of another type."""
    if number not in _SCALARS:
        raise CheckpointError(f"{cursor.where}: {what} {fault}")
    found = cursor.array(_SCALARS[number], count, what)
    if number == _BOOL and (found.view(np.uint8) > 1).any():
        raise CheckpointError(f"{cursor.where}: {what} holds a bool of {found.view(np.uint8).max()}; needs 0 or 1")
    return found


def _alignment(where: str, metadata: Mapping[str, Value]) -> int:
    given = metadata.get(ALIGNMENT_KEY, np.uint32(ALIGNMENT))
    if not isinstance(given, np.uint32) or given == 0 or int(given) & (int(given) - 1):
        raise CheckpointError(f"{where}: {ALIGNMENT_KEY} is {brief(given)}; needs a power of two as uint32")
    return int(given)


def _tensor(cursor: Cursor) -> tuple[str, TensorSpec, int]:
    """Name, spec and offset of the next tensor in the table."""
    name = cursor.text("the name of a tensor", _LONGEST_KEY)
    what = f"tensor {brief(name)}"
    axes = cursor.number("<u4", what)
    if axes > _MOST_AXES:
        raise CheckpointError(f"{cursor.where}: {what} has {axes} axes; ggml has at most {_MOST_AXES}")
    shape = tuple(int(size) for size in reversed(cursor.array(np.dtype("<u8"), axes, what)))
    number = cursor.number("<u4", what)
    if number not in BY_NUMBER:
        raise CheckpointError(
            f"{cursor.where}: {what} has type {number}, whose blocks are not known here; known are {', '.join(TYPES)}"
        )
    spec = TensorSpec(BY_NUMBER[number], shape)
    if fault := _fault(spec):
        raise CheckpointError(f"{cursor.where}: {what} {fault}")
    return name, spec, cursor.number("<u8", what)


def _fault(spec: TensorSpec) -> str | None:
    """The fault of a spec, in words; None if ggml can hold such a tensor."""
    shape, block = spec.shape, spec.type
    if len(shape) > _MOST_AXES:
        return f"has {len(shape)} axes; ggml has at most {_MOST_AXES}"
    if math.prod(size for size in shape if size) > _LARGEST_SIZE // 8:
        return f"has shape {brief(list(shape))}, which no array can have"
    if (shape[-1] if shape else 1) % block.elements:
        return f"has rows of {shape[-1] if shape else 1} elements; {block.name} has blocks of {block.elements}"
    return None


def _require_places(where: str, tensors: Mapping[str, TensorEntry], size: int) -> None:
    """Raises CheckpointError if tensors overlap or lie outside the file."""
    end, before = 0, ""
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].spec.nbytes)):
        if entry.spec.nbytes and entry.offset < end:
            raise CheckpointError(f"{where}: tensors {brief(before)} and {brief(name)} overlap: the file is damaged")
        end, before = max(end, entry.offset + entry.spec.nbytes), name
        if end > size:
            raise CheckpointError(
                f"{where}: the file is truncated: tensor {brief(name)} ends at byte {end}, the file has {size}; copy "
                "or download it again"
            )


def _encoded(value: Value) -> bytes:
    """Type and bytes of a value."""
    if isinstance(value, str):
        return _u32(_STRING) + _string(value)
    if isinstance(value, list):
        return _u32(_ARRAY) + _u32(_STRING) + _u64(len(value)) + b"".join(map(_string, value))
    array = np.asarray(value)
    array = array.astype(array.dtype.newbyteorder("<"))
    number = _NUMBERS.get(array.dtype)
    if number is None or array.ndim > 1:
        raise CheckpointError(
            f"GGUF metadata cannot hold {brief(value)}; needs numbers, text, bool, or a list of one kind"
        )
    return (_u32(_ARRAY) + _u32(number) + _u64(array.size) if array.ndim else _u32(number)) + array.tobytes()


def _u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _string(text: str) -> bytes:
    data = text.encode()
    return _u64(len(data)) + data
