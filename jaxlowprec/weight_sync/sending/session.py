"""A sync from its first verb to its last, with all errors handled."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

from jaxlowprec.weight_sync.bucket import Bucket
from jaxlowprec.weight_sync.errors import Aborted, Refused, SyncError
from jaxlowprec.weight_sync.manifest import Manifest
from jaxlowprec.weight_sync.sending.bucketizer import DEFAULT_BYTES, Bucketizer
from jaxlowprec.weight_sync.sending.source import WeightSource
from jaxlowprec.weight_sync.transports.sockets import check_timeout
from jaxlowprec.weight_sync.transports.transport import Transport, require_transport
from jaxlowprec.weight_sync.versions import whole_number


class Session:
    """A session with a receiver: pause, begin, buckets, commit, resume.

    Use it as a context manager. At the end of the block, what `send` sent is committed; an exception aborts, so that
    the receiver keeps the old version. In both cases the engine is resumed, even if the commit or the abort failed.

    Arguments:
        transport: the connection to the receiver.
        version: the number of the version; higher than the one the receiver serves. None: the next number.
        max_bytes: the most bytes of a bucket, see `Bucketizer`. The trainer holds two.
        timeout: seconds that each step may take.

    Raises:
        SyncError: see `Transport`. A `Refused` pause does not disturb the session that the receiver is in.

    >>> import numpy as np
    >>> from jaxlowprec.weight_sync.transports.transport import InProcess
    >>> from jaxlowprec.weight_sync.receiving.receiver import Receiver
    >>> receiver = Receiver()
    >>> with Session(InProcess(receiver)) as session:
    ...     session.send(WeightSource({"a": np.ones(2, np.float32)}))
    >>> receiver.version, receiver.state, receiver.weights["a"]
    (1, 'serving', array([1., 1.], dtype=float32))
    """

    def __init__(
        self,
        transport: Transport,
        *,
        version: int | None = None,
        max_bytes: int = DEFAULT_BYTES,
        timeout: float = 600.0,
    ):
        self._transport, self._timeout = require_transport("Session", transport), check_timeout("Session", timeout)
        self._bucketizer = Bucketizer(max_bytes)
        self._manifest_hash: str | None = None
        self.version = None if version is None else whole_number(version)
        if version is not None and self.version is None:
            raise ValueError(f"Session: version is {version!r}; needs a whole number, or None for one more")

    def __enter__(self) -> Session:
        if self.version is None:
            self.version = self._transport.version(self._timeout) + 1
        try:
            self._transport.pause(self._timeout)
        except Refused:
            raise
        except BaseException as error:  # the engine may have been paused nevertheless
            self._end(error)
            raise
        return self

    def send(self, source: WeightSource) -> None:
        """Sends a version with all of its tensors; once per session."""
        if not isinstance(source, WeightSource):
            raise TypeError(f"Session.send: source is a {type(source).__name__}; needs a WeightSource of it")
        self._begin(source.manifest)
        assert self.version is not None
        arrays, buffers = self._transport.takes_arrays, getattr(self._transport, "buffers", None)
        with self._bucketizer.buckets(
            source, self.version, as_arrays=arrays, buffers=buffers, timeout=self._timeout
        ) as buckets:
            self._send(buckets)

    def send_buckets(self, manifest: Manifest, buckets: Iterable[Bucket]) -> None:
        """Sends a version whose buckets somebody else makes, instead of `send`."""
        self._begin(manifest)
        self._send(buckets)

    def _begin(self, manifest: Manifest) -> None:
        if self._manifest_hash is not None:
            raise SyncError("Session.send: this session has sent its version; begin another one")
        assert self.version is not None
        self._manifest_hash = manifest.hash
        self._transport.begin(self.version, manifest, self._timeout)

    def _send(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            self._transport.send(bucket, self._timeout)

    def abort(self, reason: str) -> None:
        """Ends the block: raises Aborted."""
        raise Aborted(reason)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._end(error)
            return
        try:
            if self._manifest_hash is None:
                raise SyncError("Session: nothing was sent; call send(source) within the block")
            assert self.version is not None
            self._transport.commit(self.version, self._manifest_hash, self._timeout)
        except BaseException as failed:
            self._end(failed)
            raise
        self._transport.resume(self._timeout)

    def _end(self, error: BaseException) -> None:
        """Aborts and resumes because of an error, which gets further errors as notes."""
        steps = (
            ("abort", lambda: self._transport.abort(f"{type(error).__name__}: {error}", self._timeout)),
            ("resume", lambda: self._transport.resume(self._timeout)),
        )
        for verb, step in steps:
            try:
                step()
            except Exception as also:
                error.add_note(f"{verb} failed as well: {type(also).__name__}: {also}")


def push(
    source: WeightSource,
    transport: Transport,
    *,
    version: int | None = None,
    max_bytes: int = DEFAULT_BYTES,
    timeout: float = 600.0,
) -> int:
    """Sends a version in a session of its own. See `Session`.

    Returns:
        The version.

    >>> import numpy as np
    >>> from jaxlowprec.weight_sync.transports.transport import InProcess
    >>> from jaxlowprec.weight_sync.receiving.receiver import Receiver
    >>> push(WeightSource({"a": np.ones(2)}), InProcess(Receiver()), version=5)
    5
    """
    session = Session(transport, version=version, max_bytes=max_bytes, timeout=timeout)
    with session:
        session.send(source)
    assert session.version is not None
    return session.version
