"""Frames over an authenticated connection: the common part of TCP and shared memory.

    magic [4], kind [1], zeros [3], header length u32, payload length u64, code [32], header, payload

in network byte order. The code is HMAC-SHA256 of the frame's number in its direction, its first 20 bytes and its
header: a frame that is repeated, out of turn, altered or of another connection is refused before its header is parsed.
The payload is checked by the header's checksum (see `bucket.py`), which detects damage and authenticates nothing.
Nothing is encrypted. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import hmac
import socket
import struct
from collections.abc import Sequence
from typing import Any, Protocol

from jaxlowprec.weight_sync.errors import PeerLost
from jaxlowprec.weight_sync.manifest import MAX_JSON_BYTES
from jaxlowprec.weight_sync.transports.handshake import Keys
from jaxlowprec.weight_sync.transports.sockets import (
    Deadline,
    Silence,
    as_bytes,
    close,
    receive,
    receive_into,
    send_all,
)

MAX_HEADER_BYTES = MAX_JSON_BYTES + 8
MAX_PAYLOAD_BYTES = 1 << 48

_MAGIC = b"JLPF"
_PREFIX = struct.Struct("!4sB3xIQ")
_CODE = 32
_SCRATCH = 1 << 20


class Kind(enum.IntEnum):
    """The kind of a frame. The first kinds are a trainer's requests, the last two a receiver's answers.

    >>> Kind(4).name
    'BUCKET'
    """

    VERSION = 1
    PAUSE = 2
    BEGIN = 3
    BUCKET = 4
    COMMIT = 5
    ABORT = 6
    RESUME = 7
    DONE = 64
    FAILED = 65


class BadFrame(PeerLost):
    """A frame that a peer never sends if it follows the protocol. What follows it in the stream has no meaning.

    >>> issubclass(BadFrame, PeerLost)
    True
    """


@dataclasses.dataclass(frozen=True)
class Frame:
    """A frame with a correct code; its payload is still in the stream.

    >>> Frame(Kind.DONE, b"{}", 0).kind
    <Kind.DONE: 64>
    """

    kind: Kind
    header: bytes
    payload_bytes: int


class Channel:
    """One end of an authenticated connection. One thread sends and one thread receives.

    Arguments:
        connection: a connected socket of any family; the channel closes it.
        keys: this end's keys, from the handshake.

    Raises:
        BadFrame: the bytes are not a frame, or not the next one. PeerTimeout, PeerLost: nothing came.

    >>> a, b = socket.socketpair()
    >>> trainer, engine = Channel(a, Keys(b"1", b"2")), Channel(b, Keys(b"2", b"1"))
    >>> trainer.send(Kind.BUCKET, b"{}", [b"abcd"], deadline=Deadline(1.0, "room"))
    >>> frame = engine.receive(Deadline(1.0, "a frame"))
    >>> payload = bytearray(frame.payload_bytes)
    >>> engine.receive_payload(payload, timeout=1.0)
    >>> frame.kind.name, payload
    ('BUCKET', bytearray(b'abcd'))
    >>> trainer.close(), engine.close()
    (None, None)
    """

    def __init__(self, connection: socket.socket, keys: Keys):
        self.connection, self._keys = connection, keys
        self._sent = self._received = 0
        with contextlib.suppress(OSError):  # a Unix socket has no such option
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, kind: Kind, header: bytes = b"", payload: Sequence[object] = (), *, deadline: Deadline) -> None:
        """Sends a frame; the payload's buffers are not copied."""
        count = sum(as_bytes(buffer).nbytes for buffer in payload)
        if len(header) > MAX_HEADER_BYTES:
            raise ValueError(f"Channel.send: a header of {len(header)} bytes; at most {MAX_HEADER_BYTES} travel")
        prefix = _PREFIX.pack(_MAGIC, kind, len(header), count)
        code = _code(self._keys.outgoing, self._sent, prefix, header)
        self._sent += 1
        send_all(self.connection, [prefix, code, header, *payload], deadline)

    def receive(self, deadline: Deadline) -> Frame:
        """The next frame, without its payload, which has to be received or skipped before the next."""
        prefix = bytes(receive(self.connection, _PREFIX.size, deadline))
        magic, kind, header_bytes, payload_bytes = _PREFIX.unpack(prefix)
        known = magic == _MAGIC and not any(prefix[5:8]) and kind in Kind._value2member_map_
        if not known:
            raise BadFrame(f"frame {self._received}: it begins with {prefix[:8]!r}, as no frame does")
        if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
            raise BadFrame(
                f"frame {self._received}: a header of {header_bytes} and a payload of {payload_bytes} bytes; at most "
                f"{MAX_HEADER_BYTES} and {MAX_PAYLOAD_BYTES} are read"
            )
        code = receive(self.connection, _CODE, deadline)
        header = bytes(receive(self.connection, header_bytes, deadline))
        if not hmac.compare_digest(code, _code(self._keys.incoming, self._received, prefix, header)):
            raise BadFrame(f"frame {self._received}: its code is wrong: it was altered, repeated or is out of turn")
        self._received += 1
        return Frame(Kind(kind), header, payload_bytes)

    def receive_payload(self, destination: object, timeout: float) -> None:
        """Receives a payload into memory of its length. `timeout`: seconds of silence."""
        receive_into(self.connection, [destination], Silence(timeout, "more of the payload"))

    def skip_payload(self, count: int, timeout: float) -> None:
        """Receives and drops a payload, so that the next frame can be read. `timeout`: seconds of silence."""
        scratch = bytearray(min(count, _SCRATCH))
        deadline = Silence(timeout, "more of the payload")
        while count:
            receive_into(self.connection, [memoryview(scratch)[:count]], deadline)
            count -= min(count, len(scratch))

    def check_peer(self) -> None:
        """Raises PeerLost if the peer has ended the connection. Reads nothing that has come from it."""
        try:
            self.connection.settimeout(0)
            if self.connection.recv(1, socket.MSG_PEEK):
                return
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerLost(f"the peer went away: {error.strerror or error}") from None
        raise PeerLost("the peer went away: the connection was closed")

    def close(self) -> None:
        """Ends the connection. May be called more than once, and from any thread."""
        close(self.connection)


