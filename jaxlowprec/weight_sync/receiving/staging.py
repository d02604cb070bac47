"""The version that is being received: what has arrived, and which bucket comes next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxlowprec.checkpoints.errors import brief
from jaxlowprec.weight_sync.bucket import Bucket, BucketHeader, checksum, entry_of, views
from jaxlowprec.weight_sync.errors import Refused
from jaxlowprec.weight_sync.manifest import Manifest
from jaxlowprec.weight_sync.receiving.weights import Memory


class Staging:
    """Takes the buckets of one version in order. A refused bucket changes nothing.

    A bucket of bytes uses one buffer, and the version's arrays are views of it: nothing is copied again.

    Arguments:
        version, manifest: as announced.
        memory: gives the buffers.

    >>> from jaxlowprec.weight_sync.bucket import pack
    >>> bucket = pack(1, 0, True, {"a": np.arange(3, dtype=np.uint8)})
    >>> staging = Staging(1, Manifest((bucket.entries[0].entry,)))
    >>> staging.destination(bucket.header)[:] = bucket.payload
    >>> staging.received(bucket.header)
    >>> staging.complete()
    >>> staging.buckets
    [{'a': array([0, 1, 2], dtype=uint8)}]
    """

    def __init__(self, version: int, manifest: Manifest, memory: Memory | None = None):
        self.version = version
        self.manifest = manifest
        self._memory = memory or Memory(keep=False)
        self.buckets: list[dict[str, Any]] = []
        self._missing = dict(manifest.by_name)
        self._ended = False
        self._pending: tuple[BucketHeader, np.ndarray] | None = None

    def check(self, header: BucketHeader) -> None:
        """Raises Refused unless the header is that of the next bucket."""
        if header.version != self.version:
            raise Refused(f"bucket {header.index} is of version {header.version}; version {self.version} is received")
        index = len(self.buckets)
        if header.index < index:
            raise Refused(f"bucket {header.index} of version {self.version} is there already; {index} comes next")
        if self._ended:
            raise Refused(f"bucket {header.index} comes after the last of version {self.version}, {index - 1}")
        if header.index > index:
            raise Refused(f"bucket {header.index} of version {self.version} is out of order; {index} comes next")
        for placed in header.entries:
            self._check_entry(placed.entry, header.index)
        if header.last and (late := len(self._missing) - len(header.entries)):
            there = {placed.entry.name for placed in header.entries}
            absent = brief(next(name for name in self._missing if name not in there))
            raise Refused(f"bucket {header.index} is called the last; {late} tensors are missing: {absent}")

    def destination(self, header: BucketHeader) -> memoryview:
        """The memory to which the payload of the next bucket has to be written, [nbytes]; call `received` afterwards.

        A second call for the same bucket, as after a failed transfer, gives the same memory.
        """
        self.check(header)
        if not header.checksum:
            raise Refused(f"bucket {header.index} of version {self.version} has no checksum")
        if self._pending is None or self._pending[0].nbytes != header.nbytes:
            self._pending = None  # frees the other buffer first
            try:
                self._pending = (header, self._memory.take(header.nbytes))
            except (MemoryError, ValueError) as error:  # numpy raises ValueError for more than it can count
                raise Refused(
                    f"bucket {header.index} of version {self.version} has {header.nbytes} bytes: {error}"
                ) from error
        self._pending = (header, self._pending[1])
        return self._pending[1].data

    def received(self, header: BucketHeader, digest: str | None = None) -> None:
        """Says that the payload is in its place.

        Arguments:
            header: the header that `destination` was called with.
            digest: its checksum, if the caller computed it while the bytes came; None: it is computed here.
        """
        if self._pending is None or self._pending[0] != header:
            raise Refused(f"bucket {header.index} of version {header.version} was not announced by its header")
        buffer = self._pending[1]
        found = checksum(buffer) if digest is None else digest
        if found != header.checksum:
            raise Refused(
                f"bucket {header.index} of version {self.version} is corrupt: checksum {found}, not {header.checksum}"
            )
        self._pending = None
        arrays = views(header, buffer)
        for array in arrays.values():
            array.flags.writeable = False
        self._take(header, arrays)

    def take_arrays(self, bucket: Bucket, copy: Callable[[str, Any], Any]) -> None:
        """Takes a bucket of arrays.

        Arguments:
            bucket: the next one.
            copy: copies an array for the receiver; it is also given the array's name.
        """
        self.check(bucket.header)
        if len(bucket.payload) != len(bucket.entries):
            raise Refused(f"bucket {bucket.index} announces {len(bucket.entries)} arrays; it has {len(bucket.payload)}")
        for placed, array in zip(bucket.entries, bucket.payload, strict=True):
            given = entry_of(placed.entry.name, array)
            if given != placed.entry:
                raise Refused(
                    f"bucket {bucket.index} announces {brief(given.name)} as {placed.entry.dtype} "
                    f"{placed.entry.shape}; its array is {given.dtype} {given.shape}"
                )
        named = zip((placed.entry.name for placed in bucket.entries), bucket.payload, strict=True)
        try:
            copies = {name: copy(name, array) for name, array in named}
        except ValueError as error:
            raise Refused(f"bucket {bucket.index} cannot be taken: {error}") from error
        self._take(bucket.header, copies)

    def complete(self) -> None:
        """Raises Refused unless everything arrived."""
        if self._missing or (self.manifest.entries and not self._ended):
            what = (
                f"{len(self._missing)} tensors: {brief(next(iter(self._missing)))}"
                if self._missing
                else "the last bucket"
            )
            raise Refused(f"version {self.version} is incomplete; it lacks {what}")

    def _take(self, header: BucketHeader, arrays: dict[str, Any]) -> None:
        for name in arrays:
            del self._missing[name]
        self.buckets.append(arrays)
        self._ended = header.last

    def _check_entry(self, entry: Any, index: int) -> None:
        announced = self.manifest.by_name.get(entry.name)
        if announced is None:
            raise Refused(f"bucket {index} holds {brief(entry.name)}, which the manifest does not name")
        if entry.name not in self._missing:
            raise Refused(f"bucket {index} holds {brief(entry.name)}, which came before")
        if announced != entry:
            raise Refused(
                f"bucket {index} holds {brief(entry.name)} as {entry.dtype} {brief(entry.shape)}; "
                f"the manifest says {announced.dtype} {brief(announced.shape)}"
            )
