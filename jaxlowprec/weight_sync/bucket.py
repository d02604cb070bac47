"""A bucket: some tensors of a version in one buffer, and a header that shows whether it arrived whole and in order.

The header says where each tensor's bytes are in the payload. Offsets are multiples of 16; gaps hold zeros. The checksum
is XXH3 with 128 bits over the whole payload: it detects damage, and does not authenticate.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import xxhash

from jaxlowprec.checkpoints.errors import brief
from jaxlowprec.checkpoints.files.dtypes import file_dtype, numpy_dtype
from jaxlowprec.checkpoints.files.open_files import memory
from jaxlowprec.checkpoints.files.strict_json import repeated
from jaxlowprec.weight_sync.manifest import MAX_JSON_BYTES, Entry, checked, parse

ALIGNMENT = 16
"""Bytes: offsets of tensors in a payload are multiples of this."""

MAX_VERSION = 2**63 - 1
_CHECKSUM = re.compile(r"[0-9a-f]{32}")
_FIELDS = {"version", "index", "last", "entries", "nbytes", "checksum"}


@dataclasses.dataclass(frozen=True)
class BucketEntry:
    """A tensor, and the offset of its first byte in the payload.

    >>> BucketEntry(Entry("a", "F32", (2,)), 16).end
    24
    """

    entry: Entry
    offset: int

    @property
    def end(self) -> int:
        """The offset after its last byte."""
        return self.offset + self.entry.nbytes


@dataclasses.dataclass(frozen=True)
class BucketHeader:
    """Describes a bucket.

    Attributes:
        version: the version of the weights, from 1.
        index: the bucket's place in its version, from 0.
        last: whether it is the last bucket of its version.
        entries: its tensors, by their offsets.
        nbytes: the bytes of the payload.
        checksum: 32 hexadecimal digits; "" for a payload of arrays, which never leaves the process.

    Raises:
        ValueError: a field is out of its bounds; tensors overlap, are not aligned or end after the payload.

    >>> entries = place([Entry("a", "U8", (3,)), Entry("b", "F32", (2,))])
    >>> header = BucketHeader(1, 0, True, entries, 24, checksum(bytes(24)))
    >>> [placed.offset for placed in header.entries]
    [0, 16]
    >>> BucketHeader.from_json(header.to_json()) == header
    True
    """

    version: int
    index: int
    last: bool
    entries: tuple[BucketEntry, ...]
    nbytes: int
    checksum: str = ""

    def __post_init__(self):
        for name, least in (("version", 1), ("index", 0), ("nbytes", 0)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= MAX_VERSION:
                raise ValueError(f"BucketHeader: {name} is {brief(value)}; needs a whole number from {least}")
        if type(self.last) is not bool:
            raise ValueError(f"BucketHeader: last is {brief(self.last)}; needs true or false")
        if not isinstance(self.checksum, str) or (self.checksum and not _CHECKSUM.fullmatch(self.checksum)):
            raise ValueError(f"BucketHeader: checksum is {brief(self.checksum)}; needs 32 hexadecimal digits")
        end = 0
        for placed in self.entries:
            name, offset = placed.entry.name, placed.offset
            if type(offset) is not int or offset < 0 or offset % ALIGNMENT:
                raise ValueError(
                    f"BucketHeader: {brief(name)} lies at {brief(offset)}; needs a multiple of {ALIGNMENT}"
                )
            if not end <= offset < end + ALIGNMENT:
                where = "within the one before it, which ends" if offset < end else "after a gap that begins"
                raise ValueError(f"BucketHeader: {brief(name)} lies at {brief(offset)}, {where} at {end}")
            end = placed.end
        if self.nbytes != end:
            raise ValueError(f"BucketHeader: the payload has {self.nbytes} bytes; its tensors end at {end}")
        if len({placed.entry.name for placed in self.entries}) < len(self.entries):
            twice = brief(repeated(placed.entry.name for placed in self.entries))
            raise ValueError(f"BucketHeader: a tensor is there twice: {twice}")

    def to_json(self) -> bytes:
        """The header as JSON, for `from_json`."""
        entries = [[p.entry.name, p.entry.dtype, list(p.entry.shape), p.offset] for p in self.entries]
        content = {**{name: getattr(self, name) for name in _FIELDS}, "entries": entries}
        return json.dumps(content, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()

    @classmethod
    def from_json(cls, text: bytes, check: Callable[[], None] | None = None) -> BucketHeader:
        """The header of a bucket whose payload is bytes.

        Arguments:
            text: at most `MAX_JSON_BYTES`.
            check: called from time to time, see `checked`.

        Raises:
            ValueError: the text is not what `to_json` gives, or has no checksum.
        """
        content = parse("BucketHeader.from_json", text, MAX_JSON_BYTES, _FIELDS)
        entries: Any = content.pop("entries")
        if not isinstance(entries, list) or not all(isinstance(e, list) and len(e) == 4 for e in entries):
            raise ValueError("BucketHeader.from_json: entries must be a list of [name, dtype, shape, offset]")
        if not content["checksum"]:
            raise ValueError("BucketHeader.from_json: no checksum")
        one_by_one = checked(entries, check)
        placed = (BucketEntry(Entry(n, d, tuple(s) if isinstance(s, list) else s), at) for n, d, s, at in one_by_one)
        return cls(entries=tuple(placed), **content)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A header and its payload.

    Attributes:
        header: describes the bucket.
        payload: the bytes, uint8 [nbytes]; or, for a transport within the process, the tensors as arrays, in order.

    >>> bucket = pack(1, 0, True, {"a": np.arange(4, dtype=np.float32)})
    >>> bucket.header.nbytes, bucket.index, bucket.last
    (16, 0, True)
    >>> views(bucket.header, bucket.payload)["a"]
    array([0., 1., 2., 3.], dtype=float32)
    """

    header: BucketHeader
    payload: Any

    @property
    def version(self) -> int:
        """The version of the weights."""
        return self.header.version

    @property
    def index(self) -> int:
        """The bucket's place in its version."""
        return self.header.index

    @property
    def last(self) -> bool:
        """Whether it is the last bucket of its version."""
        return self.header.last

    @property
    def entries(self) -> tuple[BucketEntry, ...]:
        """The bucket's tensors and their offsets."""
        return self.header.entries

    @property
    def checksum(self) -> str:
        """The checksum of the payload."""
        return self.header.checksum

    @property
    def holds_arrays(self) -> bool:
        """Whether the payload is arrays, not bytes."""
        return isinstance(self.payload, tuple)


