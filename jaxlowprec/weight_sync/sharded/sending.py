"""The trainer's side, called in each of its processes (`jax.distributed`): sends the shards that lie there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, overload

import jax
import numpy as np

from jaxlowprec.weight_sync.errors import Refused, SyncError
from jaxlowprec.weight_sync.sending.bucketizer import DEFAULT_BYTES
from jaxlowprec.weight_sync.sending.fan_out import Delivery, FanOut, VersionPush, served_by_any
from jaxlowprec.weight_sync.sending.session import push
from jaxlowprec.weight_sync.sending.source import WeightSource
from jaxlowprec.weight_sync.sharded.part import part_of, shard_name
from jaxlowprec.weight_sync.transports.transport import Transport
from jaxlowprec.weight_sync.versions import whole_number

_NEXT, _REFUSED, _FAILED = -1, -2, -3  # in place of a version: the next one, and none because of an error


@overload
def push_shards(
    tree: Any, transport: Transport, *, version: int | None = None, max_bytes: int = ..., timeout: float = ...
) -> int: ...
@overload
def push_shards(
    tree: Any, transport: FanOut, *, version: int | None = None, max_bytes: int = ..., timeout: float = ...
) -> Delivery: ...
def push_shards(
    tree: Any,
    transport: Transport | FanOut,
    *,
    version: int | None = None,
    max_bytes: int = DEFAULT_BYTES,
    timeout: float = 600.0,
) -> int | Delivery:
    """Sends a version from all processes of a program. Every process calls it, with the same tree.

    Each process sends the shards of JAX arrays that lie on its devices. What is replicated is sent once. Arrays that
    lie whole in each process, numpy's among them, have to be equal everywhere; process 0 sends them. Tensors have the
    names of the leaves' paths, and the arrays of a QuantizedArray are sent as they are.

    Processes agree, by a collective operation, on the version before they send, and on the outcome afterwards: it
    raises in all of them or in none.

    With a `FanOut` each process sends its part to many receivers, which have the same names in all processes. A
    receiver serves the version if it gets the parts of all processes. One that any process has lost is dropped in all
    of them, and keeps the others back for its time at most.

    Arguments:
        tree: as for `WeightSource`; the leaves may be JAX arrays with any sharding over all processes' devices.
        transport: this process's connection to `ShardedReceiver.parts[jax.process_index()]`, or a FanOut of such
            connections.
        version: the version's number, the same in each process. None: one more than any part has received.
        max_bytes, timeout: the most bytes of a bucket, see `Bucketizer`, and the seconds that each step may take. A
            FanOut has its own.

    Returns:
        The version, which is served now. Of a FanOut: which receivers serve it, and why the others do not; the same
        names in each process.

    Raises:
        SyncError: a process failed (its own error says why), and the receiver serves its old version; see `Transport`.
            Of a FanOut: no receiver got the version, or processes have receivers of other names.
        ValueError: the versions differ or are no whole numbers.
        Errors of JAX's collectives: a process has died. Whether the receiver serves the new version is unknown then.

    >>> from jaxlowprec.weight_sync.receiving.receiver import Receiver
    >>> from jaxlowprec.weight_sync.sharded.joining import ShardedReceiver
    >>> from jaxlowprec.weight_sync.transports.transport import InProcess
    >>> receiver = Receiver()
    >>> parts = ShardedReceiver(receiver, processes=1).parts
    >>> push_shards({"a": np.ones(2, np.float32)}, InProcess(parts[0]))
    1
    >>> receiver.weights["a"]
    array([1., 1.], dtype=float32)
    >>> push_shards({"a": np.zeros(2, np.float32)}, FanOut({"engine 0": InProcess(parts[0])})).served
    ('engine 0',)
    """
    part, given, error = None, _NEXT, None
    try:
        given = _NEXT if version is None else _whole(version)
        part = _part(tree)
    except Exception as failure:
        error = failure
    if isinstance(transport, FanOut):
        with transport.begin() as pushing:
            number = _agreed(given, pushing.newest, error)
            assert part is not None
            return _to_all(part, number, sorted(transport.receivers), pushing)
    newest = _FAILED
    try:
        newest = transport.version(timeout)
    except Exception as failure:
        error = error or failure
    number = _agreed(given, newest, error)
    assert part is not None
    try:
        push(part, transport, version=number, max_bytes=max_bytes, timeout=timeout)
    except Exception as failure:
        error = failure
    _raise(f"send version {number}", [code for (code,) in _gathered(_FAILED if error is not None else number)], error)
    return number


def _agreed(given: int, newest: int, error: Exception | None) -> int:
    """The number of the version, of which all processes have a part. Raises in all of them if there is none."""
    all_given = _gathered(given, _FAILED if error is not None else newest)
    _raise("prepare", [number for _, number in all_given], error)
    if len({wanted for wanted, _ in all_given}) > 1:
        raise ValueError(f"push_shards: the processes give versions {[w for w, _ in all_given]}; give all the same one")
    return given if given != _NEXT else 1 + max(number for _, number in all_given)


def _to_all(part: WeightSource, version: int, names: list[str], pushing: VersionPush) -> Delivery:
    """Sends this process's part to the receivers of these names. Their failures are those in all processes."""
    digest = int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:7], "little")
    if len({digests for (digests,) in _gathered(digest)}) > 1:
        raise SyncError(
            f"push_shards: this process sends to {', '.join(names) or 'nobody'}, and another process to others; make a "
            "FanOut of the same names in all processes"
        )
    if not names:
        raise ValueError("push_shards: no receivers are left; add one to the FanOut of each process")
    error: Exception | None = None
    try:
        pushing.push(part, version)
    except Exception as failure:
        error = failure
    own = [_FAILED if error is not None else _code(pushing.failed.get(name), version) for name in names]
    found = _gathered(*own)
    if error is not None:
        raise error
    for name, codes in zip(names, zip(*found, strict=True), strict=True):
        if (of_all := _of_all(pushing.failed.get(name), codes)) is not None:
            pushing.failed[name] = of_all
    served = tuple(name for name in names if name not in pushing.failed)
    return served_by_any("push_shards", Delivery(version, served, pushing.failed))


