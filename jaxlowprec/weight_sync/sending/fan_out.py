"""One version to many receivers: quantised and put into buckets once, and sent to all of them at the same time."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from jaxlowprec.weight_sync.bucket import Bucket
from jaxlowprec.weight_sync.errors import Aborted, PeerTimeout, Refused, SyncError
from jaxlowprec.weight_sync.manifest import Manifest
from jaxlowprec.weight_sync.sending.bucketizer import DEFAULT_BYTES, Bucketizer
from jaxlowprec.weight_sync.sending.session import Session
from jaxlowprec.weight_sync.sending.source import WeightSource
from jaxlowprec.weight_sync.transports.sockets import check_timeout
from jaxlowprec.weight_sync.transports.transport import Closing, Transport, require_transport
from jaxlowprec.weight_sync.versions import whole_number

_GRACE = 0.5  # seconds in which a transport whose time is over may raise its own error, which says more
_CLEANING = 1.0  # seconds for abort and for resume if a receiver's time is over


@dataclasses.dataclass(frozen=True)
class Delivery:
    """The receivers that have a version, and those that failed.

    Attributes:
        version: the version.
        served: the names of the receivers that serve it.
        failed: the errors of the others. After PeerLost in a commit a receiver may serve it nevertheless.

    >>> Delivery(3, ("engine 0",), {"engine 1": PeerTimeout("no answer")}).served
    ('engine 0',)
    """

    version: int
    served: tuple[str, ...]
    failed: dict[str, Exception]


class FanOut(Closing):
    """Sends versions to many receivers over any transports.

    Each receiver has a time of its own for each version. One that is slow is waited for until its time is over, all
    steps together, and then given up for good: the others wait for it once, for at most that long. A receiver that
    went away or was silent is dropped; `add` it again when it is back, with a new transport. One that refused stays.
    Receivers commit and resume one by one, each as soon as it has everything.

    If all transports take arrays, arrays are sent; otherwise bytes, to all.

    Arguments:
        transports: maps names to transports. The caller closes them.
        max_bytes: the most bytes of a bucket, see `Bucketizer`. The trainer holds two, for all receivers together.
        timeout: seconds that a receiver has for a version, unless `add` says otherwise. It has to be less than the
            silence that the other receivers allow (their `timeout`), because they wait meanwhile.
        bucket_timeout: seconds that the making of a bucket may take.

    >>> import numpy as np
    >>> from jaxlowprec.weight_sync.transports.transport import InProcess
    >>> from jaxlowprec.weight_sync.receiving.receiver import Receiver
    >>> receivers = {"engine 0": Receiver(), "engine 1": Receiver()}
    >>> fan_out = FanOut({name: InProcess(receiver) for name, receiver in receivers.items()})
    >>> fan_out.push(WeightSource({"a": np.ones(2, np.float32)})).served
    ('engine 0', 'engine 1')
    >>> receivers["engine 1"].weights["a"]
    array([1., 1.], dtype=float32)
    """

    def __init__(
        self,
        transports: Mapping[str, Transport] | None = None,
        *,
        max_bytes: int = DEFAULT_BYTES,
        timeout: float = 30.0,
        bucket_timeout: float = 600.0,
    ):
        self._bucketizer = Bucketizer(max_bytes)
        self._timeout = check_timeout("FanOut", timeout)
        self._bucket_timeout = check_timeout("FanOut", bucket_timeout)
        self._receivers: dict[str, tuple[Transport, float]] = {}
        self._version = 0
        for name, transport in (transports or {}).items():
            self.add(name, transport)

    @property
    def receivers(self) -> tuple[str, ...]:
        """The names of the receivers that get the next version."""
        return tuple(self._receivers)

    def add(self, name: str, transport: Transport, timeout: float | None = None) -> None:
        """Adds a receiver, which gets the next version.

        Arguments:
            name: its name in results.
            transport: the connection to it, which nobody else uses.
            timeout: seconds that it has for a version; None: the fan-out's.

        Raises:
            TypeError: it is no `Transport`.
            ValueError: a receiver has the name or the transport already, or the timeout never ends.
        """
        if name in self._receivers:
            raise ValueError(f"FanOut.add: a receiver is named {name!r} already; remove it, or give another name")
        require_transport(f"FanOut.add: {name!r}", transport)
        if any(transport is other for other, _ in self._receivers.values()):
            raise ValueError(f"FanOut.add: {name!r} has the transport of another receiver; make one for each")
        seconds = self._timeout if timeout is None else check_timeout("FanOut.add", timeout)
        self._receivers[name] = (transport, seconds)

    def remove(self, name: str) -> None:
        """Removes a receiver, which keeps the version that it serves. Raises KeyError if there is none of this name."""
        del self._receivers[name]

    def push(self, source: WeightSource, version: int | None = None) -> Delivery:
        """Sends a version to all receivers.

        Arguments:
            source: the tensors.
            version: the version's number, higher than what the receivers serve. None: one more than any of them serves.

        Returns:
            Which receivers serve the version, and why the others do not.

        Raises:
            ValueError: there are no receivers, or the version is not a whole number. SyncError: no receiver got it.
            Errors while the buckets are made: no receiver serves the version then.
        """
        if not isinstance(source, WeightSource):
            raise TypeError(f"FanOut.push: source is a {type(source).__name__}; needs a WeightSource of it")
        if not self._receivers:
            raise ValueError("FanOut.push: no receivers are left; add one")
        number = None if version is None else whole_number(version)
        if version is not None and number is None:
            raise ValueError(f"FanOut.push: version is {version!r}; needs a whole number, or None for one more")
        with self.begin() as pushing:
            delivery = pushing.push(source, pushing.newest + 1 if number is None else number)
        return served_by_any("FanOut.push", delivery)

    @contextlib.contextmanager
    def begin(self) -> Iterator[VersionPush]:
        """Reaches all receivers, for callers that choose the version's number by what these serve.

        Receivers that failed for another reason than a refusal are dropped at the end of the block.
        """
        workers = {name: _Worker(name, *receiver) for name, receiver in self._receivers.items()}
        arrays = all(transport.takes_arrays for transport, _ in self._receivers.values())
        pushing = VersionPush(workers, self._version, self._bucketizer, arrays, self._bucket_timeout)
        try:
            yield pushing
            pushing.end("nothing was sent")
        except BaseException as failure:
            pushing.end(f"{type(failure).__name__}: {failure}")
            raise
        finally:
            self._version = max(self._version, pushing.version)
            for name, error in pushing.failed.items():
                if not isinstance(error, Refused):
                    self._receivers.pop(name, None)


def served_by_any(who: str, delivery: Delivery) -> Delivery:
    """A delivery that reached somebody. Raises SyncError, with all reasons, for one that reached nobody."""
    if not delivery.served:
        reasons = "; ".join(f"{name}: {error}" for name, error in delivery.failed.items())
        raise SyncError(f"{who}: no receiver got version {delivery.version}: {reasons}")
    return delivery


class VersionPush:
    """A push in progress, see `FanOut.begin`.

    Attributes:
        newest: the newest version that any receiver serves or that was sent before.
        version: what was sent; 0: nothing yet.
        failed: the errors of the receivers that failed. Others may be added.
    """

    def __init__(
        self, workers: dict[str, _Worker], newest: int, bucketizer: Bucketizer, arrays: bool, bucket_timeout: float
    ):
        self.failed: dict[str, Exception] = {}
        self.version = 0
        self._bucketizer, self._arrays, self._bucket_timeout = bucketizer, arrays, bucket_timeout
        self._live = self._reached(workers)
        self.newest = max([newest, *(worker.served for worker in self._live.values())])

    def push(self, source: WeightSource, version: int) -> Delivery:
        """Sends a version to all receivers that were reached. Errors while the buckets are made: see `FanOut.push`."""
        self.version = version
        for worker in self._live.values():
            worker.give((version, source.manifest))
        options: Any = {"as_arrays": self._arrays, "timeout": self._bucket_timeout}
        if self._live:
            with self._bucketizer.buckets(source, version, **options) as buckets:
                for bucket in buckets:
                    for worker in self._live.values():
                        worker.give(bucket)
                    self._live = self._reached(self._live)
                    if not self._live:
                        break
        served, self._live = self._reached(self._live), {}
        return Delivery(version, tuple(served), self.failed)

    def end(self, reason: str) -> None:
        """Aborts what is not sent whole; the receivers keep their version."""
        for worker in self._live.values():
            worker.give(Aborted(reason))
        for worker in self._live.values():
            worker.wait()
        self._live = {}

    def _reached(self, workers: dict[str, _Worker]) -> dict[str, _Worker]:
        """Waits until each has taken its step or failed; those that have not failed."""
        for name, worker in workers.items():
            error = worker.wait()
            if error is not None:
                self.failed[name] = error
        return {name: worker for name, worker in workers.items() if name not in self.failed}


class _Worker:
    """A thread that takes one receiver through a version: its steps come from `give`, and `wait` waits for each."""

    def __init__(self, name: str, transport: Transport, seconds: float):
        self.served = 0
        self._name, self._limited = name, _Limited(transport, seconds)
        self._error: Exception | None = None
        self._steps: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        try:
            threading.Thread(target=self._run, name=f"weight sync to {name}", daemon=True).start()
        except RuntimeError as error:
            self._error = SyncError(f"{name}: its thread did not start: {error}; let other threads end")
            self._done.put(None)

    def give(self, step: tuple[int, Manifest] | Bucket | Exception) -> None:
        """The version and manifest, a bucket, or the error that ends it."""
        self._steps.put(step)

    def wait(self) -> Exception | None:
        """The error, if the receiver has failed or its time is over."""
        while True:
            try:
                self._done.get(timeout=max(self._limited.left(), 0.0) + _GRACE)
                return self._error
            except queue.Empty:
                if self._limited.left() <= 0:
                    self._limited.given_up = True  # its thread sends and commits nothing any more
                    error = self._limited.over()
                    self.give(Aborted(str(error)))
                    return error

    def _run(self) -> None:
        try:
            self.served = self._limited.version(0.0)
            self._done.put(None)
            version, manifest = self._next()
            with Session(self._limited, version=version) as session:
                session.send_buckets(manifest, self._buckets())
        except Exception as error:
            self._error = error
        self._done.put(None)

    def _buckets(self) -> Iterator[Bucket]:
        last = False
        while not last:
            bucket = self._next()
            yield bucket
            last = bucket.last
            self._done.put(None)

    def _next(self) -> Any:
        step = self._steps.get()
        if isinstance(step, Exception):
            raise step
        return step


class _Limited:
    """A transport with so many seconds for all verbs of a version, whatever timeouts it is called with."""

    def __init__(self, transport: Transport, seconds: float):
        self.takes_arrays = transport.takes_arrays
        self.given_up = False
        self._transport, self._seconds, self._left = transport, seconds, seconds
        self._since: float | None = None  # when the verb in progress began

    def left(self) -> float:
        """Seconds left, 0 or less if the time is over."""
        since = self._since
        return self._left - (0.0 if since is None else time.monotonic() - since)

    def over(self) -> PeerTimeout:
        """The error of a receiver whose time is over."""
        return PeerTimeout(f"the receiver took more than the {self._seconds:g} s that it has for a version")

    def version(self, timeout: float) -> int:
        return self._call("version")

    def pause(self, timeout: float) -> None:
        self._call("pause")

    def begin(self, version: int, manifest: Manifest, timeout: float) -> None:
        self._call("begin", version, manifest)

    def send(self, bucket: Bucket, timeout: float) -> None:
        self._call("send", bucket)

    def commit(self, version: int, manifest_hash: str, timeout: float) -> None:
        self._call("commit", version, manifest_hash)

    def abort(self, reason: str, timeout: float) -> None:
        self._call("abort", reason, least=_CLEANING)

    def resume(self, timeout: float) -> None:
        self._call("resume", least=_CLEANING)

    def close(self) -> None:
        """Does nothing: the transport is the caller's."""

    def _call(self, verb: str, *arguments: object, least: float = 0.0) -> Any:
        seconds = max(self._left, least)
        if seconds <= 0 or (self.given_up and not least):
            raise self.over()
        self._since = time.monotonic()
        try:
            return getattr(self._transport, verb)(*arguments, seconds)
        finally:
            self._left, self._since = self.left(), None
