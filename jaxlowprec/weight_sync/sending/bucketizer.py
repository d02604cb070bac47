"""Decides which bundles are sent together, and makes their buckets ahead of the transfer."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxlowprec.checkpoints.files.open_files import memory
from jaxlowprec.weight_sync.bucket import ALIGNMENT, Bucket, BucketHeader, checksum, fill, place
from jaxlowprec.weight_sync.errors import SyncError
from jaxlowprec.weight_sync.sending.source import Bundle, WeightSource

Buffers = Callable[[int, int], list[np.ndarray]]

DEFAULT_BYTES = 512 << 20
"""The default for the most bytes of a bucket."""


class Bucketizer:
    """Puts bundles into buckets, in their order; no bundle is split.

    Arguments:
        max_bytes: the most bytes of a bucket. A larger bundle gets a bucket of its own, as large as the bundle.

    Raises:
        ValueError: max_bytes is not a positive number.

    >>> import numpy as np
    >>> bundles = WeightSource({name: np.zeros(6, np.uint8) for name in "abc"}).bundles
    >>> [[bundle.key for bundle in bucket] for bucket in Bucketizer(max_bytes=24).plan(bundles)]
    [['a', 'b'], ['c']]
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES):
        if type(max_bytes) is not int or max_bytes < 1:
            raise ValueError(f"Bucketizer: max_bytes={max_bytes!r}; needs a positive whole number")
        self.max_bytes = max_bytes

    def plan(self, bundles: Sequence[Bundle]) -> list[list[Bundle]]:
        """The bundles of each bucket; at least one bucket, which may be empty."""
        buckets: list[list[Bundle]] = [[]]
        end = 0
        for bundle in bundles:
            end = _end(bundle, end)
            if buckets[-1] and end > self.max_bytes:
                buckets.append([])
                end = _end(bundle, 0)
            buckets[-1].append(bundle)
        return buckets

    @contextlib.contextmanager
    def buckets(
        self,
        source: WeightSource,
        version: int,
        *,
        as_arrays: bool = False,
        buffers: Buffers | None = None,
        timeout: float = 600.0,
    ) -> Iterator[Iterator[Bucket]]:
        """The buckets of a version, each made while the previous one is used.

        Two payloads exist at a time: a bucket's payload is overwritten once the next bucket was asked for. Within the
        block a thread makes the buckets; it has ended when the block ends.

        Arguments:
            source: the tensors to send.
            version: the version of the weights.
            as_arrays: payloads are arrays on their devices; otherwise bytes.
            buffers: gives memory for payloads; called with the number of buffers and the bytes of each. None: numpy's
                memory.
            timeout: seconds to wait for a bucket.

        Raises:
            SyncError: a bucket took longer, or no thread could be started. Errors while making a bucket are raised
                here.

        >>> import numpy as np
        >>> source = WeightSource({name: np.zeros(6, np.uint8) for name in "abc"})
        >>> with Bucketizer(max_bytes=24).buckets(source, version=1) as buckets:
        ...     print([(bucket.index, bucket.last, bucket.header.nbytes) for bucket in buckets])
        [(0, False, 22), (1, True, 6)]
        """
        plan = self.plan(source.bundles)
        ahead = _Ahead(plan, version, as_arrays, buffers or _numpys)
        try:
            yield ahead.taken(timeout)
        finally:
            ahead.stop(timeout)


class _Ahead:
    """A thread that makes buckets, at most one ahead of the one in use."""

    def __init__(self, plan: list[list[Bundle]], version: int, as_arrays: bool, buffers: Buffers):
        self._plan, self._version = plan, version
        sizes = [_size(bundles) for bundles in plan]
        self._buffers = None if as_arrays else buffers(min(2, len(plan)), max(sizes))
        self._stopped = threading.Event()
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[Bucket | BaseException] = queue.SimpleQueue()
        for _ in range(2):
            self._free.put(None)
        self._thread = threading.Thread(target=self._run, name="weight-sync-buckets", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise SyncError(f"the thread that makes buckets did not start: {error}; let other threads end") from error

    def taken(self, timeout: float) -> Iterator[Bucket]:
        for _ in self._plan:
            try:
                made = self._made.get(timeout=timeout)
            except queue.Empty:
                raise SyncError(f"no bucket was made within {timeout} s; a leaf takes longer to quantise") from None
            if isinstance(made, BaseException):
                raise made
            yield made  # until the next is asked for
            self._free.put(None)

    def stop(self, timeout: float) -> None:
        """Ends the thread after the bucket that it is making."""
        self._stopped.set()
        self._free.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            for index, bundles in enumerate(self._plan):
                self._free.get()
                if self._stopped.is_set():
                    return
                buffer = None if self._buffers is None else self._buffers[index % 2]
                self._made.put(self._bucket(index, bundles, buffer))
        except BaseException as error:
            self._made.put(error)

    def _bucket(self, index: int, bundles: Sequence[Bundle], buffer: np.ndarray | None) -> Bucket:
        placed = place([entry for bundle in bundles for entry in bundle.entries])
        nbytes, last = placed[-1].end if placed else 0, index == len(self._plan) - 1
        if buffer is None:
            arrays = {name: array for bundle in bundles for name, array in bundle.arrays(on_device=True)}
            header = BucketHeader(self._version, index, last, placed, nbytes)
            return Bucket(header, tuple(arrays[one.entry.name] for one in placed))
        payload = buffer[:nbytes]
        fill(placed, (made for bundle in bundles for made in bundle.arrays()), payload)
        return Bucket(BucketHeader(self._version, index, last, placed, nbytes, checksum(payload)), payload)


def _numpys(count: int, nbytes: int) -> list[np.ndarray]:
    return [memory(nbytes) for _ in range(count)]


def _end(bundle: Bundle, begin: int) -> int:
    """The offset at which a bundle ends in a payload, if it follows what ends at `begin`."""
    for entry in bundle.entries:
        begin += -begin % ALIGNMENT + entry.nbytes
    return begin


def _size(bundles: Sequence[Bundle]) -> int:
    end = 0
    for bundle in bundles:
        end = _end(bundle, end)
    return end
