"""The trainer's side of a sync: the interface of all transports, the one in one process, the one over a connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self, runtime_checkable

from jaxlowprec.weight_sync.bucket import Bucket
from jaxlowprec.weight_sync.errors import PeerLost
from jaxlowprec.weight_sync.manifest import Manifest
from jaxlowprec.weight_sync.receiving.receiver import Receiver
from jaxlowprec.weight_sync.transports import protocol
from jaxlowprec.weight_sync.transports.protocol import BadFrame, Channel, Inline, Kind, Payloads
from jaxlowprec.weight_sync.transports.sockets import Deadline


@runtime_checkable
class Transport(Protocol):
    """The verbs of a remote `Receiver`. One thread calls them.

    Each call waits at most `timeout` seconds for the receiver's answer.

    Attributes:
        takes_arrays: whether the payload of a bucket is its arrays, which the transport copies from device to device;
            otherwise it is bytes.

    A transport may have a method `buffers(count, nbytes)` that gives memory for payloads, `count` times uint8 [nbytes],
    from which it sends without a copy.

    Raises:
        Refused: the receiver refused, and says why.
        PeerTimeout: no answer in time. PeerLost: no connection.

    >>> isinstance(InProcess(Receiver()), Transport)
    True
    """

    takes_arrays: bool

    def version(self, timeout: float) -> int:
        """The version that the receiver serves; 0: none yet."""

    def pause(self, timeout: float) -> None:
        """Stops the engine, between two requests or steps."""

    def begin(self, version: int, manifest: Manifest, timeout: float) -> None:
        """Starts a new version."""

    def send(self, bucket: Bucket, timeout: float) -> None:
        """Sends the next bucket. When it returns, the receiver has it, and the payload's buffer may be reused."""

    def commit(self, version: int, manifest_hash: str, timeout: float) -> None:
        """From here on the receiver serves the new version."""

    def abort(self, reason: str, timeout: float) -> None:
        """The receiver drops what it was sent since `begin`. Does nothing after a commit."""

    def resume(self, timeout: float) -> None:
        """Lets the engine go on."""

    def close(self) -> None:
        """Releases what the transport holds. Nothing else works afterwards."""


