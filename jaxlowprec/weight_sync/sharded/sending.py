"""The trainer's side, called in each of its processes (`jax.distributed`): sends the shards that lie there."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxlowprec.weight_sync.errors import SyncError
from jaxlowprec.weight_sync.sending.bucketizer import DEFAULT_BYTES
from jaxlowprec.weight_sync.sending.session import push
from jaxlowprec.weight_sync.sending.source import WeightSource
from jaxlowprec.weight_sync.sharded.part import part_of, shard_name
from jaxlowprec.weight_sync.transports.transport import Transport
from jaxlowprec.weight_sync.versions import whole_number

_NEXT, _FAILED = -1, -2  # in place of a version: the next one, and none because of an error


def push_shards(
    tree: Any,
    transport: Transport,
    version: int | None = None,
    *,
    max_bytes: int = DEFAULT_BYTES,
    timeout: float = 600.0,
) -> int:
    """Sends a version from all processes of a program. Every process calls it, with the same tree.

    Each process sends the shards of JAX arrays that lie on its devices. What is replicated is sent once. Arrays that
    lie whole in each process, numpy's among them, have to be equal everywhere; process 0 sends them. Tensors have the
    names of the leaves' paths, and the arrays of a QuantizedArray are sent as they are.

    Processes agree, by a collective operation, on the version before they send, and on the outcome afterwards: it
    raises in all of them or in none.

    Arguments:
        tree: as for `WeightSource`; the leaves may be JAX arrays with any sharding over all processes' devices.
        transport: this process's connection to `ShardedReceiver.parts[jax.process_index()]`.
        version: the version's number, the same in each process. None: one more than any part has received.
        max_bytes: the most bytes of a bucket, see `Bucketizer`.
        timeout: seconds that each step may take.

    Returns:
        The version, which is served now.

    Raises:
        SyncError: a process failed (its own error says why), and the receiver serves its old version; see `Transport`.
        ValueError: the versions differ or are no whole numbers.
        Errors of JAX's collectives: a process has died. Whether the receiver serves the new version is unknown then.

    >>> from jaxlowprec.weight_sync.receiving.receiver import Receiver
    >>> from jaxlowprec.weight_sync.sharded.joining import ShardedReceiver
    >>> from jaxlowprec.weight_sync.transports.in_process import InProcess
    >>> receiver = Receiver()
    >>> parts = ShardedReceiver(receiver, processes=1).parts
    >>> push_shards({"a": np.ones(2, np.float32)}, InProcess(parts[0]))
    1
    >>> receiver.weights["a"]
    array([1., 1.], dtype=float32)
    """
    process, processes = jax.process_index(), jax.process_count()
    given, served = _NEXT, _FAILED
    error: Exception | None = None
    try:
        if version is not None:
            given = _whole(version)
        source = WeightSource(tree)
        part = part_of(source.manifest, _own_shards(source, process), process, processes)
        served = transport.version(timeout)
    except Exception as failure:
        error = failure
    agreed = _gathered(given, _FAILED if error is not None else served)
    _raise("prepare", [newest for _, newest in agreed], error)
    if len({wanted for wanted, _ in agreed}) > 1:
        raise ValueError(f"push_shards: the processes give versions {[w for w, _ in agreed]}; give all the same one")
    number = given if version is not None else 1 + max(newest for _, newest in agreed)
    try:
        push(part, transport, number, max_bytes=max_bytes, timeout=timeout)
    except Exception as failure:
        error = failure
    _raise(f"send version {number}", [code for (code,) in _gathered(_FAILED if error is not None else number)], error)
    return number


def _own_shards(source: WeightSource, process: int) -> dict[str, Any]:
    """The shards that this process sends, by their names."""
    shards: dict[str, Any] = {}
    for member in (member for bundle in source.bundles for member in bundle.members):
        leaf = member.leaf
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            own = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
            shards |= {shard_name(member.name, shard.index, leaf.shape): shard.data for shard in own}
        elif process == 0:
            shards[shard_name(member.name, [slice(None)] * len(leaf.shape), leaf.shape)] = leaf
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
