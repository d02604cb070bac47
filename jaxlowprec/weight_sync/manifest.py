"""The manifest of a version: names, dtypes and shapes of its tensors in order, and the schemes of quantised weights."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jaxlowprec.checkpoints.errors import CheckpointError, brief
from jaxlowprec.checkpoints.files.dtypes import BITS, MAX_RANK, numpy_dtype
from jaxlowprec.checkpoints.files.strict_json import load_json, repeated
from jaxlowprec.checkpoints.schemes import by_name
from jaxlowprec.checkpoints.schemes.base import Scheme
from jaxlowprec.checkpoints.schemes.mixed import ConfigGroup, Mixed

T = TypeVar("T")

MAX_JSON_BYTES = 64 << 20
"""The longest manifest: a longer one is damaged, or made to exhaust memory."""

MAX_TENSORS = 1_000_000
"""The most tensors of a version. The largest models of 2026, with a tensor per part of each expert, have a fifth."""

_CHECKED_AT_ONCE = 10_000
_MAX_BYTES = 2**48
_FORMAT = 1
_WIDTH = {name: bits // 8 for name, bits in BITS.items() if numpy_dtype(name) is not None}  # bytes per element


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """Name, dtype and shape of a tensor.

    Attributes:
        name: not empty.
        dtype: safetensors' name of a dtype that arrays can have, such as "BF16" or "I32".
        shape: its sizes, at most `dtypes.MAX_RANK` of them.
        nbytes: the bytes of its elements; computed if not given.

    Raises:
        ValueError: no tensor has such a name, dtype or shape, or the bytes do not fit.

    >>> Entry("norm.weight", "BF16", (8,))
    Entry(name='norm.weight', dtype='BF16', shape=(8,), nbytes=16)
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int = -1

    def __post_init__(self):
        dtype, shape = self.dtype, self.shape
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"Entry: name is {brief(self.name)}; needs the name of a tensor")
        if not isinstance(dtype, str) or dtype not in _WIDTH:
            raise self._wrong(f"dtype {brief(dtype)}; needs a safetensors dtype of whole bytes")
        if not isinstance(shape, tuple):
            raise self._wrong(f"shape {brief(shape)}; needs a tuple of whole numbers")
        if len(shape) > MAX_RANK:
            raise self._wrong(f"{len(shape)} dimensions; needs at most {MAX_RANK}")
        for size in shape:
            if type(size) is not int or size < 0:
                raise self._wrong(f"shape {brief(shape)}; needs a tuple of whole numbers")
        nbytes = _bytes_of(_WIDTH[dtype], shape)
        if nbytes is None:
            raise self._wrong(f"shape {brief(shape)}, more than {_MAX_BYTES} bytes")
        if self.nbytes == -1:
            object.__setattr__(self, "nbytes", nbytes)
        elif self.nbytes != nbytes or type(self.nbytes) is not int:
            raise self._wrong(f"nbytes={brief(self.nbytes)}; {dtype} {brief(shape)} takes {nbytes}")

    def _wrong(self, fault: str) -> ValueError:
        return ValueError(f"Entry: {brief(self.name)} has {fault}")