def _code(error: Exception | None, version: int) -> int:
    """The code by which other processes learn the state of a receiver."""
    return version if error is None else _REFUSED if isinstance(error, Refused) else _FAILED


def _of_all(own: Exception | None, codes: Sequence[int]) -> Exception | None:
    """A receiver's error here, or the worst of all processes: they all drop it, or none does."""
    worst = min(codes)
    if worst >= 0 or (own is not None and _code(own, 0) == worst):
        return own
    theirs = f"process {codes.index(worst)} of {len(codes)} could not send its part; its own error says why"
    return (Refused if worst == _REFUSED else SyncError)(theirs if own is None else f"{own}; and {theirs}")


def _part(tree: Any) -> WeightSource:
    """The shards of a tree that this process sends."""
    source = WeightSource(tree)
    process = jax.process_index()
    return part_of(source.manifest, _own_shards(source, process), process, jax.process_count())


def _own_shards(source: WeightSource, process: int) -> dict[str, Any]:
    """The shards that this process sends, by their names."""
    shards: dict[str, Any] = {}
    for member in (member for bundle in source.bundles for member in bundle.members):
        leaf = member.leaf
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and leaf.size:
            own = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
            shards |= {shard_name(member.name, shard.index, leaf.shape): shard.data for shard in own}
        elif process == 0:
            # The shards of an array without elements are all the same.
            whole = leaf if leaf.size else np.empty(leaf.shape, leaf.dtype)
            shards[shard_name(member.name, [slice(None)] * len(leaf.shape), leaf.shape)] = whole
    return shards


def _whole(version: object) -> int:
    number = whole_number(version)
    if number is None or number < 0:
        raise ValueError(f"push_shards: version is {version!r}; needs a whole number, or None for one more")
    return number


def _gathered(*numbers: int) -> list[tuple[int, ...]]:
    """The numbers of all processes, in their order. As bytes: JAX has no 64-bit integers by default."""
    own = np.asarray(numbers, np.int64)
    if jax.process_count() == 1:
        return [numbers]
    from jax.experimental import multihost_utils  # loaded when it is used: few programs need it

    gathered = np.ascontiguousarray(multihost_utils.process_allgather(own.view(np.uint8)), np.uint8)
    return [tuple(map(int, row)) for row in gathered.view(np.int64).reshape(-1, len(numbers))]


def _raise(what: str, numbers: list[int], error: Exception | None) -> None:
    """Raises a process's own error, and where it has none, a SyncError that names the processes that failed."""
    if error is not None:
        raise error
    failed = [process for process, number in enumerate(numbers) if number == _FAILED]
    if failed:
        raise SyncError(
            f"push_shards: process {failed[0]} of {len(numbers)} could not {what}"
            f"{f', and {len(failed) - 1} others' if failed[1:] else ''}; its own error says why. The receiver serves "
            "its old version"
        )