class Payloads(Protocol):
    """How the bytes of a bucket are transferred: in the frame, or elsewhere with a note in the frame of their place.

    >>> transport: Payloads = Inline()
    """

    def outgoing(self, payload: Any) -> Sequence[object]:
        """The buffers that a bucket's frame carries for a payload, uint8 [nbytes].

        The receiver has the payload only when it has answered.
        """

    def incoming(self, channel: Channel, frame: Frame, destination: memoryview, timeout: float) -> str | None:
        """Takes a frame's payload from the stream, and writes the bucket's bytes to their destination, [nbytes].

        Returns their checksum if it was computed on the way, otherwise None.

        Raises:
            BadFrame: the frame's payload does not belong to this bucket.
        """


class Inline:
    """Payloads in the frame, received from the trainer's buffer straight into the weights' own memory.

    >>> Inline().outgoing(b"abc")
    [b'abc']
    """

    def outgoing(self, payload: Any) -> Sequence[object]:
        """The payload itself."""
        return [payload]

    def incoming(self, channel: Channel, frame: Frame, destination: memoryview, timeout: float) -> str | None:
        """Receives into the destination."""
        if frame.payload_bytes != destination.nbytes:
            raise BadFrame(f"a payload of {frame.payload_bytes} bytes for a bucket of {destination.nbytes}")
        channel.receive_payload(destination, timeout)
        return None


def _code(key: bytes, number: int, prefix: bytes, header: bytes) -> bytes:
    return hmac.digest(key, struct.pack("!Q", number) + prefix + header, hashlib.sha256)