def place(entries: Sequence[Entry]) -> tuple[BucketEntry, ...]:
    """Places tensors one after the other, each aligned.

    >>> place([Entry("a", "U8", (17,)), Entry("b", "U8", (1,))])[1].offset
    32
    """
    placed, end = [], 0
    for entry in entries:
        placed.append(BucketEntry(entry, end + -end % ALIGNMENT))
        end = placed[-1].end
    return tuple(placed)


def checksum(payload: Any) -> str:
    """XXH3 with 128 bits of a buffer, in hexadecimal digits.

    >>> checksum(b"")
    '99aa06d3014798d86001c324468d497f'
    """
    return xxhash.xxh3_128(payload).hexdigest()


def entry_of(name: str, array: Any) -> Entry:
    """Name, dtype and shape of an array. Raises ValueError for a dtype that safetensors files cannot hold.

    >>> entry_of("a", np.zeros((2, 3), np.int32))
    Entry(name='a', dtype='I32', shape=(2, 3), nbytes=24)
    """
    return Entry(name, file_dtype(array.dtype), tuple(int(size) for size in array.shape))


def fill(placed: Sequence[BucketEntry], arrays: Iterable[tuple[str, Any]], payload: np.ndarray) -> None:
    """Writes arrays to their places in a payload, with zeros between them.

    Arguments:
        placed: every tensor of the payload.
        arrays: the same tensors by their names; each is written before the next is asked for.
        payload: uint8 [nbytes].

    Raises:
        ValueError: an array is not as announced, or is missing.

    >>> payload = np.full(17, 9, np.uint8)
    >>> fill(place([Entry("a", "U8", (2,)), Entry("b", "U8", (1,))]), [("a", np.ones(2, np.uint8))], payload)
    Traceback (most recent call last):
    ValueError: fill: 'b' was announced and not made
    """
    missing = {one.entry.name: one for one in placed}
    for before, after in itertools.pairwise(placed):
        payload[before.end : after.offset] = 0
    for name, array in arrays:
        one = missing.pop(name, None)
        given = entry_of(name, array)
        if one is None or given != one.entry:
            raise ValueError(f"fill: {brief(name)} is {given}; announced was {one and one.entry}")
        np.copyto(as_bits(_view(one, payload)), as_bits(np.asarray(array)))
    if missing:
        raise ValueError(f"fill: {brief(next(iter(missing)))} was announced and not made")


def as_bits(array: np.ndarray) -> np.ndarray:
    """A view of an array as unsigned integers; numpy copies dtypes that it does not know element by element.

    >>> as_bits(np.ones(2, numpy_dtype("BF16")))
    array([16256, 16256], dtype=uint16)
    """
    return array if array.dtype.kind in "biufc" else array.view(f"u{array.dtype.itemsize}")


def pack(version: int, index: int, last: bool, arrays: dict[str, np.ndarray]) -> Bucket:
    """A bucket of bytes in a buffer of its own.

    >>> pack(1, 0, True, {"a": np.zeros(3, np.uint8)}).header.nbytes
    3
    """
    placed = place([entry_of(name, array) for name, array in arrays.items()])
    payload = memory(placed[-1].end if placed else 0)
    fill(placed, arrays.items(), payload)
    return Bucket(BucketHeader(version, index, last, placed, payload.nbytes, checksum(payload)), payload)


def views(header: BucketHeader, payload: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of a payload, uint8 [nbytes], as views of it.

    >>> views(pack(1, 0, True, {"a": np.ones(1, np.int16)}).header, np.asarray([1, 0], np.uint8))
    {'a': array([1], dtype=int16)}
    """
    return {placed.entry.name: _view(placed, payload) for placed in header.entries}


def _view(placed: BucketEntry, payload: np.ndarray) -> np.ndarray:
    dtype = numpy_dtype(placed.entry.dtype)
    assert dtype is not None  # Entry refuses dtypes without one
    return payload[placed.offset : placed.end].view(dtype).reshape(placed.entry.shape)
