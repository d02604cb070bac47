"""The receiving side: a version is served when the parts of all processes are there and make up whole arrays."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxlowprec.checkpoints.errors import brief
from jaxlowprec.checkpoints.files.dtypes import numpy_dtype
from jaxlowprec.weight_sync.bucket import Bucket, BucketHeader, as_bits, place
from jaxlowprec.weight_sync.errors import Refused
from jaxlowprec.weight_sync.manifest import Entry, Manifest
from jaxlowprec.weight_sync.receiving.receiver import Receiver
from jaxlowprec.weight_sync.receiving.weights import Weights
from jaxlowprec.weight_sync.sending.session import Session
from jaxlowprec.weight_sync.sharded.part import NOTE, Box, Note, read_shard_name
from jaxlowprec.weight_sync.transports.sockets import check_timeout
from jaxlowprec.weight_sync.transports.transport import InProcess

Shards = Mapping[str, dict[Box, Any]]


class ShardedReceiver:
    """Joins the parts that the processes of one trainer send with `push_shards`.

    Each part is received, checked and committed by itself, over a transport of any kind. The last commit of a version
    puts the arrays together and gives them to `receiver`, which is paused only for that. A version of which a part is
    missing, because a process was killed, is never served; the next version of all processes replaces it.

    The parts are held beside the served and the next version until that is complete.

    Arguments:
        receiver: serves the whole arrays. Its `timeout` and callbacks apply when versions are joined; nobody else may
            send to it.
        processes: how many processes the trainer has.
        timeout: seconds that pausing the receiver's engine may take.

    Attributes:
        receiver: as given.
        parts: a Receiver for each process, in order: give each to a transport. It serves nothing: its `version` is the
            last one that was received whole, its `weights` have no arrays once the version is joined.

    Raises:
        ValueError: there are no processes. Refused, by the commit of the last part: the parts do not fit together.

    >>> from jaxlowprec.weight_sync.sending.session import push
    >>> from jaxlowprec.weight_sync.sharded.part import part_of
    >>> joined = ShardedReceiver(Receiver(), processes=2)
    >>> whole = Manifest((Entry("a", "F32", (4,)),))
    >>> shards = {"a[0:2]": np.zeros(2, np.float32)}, {"a[2:4]": np.ones(2, np.float32)}
    >>> push(part_of(whole, shards[0], 0, 2), InProcess(joined.parts[0])), joined.receiver.version
    (1, 0)
    >>> push(part_of(whole, shards[1], 1, 2), InProcess(joined.parts[1])), joined.receiver.version
    (1, 1)
    >>> joined.receiver.weights["a"]
    array([0., 0., 1., 1.], dtype=float32)
    """

    def __init__(self, receiver: Receiver, processes: int, *, timeout: float = 600.0):
        if type(processes) is not int or processes < 1:
            raise ValueError(f"ShardedReceiver: processes={processes!r}; needs the number of the trainer's processes")
        self.receiver, self._timeout = receiver, check_timeout("ShardedReceiver", timeout)
        self.parts: tuple[Receiver, ...] = tuple(_Part(self) for _ in range(processes))
        self._lock = threading.Lock()

    def _join(self, version: int) -> None:
        """Serves a version if all its parts are there and it is not served yet."""
        with self._lock:
            received = [part.weights for part in self.parts]
            if version <= self.receiver.version or any(part.version != version for part in received):
                return
            try:
                manifest, shards = _checked(received)
            except ValueError as error:
                raise Refused(f"commit: the parts of version {version} do not fit together: {error}") from None
            with Session(InProcess(self.receiver), version=version, timeout=self._timeout) as session:
                session.send_buckets(manifest, _buckets(version, manifest, shards))
            for part in self.parts:
                assert isinstance(part, _Part)
                part.release()


class _Part(Receiver):
    """Receives one process's part, and has it joined with the others."""

    def __init__(self, whole: ShardedReceiver):
        super().__init__()
        self._whole = whole

    def commit(self, version: int, manifest_hash: str) -> None:
        super().commit(version, manifest_hash)
        self._whole._join(version)

    def release(self) -> None:
        """Lets go of the shards; the version stays, so that older ones are refused."""
        self._live = Weights({}, self._live.version, self._live.manifest)


def _checked(parts: list[Weights]) -> tuple[Manifest, Shards]:
    """The manifest of the whole version, and the shards of each array. Raises ValueError if any is missing or wrong."""
    notes = [Note.read(part.get(NOTE, ())) for part in parts]
    manifest = notes[0].manifest
    for process, note in enumerate(notes):
        if (note.process, note.processes) != (process, len(parts)):
            raise ValueError(
                f"part {process} of {len(parts)} came from process {note.process} of {note.processes}; connect each "
                "process to parts[jax.process_index()] of a ShardedReceiver for as many processes"
            )
        if note.manifest != manifest:
            raise ValueError(f"processes 0 and {process} send different trees; give the same tree in all")
    shards: dict[str, dict[Box, Any]] = {name: {} for name in manifest.by_name}
    for part in parts:
        for entry in part.manifest.entries:
            if entry.name != NOTE:
                _take(entry, part[entry.name], manifest, shards)
    for name, boxes in shards.items():
        _check_grid(name, manifest.by_name[name].shape, boxes)
    return manifest, shards


def _take(entry: Entry, shard: Any, manifest: Manifest, shards: dict[str, dict[Box, Any]]) -> None:
    name, box = read_shard_name(entry.name)
    whole = manifest.by_name.get(name)
    if whole is None or whole.dtype != entry.dtype or tuple(end - begin for begin, end in box) != entry.shape:
        raise ValueError(f"{brief(entry.name)}, {entry.dtype} {entry.shape}, is no shard of {whole}")
    if box in shards[name]:
        raise ValueError(f"{brief(entry.name)} came from two processes; send from one program of jax.distributed")
    shards[name][box] = shard


def _check_grid(name: str, shape: tuple[int, ...], boxes: Mapping[Box, Any]) -> None:
    """Raises ValueError unless the shards cut the array along each axis, as JAX's shardings do, and none is missing."""
    cells = 1
    for axis, size in enumerate(shape):
        spans = sorted({box[axis] for box in boxes if len(box) == len(shape)})
        ends = [0, *(end for _, end in spans)]
        if [begin for begin, _ in spans] != ends[:-1] or ends[-1] != size:
            raise ValueError(f"the shards of {brief(name)} cover {spans} of axis {axis}; need all {size}. {_REMEDY}")
        cells *= len(spans)
    if len(boxes) != cells:
        raise ValueError(f"{len(boxes)} of {cells} shards of {brief(name)} came. {_REMEDY}")


_REMEDY = "All processes have to hold a part of the array, or each the whole of it"


def _buckets(version: int, manifest: Manifest, shards: Shards) -> Iterator[Bucket]:
    """A bucket for each array, so that one at a time is put together."""
    if not manifest.entries:
        yield Bucket(BucketHeader(version, 0, True, (), 0), ())
    for index, entry in enumerate(manifest.entries):
        placed, last = place([entry]), index == len(manifest.entries) - 1
        header = BucketHeader(version, index, last, placed, placed[0].end)
        yield Bucket(header, (_whole(entry, shards[entry.name]),))


def _whole(entry: Entry, shards: Mapping[Box, Any]) -> Any:
    if len(shards) == 1:
        return np.asarray(next(iter(shards.values())))
    whole = np.empty(entry.shape, numpy_dtype(entry.dtype))
    for box, shard in shards.items():
        as_bits(whole)[tuple(slice(*span) for span in box)] = as_bits(np.asarray(shard))
    return whole
