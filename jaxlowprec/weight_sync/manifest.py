"""What a version of the weights consists of: names, dtypes and shapes in their order, and how weights are quantised."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from jaxlowprec.checkpoints.dtypes import BITS, bits_of, numpy_dtype
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.strict_json import load_json

MAX_JSON_BYTES = 64 << 20
"""Of a manifest: a longer one is a damaged message, or one made to exhaust memory."""

_MAX_RANK = 32
_MAX_BYTES = 2**48
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor.

    Attributes:
        name: not empty.
        dtype: safetensors' name of one that arrays have, such as "BF16" or "I32".
        shape: its sizes.
        nbytes: that its elements take; computed where it is not given.

    Raises:
        ValueError: a name, dtype or shape that no tensor has, or bytes that do not belong to it.

    >>> Entry("norm.weight", "BF16", (8,))
    Entry(name='norm.weight', dtype='BF16', shape=(8,), nbytes=16)
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int = -1

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"Entry: name is {self.name!r}; needs the name of a tensor")
        if not isinstance(self.dtype, str) or self.dtype not in BITS or numpy_dtype(self.dtype) is None:
            raise ValueError(f"Entry: {self.name!r} has dtype {self.dtype!r}; needs a safetensors dtype of whole bytes")
        shape = self.shape
        if not isinstance(shape, tuple) or len(shape) > _MAX_RANK or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"Entry: {self.name!r} has shape {shape!r}; needs a tuple of whole numbers")
        nbytes = bits_of(self.dtype, shape) // 8
        if max(nbytes, *shape, 0) > _MAX_BYTES:
            raise ValueError(f"Entry: {self.name!r} has shape {shape!r}, more than {_MAX_BYTES} bytes")
        if self.nbytes == -1:
            object.__setattr__(self, "nbytes", nbytes)
        elif self.nbytes != nbytes or type(self.nbytes) is not int:
            raise ValueError(f"Entry: {self.name!r} has nbytes={self.nbytes!r}; {self.dtype} {shape} takes {nbytes}")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All tensors of a version, in the order in which they travel.

    Attributes:
        entries: the tensors; no name comes twice.
        scheme: `{"name": ..., **options}` of the quantised ones, as `schemes.by_name` takes them; None: there are none.

    Raises:
        ValueError: a name comes twice, or the scheme has no name.

    >>> manifest = Manifest((Entry("a", "F32", (2,)), Entry("b", "U8", (3,))))
    >>> manifest.nbytes
    11
    >>> Manifest.from_json(manifest.to_json()) == manifest
    True
    >>> manifest.hash[:16]
    '91a93ba0938334c7'
    """

    entries: tuple[Entry, ...]
    scheme: Mapping[str, Any] | None = None

    def __post_init__(self):
        if len(self.by_name) < len(self.entries):
            names = [entry.name for entry in self.entries]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"Manifest: {twice!r} is there twice; each tensor needs a name of its own")
        if self.scheme is not None and not isinstance(self.scheme.get("name"), str):
            raise ValueError(f"Manifest: scheme is {dict(self.scheme)!r}; needs a 'name'")

    def __hash__(self) -> int:
        return hash(self.hash)

    @functools.cached_property
    def by_name(self) -> dict[str, Entry]:
        """The entries by their names."""
        return {entry.name: entry for entry in self.entries}

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(entry.nbytes for entry in self.entries)

    @functools.cached_property
    def hash(self) -> str:
        """SHA-256 of `to_json`, in hexadecimal digits: of what the tensors are, not of the numbers in them."""
        return hashlib.sha256(self.to_json()).hexdigest()

    def to_json(self) -> bytes:
        """The same bytes for equal manifests."""
        content = {
            "format": _FORMAT,
            "entries": [[e.name, e.dtype, list(e.shape)] for e in self.entries],
            "scheme": None if self.scheme is None else dict(self.scheme),
        }
        return json.dumps(content, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """The inverse.

        Raises:
            ValueError: anything else than what `to_json` gives.
        """
        content = parse("Manifest.from_json", text, MAX_JSON_BYTES, {"format", "entries", "scheme"})
        entries, scheme = content["entries"], content["scheme"]
        if content["format"] != _FORMAT:
            raise ValueError(f"Manifest.from_json: format {content['format']!r}; this version reads {_FORMAT}")
        if not isinstance(entries, list) or not all(isinstance(e, list) and len(e) == 3 for e in entries):
            raise ValueError("Manifest.from_json: entries must be a list of [name, dtype, shape]")
        if scheme is not None and not isinstance(scheme, dict):
            raise ValueError(f"Manifest.from_json: scheme is {scheme!r}; needs an object or null")
        return cls(tuple(Entry(n, d, tuple(s) if isinstance(s, list) else s) for n, d, s in entries), scheme)


def parse(who: str, text: bytes, limit: int, fields: set[str]) -> dict[str, Any]:
    """A JSON object of a bounded length with exactly these fields. Raises ValueError for anything else.

    >>> parse("example", b'{"a": 1}', 100, {"a"})
    {'a': 1}
    """
    if len(text) > limit:
        raise ValueError(f"{who}: {len(text)} bytes; at most {limit} are read")
    try:
        content = load_json(who, bytes(text))
    except CheckpointError as error:
        raise ValueError(str(error)) from None
    if not isinstance(content, dict) or set(content) != fields:
        raise ValueError(f"{who}: needs a JSON object with {', '.join(sorted(fields))}")
    return content
