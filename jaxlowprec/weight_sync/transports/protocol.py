"""Frames over an authenticated connection, and the headers of a session's frames: common to TCP and shared memory.

    magic [4], kind [1], zeros [3], header length u32, payload length u64, header, payload

in network byte order. The connection sees to it that no frame is altered, repeated, left out or out of turn: TLS, or
the kernel for a Unix socket (see `security.py`). The header's checksum detects damage of a bucket within the trainer or
the receiver (see `bucket.py`). Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import math
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxlowprec.checkpoints.errors import brief
from jaxlowprec.weight_sync.bucket import MAX_VERSION
from jaxlowprec.weight_sync.errors import Aborted, PeerLost, PeerTimeout, Refused, SyncError
from jaxlowprec.weight_sync.manifest import MAX_JSON_BYTES, Manifest, parse
from jaxlowprec.weight_sync.transports.sockets import (
    Deadline,
    Silence,
    as_bytes,
    close,
    receive,
    receive_into,
    send_all,
)
from jaxlowprec.weight_sync.versions import newer, whole_number

MAX_HEADER_BYTES = MAX_JSON_BYTES + 8
MAX_PAYLOAD_BYTES = 1 << 48

_MAGIC = b"JLPF"
_PREFIX = struct.Struct("!4sB3xIQ")
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
    """A frame whose payload is still in the stream.

    >>> Frame(Kind.DONE, b"{}", 0).kind
    <Kind.DONE: 64>
    """

    kind: Kind
    header: bytes
    payload_bytes: int


class Channel:
    """One end of an authenticated connection. One thread sends and one thread receives.

    Arguments:
        connection: a connected socket of any family, after the handshake; the channel closes it.

    Raises:
        BadFrame: the bytes are not a frame. PeerTimeout, PeerLost: nothing came.

    >>> a, b = socket.socketpair()
    >>> trainer, engine = Channel(a), Channel(b)
    >>> trainer.send(Kind.BUCKET, b"{}", [b"abcd"], deadline=Deadline(1.0, "room"))
    >>> frame = engine.receive(Deadline(1.0, "a frame"))
    >>> payload = bytearray(frame.payload_bytes)
    >>> engine.receive_payload(payload, timeout=1.0)
    >>> frame.kind.name, payload
    ('BUCKET', bytearray(b'abcd'))
    >>> trainer.close(), engine.close()
    (None, None)
    """

    def __init__(self, connection: socket.socket):
        self.connection = connection
        with contextlib.suppress(OSError):  # a Unix socket has no such option
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, kind: Kind, header: bytes = b"", payload: Sequence[object] = (), *, deadline: Deadline) -> None:
        """Sends a frame; the payload's buffers are not copied."""
        count = sum(as_bytes(buffer).nbytes for buffer in payload)
        if len(header) > MAX_HEADER_BYTES:
            raise ValueError(f"Channel.send: a header of {len(header)} bytes; at most {MAX_HEADER_BYTES} travel")
        prefix = _PREFIX.pack(_MAGIC, kind, len(header), count)
        send_all(self.connection, [prefix, header, *payload], deadline)

    def receive(self, deadline: Deadline) -> Frame:
        """The next frame, without its payload, which has to be received or skipped before the next."""
        prefix = bytes(receive(self.connection, _PREFIX.size, deadline))
        magic, kind, header_bytes, payload_bytes = _PREFIX.unpack(prefix)
        known = magic == _MAGIC and not any(prefix[5:8]) and kind in Kind._value2member_map_
        if not known:
            raise BadFrame(f"a frame that begins with {prefix[:8]!r}, as none does")
        if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
            raise BadFrame(
                f"a frame with a header of {header_bytes} and a payload of {payload_bytes} bytes; at most "
                f"{MAX_HEADER_BYTES} and {MAX_PAYLOAD_BYTES} are read"
            )
        return Frame(Kind(kind), bytes(receive(self.connection, header_bytes, deadline)), payload_bytes)

    def receive_payload(self, destination: object, timeout: float) -> None:
        """Receives a payload into memory of its length. `timeout`: seconds of silence."""
        receive_into(self.connection, destination, Silence(timeout, "more of the payload"))

    def skip_payload(self, count: int, timeout: float) -> None:
        """Receives and drops a payload, so that the next frame can be read. `timeout`: seconds of silence."""
        scratch = bytearray(min(count, _SCRATCH))
        deadline = Silence(timeout, "more of the payload")
        while count:
            receive_into(self.connection, memoryview(scratch)[:count], deadline)
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


