"""Weights through Ray's object store: one put of each bucket for any number of receivers.

An actor gets a reference to a bucket and reads the memory of its node's store, without a copy. The bytes are copied
once, to the arrays that the actor serves them from. Other nodes than the trainer's fetch a bucket once each.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from jaxlowprec.weight_sync import Bucketizer, Manifest, PeerLost, PeerTimeout, Receiver, Refused, Weights, WeightSource
from jaxlowprec.weight_sync.bucket import Bucket
from jaxlowprec.weight_sync.receiving.weights import NOTHING

MAX_BYTES = 8 << 10
"""The most bytes of a bucket: so few that this small policy needs several."""


@dataclasses.dataclass(frozen=True)
class Published:
    """A version in the object store, which holds it as long as this object lives.

    Attributes:
        version, manifest: as sessions announce them.
        buckets: their payloads are references to bytes, uint8 [nbytes].
    """

    version: int
    manifest: Manifest
    buckets: tuple[Bucket, ...]


def publish(source: WeightSource, version: int, max_bytes: int = MAX_BYTES) -> Published:
    """Puts a version into the object store, one object per bucket."""
    with Bucketizer(max_bytes).buckets(source, version) as buckets:
        put = tuple(Bucket(bucket.header, ray.put(bucket.payload)) for bucket in buckets)
    return Published(version, source.manifest, put)


def answer_of(reference: ray.ObjectRef, timeout: float) -> Any:
    """What a call of an actor returns.

    Raises:
        PeerTimeout: no answer within `timeout` seconds. PeerLost: the actor has died, and Ray restarts it.
        RayActorError: its constructor failed, and Ray does not restart it. The errors of the call itself.
    """
    try:
        return ray.get(reference, timeout=timeout)
    except GetTimeoutError:
        raise PeerTimeout(f"the actor did not answer for {timeout:g} s") from None
    except RayTaskError as error:
        raise error.cause from error
    except RayError as error:
        if isinstance(error, RayActorError) and error.actor_init_failed:
            raise
        raise PeerLost(f"the actor is gone: {str(error).partition(chr(10))[0]}") from error


class ObjectStoreTransport:
    """A trainer's transport to an actor that holds an `Inbox`. See `jaxlowprec.weight_sync.Transport`.

    After an error it carries nothing until the next `pause`, as if a connection had ended.

    Arguments:
        actor: its method `sync(trainer, verb, *arguments)` calls `Inbox.carry_out`.
        trainer: a name that no other trainer ever has, and no earlier life of this one.
    """

    takes_arrays = False

    def __init__(self, actor: Any, trainer: str):
        self._actor, self._trainer = actor, trainer
        self._lost: PeerLost | None = None

    def version(self, timeout: float) -> int:
        """See `Transport`."""
        return self._call(timeout, "version")

    def pause(self, timeout: float) -> None:
        """See `Transport`."""
        self._lost = None
        self._call(timeout, "pause", timeout)

    def begin(self, version: int, manifest: Manifest, timeout: float) -> None:
        """See `Transport`."""
        self._call(timeout, "begin", version, manifest)

    def send(self, bucket: Bucket, timeout: float) -> None:
        """See `Transport`. A payload that is no reference yet is put into the store for this receiver alone."""
        payload = bucket.payload if isinstance(bucket.payload, ray.ObjectRef) else ray.put(bucket.payload)
        self._call(timeout, "send", bucket.header, payload)

    def commit(self, version: int, manifest_hash: str, timeout: float) -> None:
        """See `Transport`."""
        self._call(timeout, "commit", version, manifest_hash)

    def abort(self, reason: str, timeout: float) -> None:
        """See `Transport`."""
        self._call(timeout, "abort", reason)

    def resume(self, timeout: float) -> None:
        """See `Transport`."""
        self._call(timeout, "resume")

    def close(self) -> None:
        """See `Transport`."""

    def _call(self, timeout: float, verb: str, *arguments: Any) -> Any:
        if self._lost is not None:
            raise PeerLost(f"{verb}: not sent, because an earlier call failed: {self._lost}")
        try:
            return answer_of(self._actor.sync.remote(self._trainer, verb, *arguments), timeout)
        except PeerLost as error:
            self._lost = type(error)(f"{verb}: {error}")
            raise self._lost from error


class Inbox:
    """The receiver's side, within an actor: carries out the verbs of one trainer at a time.

    A session has no connection whose end would say that the trainer is dead. The next `pause` says it: it drops what
    an earlier session has sent without a commit. If another trainer pauses, the earlier trainer is refused from then
    on. The new trainer's versions may be older, if it continues from a checkpoint. The inbox serves the complete
    version that it has until the new trainer has committed one.

    >>> import numpy as np
    >>> from jaxlowprec.weight_sync.bucket import pack
    >>> bucket = pack(1, 0, True, {"a": np.ones(2, np.float32)})
    >>> inbox, manifest = Inbox(), Manifest((bucket.entries[0].entry,))
    >>> for trainer in ("first", "second"):
    ...     inbox.carry_out(trainer, "pause", 1.0)
    ...     inbox.carry_out(trainer, "begin", 1, manifest)
    >>> inbox.carry_out("first", "send", bucket.header, bucket.payload)
    Traceback (most recent call last):
    jaxlowprec.weight_sync.errors.Refused: send: trainer 'second' has the session, not 'first'; pause first
    >>> inbox.carry_out("second", "send", bucket.header, bucket.payload)
    >>> inbox.carry_out("second", "commit", 1, manifest.hash)
    >>> inbox.weights["a"]
    array([1., 1.], dtype=float32)
    """

    def __init__(self) -> None:
        self._trainer: str | None = None
        self._receiver = Receiver()
        self._weights: Weights = NOTHING

    @property
    def weights(self) -> Weights:
        """The newest complete version, of any trainer."""
        return self._weights

    @property
    def state(self) -> str:
        """The state of the session: see `Receiver.state`."""
        return self._receiver.state

    def carry_out(self, trainer: str, verb: str, *arguments: Any) -> Any:
        """Carries out a verb of `Transport`, with its arguments. Raises Refused, as a receiver does."""
        if verb == "version":
            return self._receiver.version if trainer == self._trainer else 0
        if verb == "pause" and trainer == self._trainer:
            self._receiver.resume()
        elif verb == "pause":
            self._trainer, self._receiver = trainer, Receiver()
        elif trainer != self._trainer:
            raise Refused(f"{verb}: trainer {self._trainer!r} has the session, not {trainer!r}; pause first")
        if verb == "send":
            self._receiver.receive(Bucket(*arguments))
            return None
        getattr(self._receiver, verb)(*arguments)
        if verb == "commit":
            self._weights = self._receiver.weights
        return None
