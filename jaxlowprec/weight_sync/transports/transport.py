"""The interface that carries a sync from a trainer to a receiver, as the trainer sees it."""

from __future__ import annotations

from typing import Any, Protocol, Self, runtime_checkable

from jaxlowprec.weight_sync.bucket import Bucket
from jaxlowprec.weight_sync.manifest import Manifest


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

    >>> from jaxlowprec.weight_sync.transports.in_process import InProcess
    >>> from jaxlowprec.weight_sync.receiving.receiver import Receiver
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
    """What a `with` block closes at its end, for what has a `close`."""

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