class Closing:
    """Closes itself at the end of a `with` block, for classes that have a `close`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()  # type: ignore[attr-defined]


def require_transport(who: str, transport: Any) -> Transport:
    """The transport. Raises TypeError if it is none.

    >>> require_transport("example", "http://localhost:8000")
    Traceback (most recent call last):
    TypeError: example: transport is a str; needs a Transport, such as InProcess(receiver) or TcpTransport(...)
    """
    if not isinstance(transport, Transport):
        raise TypeError(
            f"{who}: transport is a {type(transport).__name__}; needs a Transport, such as InProcess(receiver) or "
            "TcpTransport(...)"
        )
    return transport


class InProcess(Closing):
    """Calls a receiver in the same process directly. Arrays go from device to device; the receiver makes copies.

    >>> InProcess(Receiver()).version(timeout=1)
    0
    """

    takes_arrays = True

    def __init__(self, receiver: Receiver):
        self.receiver = receiver

    def version(self, timeout: float) -> int:
        """See `Transport`."""
        return self.receiver.version

    def pause(self, timeout: float) -> None:
        """See `Transport`."""
        self.receiver.pause(timeout)

    def begin(self, version: int, manifest: Manifest, timeout: float) -> None:
        """See `Transport`."""
        self.receiver.begin(version, manifest)

    def send(self, bucket: Bucket, timeout: float) -> None:
        """See `Transport`."""
        self.receiver.receive(bucket)

    def commit(self, version: int, manifest_hash: str, timeout: float) -> None:
        """See `Transport`."""
        self.receiver.commit(version, manifest_hash)

    def abort(self, reason: str, timeout: float) -> None:
        """See `Transport`."""
        self.receiver.abort(reason)

    def resume(self, timeout: float) -> None:
        """See `Transport`."""
        self.receiver.resume()

    def close(self) -> None:
        """See `Transport`."""


class RemoteTransport(Closing):
    """The verbs of a receiver at the other end of a channel. See `Transport`; `TcpTransport` is an example.

    A session has a connection of its own, from `pause` to `resume`. If the connection is lost, or an answer does not
    come in time, the connection is given up: the receiver then aborts and resumes by itself, and `abort` and `resume`
    do nothing.

    Arguments:
        connect: makes a new authenticated channel, within the seconds that it is called with.
        payloads: how buckets are transferred.

    >>> def connect(timeout):
    ...     raise PeerLost("nobody listens")
    >>> RemoteTransport(connect).version(timeout=1.0)
    Traceback (most recent call last):
    jaxlowprec.weight_sync.errors.PeerLost: nobody listens
    """

    takes_arrays = False

    def __init__(self, connect: Callable[[float], Channel], payloads: Payloads | None = None):
        self._connect = connect
        self._payloads = Inline() if payloads is None else payloads
        self._channel: Channel | None = None
        self._closed = False

    def version(self, timeout: float) -> int:
        """The version that the receiver serves; 0: none yet."""
        in_session = self._channel is not None
        try:
            return self._ask(Kind.VERSION, timeout=timeout, connect=True)
        finally:
            if not in_session:
                self._disconnect()

    def pause(self, timeout: float) -> None:
        """Connects, and stops the engine. Raises Refused while another trainer's session is open."""
        try:
            self._ask(Kind.PAUSE, protocol.write(timeout=float(timeout)), timeout=timeout, connect=True)
        except BaseException:
            self._disconnect()
            raise

    def begin(self, version: int, manifest: Manifest, timeout: float) -> None:
        """Starts a new version."""
        self._ask(Kind.BEGIN, protocol.write_begin(version, manifest), timeout=timeout)

    def send(self, bucket: Bucket, timeout: float) -> None:
        """Sends the next bucket from its own buffer."""
        deadline = Deadline(timeout, f"answer to bucket {bucket.index}")
        self._exchange(Kind.BUCKET, bucket.header.to_json(), bucket.payload, deadline)

    def commit(self, version: int, manifest_hash: str, timeout: float) -> None:
        """From here on the receiver serves the new version. After PeerLost, ask `version` which one it serves."""
        self._ask(Kind.COMMIT, protocol.write_commit(version, manifest_hash), timeout=timeout)

    def abort(self, reason: str, timeout: float) -> None:
        """The receiver drops what it was sent since `begin`."""
        if self._channel is not None:
            self._ask(Kind.ABORT, protocol.write(reason=reason[:1000]), timeout=timeout)

    def resume(self, timeout: float) -> None:
        """Lets the engine go on; the connection ends."""
        if self._channel is not None:
            try:
                self._ask(Kind.RESUME, timeout=timeout)
            finally:
                self._disconnect()

    def close(self) -> None:
        """Ends the connection. Nothing else works afterwards."""
        self._closed = True
        self._disconnect()

    def _ask(self, kind: Kind, header: bytes = b"", *, timeout: float, connect: bool = False) -> int:
        deadline = Deadline(timeout, f"answer to {kind.name.lower()}")
        if connect and self._channel is None:
            if self._closed:
                raise ValueError(f"{kind.name.lower()}: the transport is closed; make another")
            self._channel = self._connect(deadline.left())
        return self._exchange(kind, header, None, deadline)

    def _exchange(self, kind: Kind, header: bytes, payload: object, deadline: Deadline) -> int:
        """Sends a frame and reads the answer: the version that is served."""
        if self._channel is None:
            raise PeerLost(f"{kind.name.lower()}: no session is open (none was paused for, or its connection was lost)")
        outgoing = () if payload is None else self._payloads.outgoing(payload)
        try:
            self._channel.send(kind, header, outgoing, deadline=deadline)
            answer = self._channel.receive(deadline)
            if answer.payload_bytes or answer.kind not in (Kind.DONE, Kind.FAILED):
                raise BadFrame(f"an answer to {kind.name.lower()} that is none: {answer.kind.name}")
            error = protocol.read_error(answer.header) if answer.kind is Kind.FAILED else None
            version = protocol.read_version(answer.header) if error is None else 0
        except BaseException as failure:
            self._disconnect()  # otherwise a late answer would be taken for the next one
            if isinstance(failure, ValueError):
                raise BadFrame(f"an answer that cannot be read: {failure}") from None
            raise
        if error is not None:
            raise error
        return version

    def _disconnect(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