def _bytes_of(width: int, shape: tuple[int, ...]) -> int | None:
    """Bytes of an array; None if numpy cannot hold so many, where sizes of 0 count as 1, as in numpy."""
    extent = width
    for size in shape:
        extent *= size or 1
        if extent > _MAX_BYTES:
            return None
    return 0 if 0 in shape else extent


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All tensors of a version, in the order in which they are sent.

    Attributes:
        entries: the tensors; names are unique.
        scheme: `{"name": ..., **options}` of quantised tensors, as `scheme_of` takes it; None: there are none.

    Raises:
        ValueError: a name appears twice, or the scheme has no name.

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
        if len(self.entries) > MAX_TENSORS:
            raise ValueError(f"Manifest: {len(self.entries)} tensors; needs at most {MAX_TENSORS}")
        if len(self.by_name) < len(self.entries):
            twice = brief(repeated(entry.name for entry in self.entries))
            raise ValueError(f"Manifest: {twice} is there twice; each tensor needs a name of its own")
        if self.scheme is not None and not isinstance(self.scheme.get("name"), str):
            raise ValueError(f"Manifest: scheme is {brief(dict(self.scheme))}; needs a 'name'")

    def __hash__(self) -> int:
        return hash(self.hash)

    @functools.cached_property
    def by_name(self) -> dict[str, Entry]:
        """The entries, by their names."""
        return {entry.name: entry for entry in self.entries}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries)

    @functools.cached_property
    def hash(self) -> str:
        """SHA-256 of `to_json`, in hexadecimal digits. It covers names, dtypes and shapes, not the numbers."""
        return hashlib.sha256(self.to_json()).hexdigest()

    def to_json(self) -> bytes:
        """The manifest as JSON: the same bytes for equal manifests."""
        content = {
            "format": _FORMAT,
            "entries": [[e.name, e.dtype, list(e.shape)] for e in self.entries],
            "scheme": None if self.scheme is None else dict(self.scheme),
        }
        return json.dumps(content, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()

    @classmethod
    def from_json(cls, text: bytes, check: Callable[[], None] | None = None) -> Manifest:
        """The inverse of `to_json`.

        Arguments:
            text: at most `MAX_JSON_BYTES`.
            check: called from time to time, see `checked`.

        Raises:
            ValueError: the text is not what `to_json` gives.
        """
        content = parse("Manifest.from_json", text, MAX_JSON_BYTES, {"format", "entries", "scheme"})
        entries, scheme = content["entries"], content["scheme"]
        if content["format"] != _FORMAT:
            raise ValueError(f"Manifest.from_json: format {brief(content['format'])}; this version reads {_FORMAT}")
        if not isinstance(entries, list) or not all(isinstance(e, list) and len(e) == 3 for e in entries):
            raise ValueError("Manifest.from_json: entries must be a list of [name, dtype, shape]")
        if len(entries) > MAX_TENSORS:
            raise ValueError(f"Manifest.from_json: {len(entries)} tensors; needs at most {MAX_TENSORS}")
        if scheme is not None and not isinstance(scheme, dict):
            raise ValueError(f"Manifest.from_json: scheme is {brief(scheme)}; needs an object or null")
        made = (Entry(n, d, tuple(s) if isinstance(s, list) else s) for n, d, s in checked(entries, check))
        return cls(tuple(made), scheme)


def checked(items: Sequence[T], check: Callable[[], None] | None) -> Iterator[T]:
    """Yields the same items and calls `check` after every few, for example to see whether the sender is still there.

    >>> list(checked("ab", lambda: print("still there")))
    still there
    ['a', 'b']
    """
    for begin in range(0, len(items), _CHECKED_AT_ONCE):
        if check is not None:
            check()
        yield from items[begin : begin + _CHECKED_AT_ONCE]


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


def described(scheme: Scheme) -> dict[str, Any]:
    """A scheme as JSON: `{"name": ..., **options}`; of a `Mixed` its groups, each with its targets and its scheme.

    >>> from jaxlowprec.checkpoints.schemes import by_name
    >>> described(by_name("w4a16", group_size=32))
    {'name': 'w4a16', 'group_size': 32, 'scale_dtype': 'bfloat16'}
    """
    if not isinstance(scheme, Mixed):
        return {"name": scheme.name, **dataclasses.asdict(scheme)}
    groups = [{"targets": list(group.targets), "scheme": described(group.scheme)} for group in scheme.groups]
    return {"name": scheme.name, "groups": groups}


def scheme_of(described: Mapping[str, Any]) -> Scheme:
    """The inverse of `described`.

    Raises:
        ValueError: it does not describe a scheme.

    >>> scheme_of({"name": "nvfp4"}).name
    'nvfp4'
    """
    if described.get("name") != Mixed.name:
        return _by_name(described)
    groups = described.get("groups")
    if set(described) != {"name", "groups"} or not isinstance(groups, list):
        raise _unknown(described, "needs name and groups, a list")
    return Mixed(tuple(_group(group) for group in groups))


def _group(described: Any) -> ConfigGroup:
    if not isinstance(described, Mapping) or set(described) != {"targets", "scheme"}:
        raise _unknown(described, "needs targets and scheme")
    targets, scheme = described["targets"], described["scheme"]
    if not isinstance(targets, list) or not isinstance(scheme, Mapping):
        raise _unknown(described, "targets must be a list, scheme an object")
    return ConfigGroup(tuple(targets), _by_name(scheme))


def _by_name(described: Mapping[str, Any]) -> Scheme:
    try:
        return by_name(**described)
    except TypeError as error:
        raise _unknown(described, str(error)) from None


def _unknown(described: Any, why: str) -> ValueError:
    given = dict(described) if isinstance(described, Mapping) else described
    return ValueError(f"{brief(given)} does not describe a known scheme: {why}")