MAX_BYTES = 1 << 16
"""The most bytes of each header except BEGIN's, which holds a manifest."""

_MAX_REASON = 4000  # characters
_VERSION = struct.Struct("!Q")
_ERRORS: dict[str, Callable[[str], SyncError]] = {
    "Refused": Refused,
    "Aborted": Aborted,
    "PeerTimeout": PeerTimeout,
    "PeerLost": PeerLost,
}


def write(**fields: object) -> bytes:
    """A header with a few fields.

    >>> write(version=3)
    b'{"version":3}'
    """
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()


def read_version(header: bytes) -> int:
    """The version in an answer. Raises ValueError for anything else.

    >>> read_version(write(version=3))
    3
    """
    version = parse("version", header, MAX_BYTES, {"version"})["version"]
    if type(version) is not int or not 0 <= version <= MAX_VERSION:
        raise ValueError(f"version: is {brief(version)}; needs a whole number from 0")
    return version


def read_timeout(header: bytes) -> float:
    """The seconds that a pause may take.

    >>> read_timeout(write(timeout=2.5))
    2.5
    >>> read_timeout(b'{"timeout": -1}')
    Traceback (most recent call last):
    ValueError: pause: timeout is -1; needs seconds, more than 0 and finite
    """
    timeout = parse("pause", header, MAX_BYTES, {"timeout"})["timeout"]
    if type(timeout) not in (int, float) or not timeout > 0 or not math.isfinite(timeout):
        raise ValueError(f"pause: timeout is {brief(timeout)}; needs seconds, more than 0 and finite")
    return float(timeout)


def write_commit(version: int, manifest_hash: str) -> bytes:
    """The header that `read_commit` reads.

    >>> read_commit(write_commit(3, "ab"))
    (3, 'ab')
    """
    return write(version=whole_number(version), manifest_hash=str(manifest_hash))


def read_commit(header: bytes) -> tuple[int, str]:
    """The version and manifest hash of a commit; the receiver compares them with its own.

    >>> read_commit(write(version=3, manifest_hash="ab"))
    (3, 'ab')
    """
    content = parse("commit", header, MAX_BYTES, {"version", "manifest_hash"})
    return content["version"], content["manifest_hash"]


def read_reason(header: bytes) -> str:
    """The reason of an abort.

    >>> read_reason(write(reason="the trainer stops"))
    'the trainer stops'
    """
    return str(parse("abort", header, MAX_BYTES, {"reason"})["reason"])[:_MAX_REASON]


def write_begin(version: int, manifest: Manifest) -> bytes:
    """The header with a version and its manifest.

    >>> read_begin(write_begin(3, Manifest(())))
    (3, Manifest(entries=(), scheme=None))
    """
    number = 0 if whole_number(version) == 0 else newer(version, 0)  # the receiver reports stale versions
    return _VERSION.pack(number) + manifest.to_json()


def read_begin(header: bytes, check: Callable[[], None] | None = None) -> tuple[int, Manifest]:
    """The inverse of `write_begin`. Raises ValueError for anything else. `check`: see `manifest.checked`.

    >>> read_begin(b"")
    Traceback (most recent call last):
    ValueError: begin: 0 bytes; needs a version and a manifest
    """
    if len(header) < _VERSION.size:
        raise ValueError(f"begin: {len(header)} bytes; needs a version and a manifest")
    return _VERSION.unpack_from(header)[0], Manifest.from_json(header[_VERSION.size :], check)


def write_error(error: Exception) -> bytes:
    """The header that tells the other side about an error.

    >>> read_error(write_error(Refused("version 3 is stale")))
    Refused('version 3 is stale')
    >>> read_error(write_error(OSError("no space left")))
    Refused('OSError: no space left')
    """
    kind = type(error).__name__
    reason = str(error) if kind in _ERRORS else f"{kind}: {error}"
    reason = reason[:_MAX_REASON].encode(errors="replace").decode()
    return write(error=kind if kind in _ERRORS else "Refused", reason=reason)


def read_error(header: bytes) -> SyncError:
    """The error that a header tells about."""
    content = parse("error", header, MAX_BYTES, {"error", "reason"})
    kind, reason = content["error"], content["reason"]
    return _ERRORS.get(kind, Refused)(reason) if isinstance(kind, str) else Refused(str(reason))
