"""Weights through shared memory, for a trainer and an engine on one machine.

Verbs and headers are sent as in `tcp`, over a Unix socket without TLS (see `security.py`). A bucket is made in memory
that both processes share, and copied once, to where it is served from. That memory is an anonymous file, whose
descriptor is sent over the socket: the system frees it with the last process that holds it, whichever process is killed
at any moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import pathlib
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxlowprec.weight_sync.errors import PeerLost, PeerTimeout
from jaxlowprec.weight_sync.receiving.receiver import Receiver
from jaxlowprec.weight_sync.transports.protocol import BadFrame, Channel, Frame, Payloads
from jaxlowprec.weight_sync.transports.receiving_end import MOST_STRANGERS, Listening
from jaxlowprec.weight_sync.transports.security import TIMEOUT, check_secret, introduce
from jaxlowprec.weight_sync.transports.sockets import (
    Deadline,
    as_bytes,
    check_timeout,
    close,
    listen_at,
    no_connection,
    unix_socket,
)
from jaxlowprec.weight_sync.transports.transport import RemoteTransport

_NOTE = struct.Struct("!QQ")  # the payload's offset in the file, and its bytes
_PAGE = 1 << 21  # bytes of the largest page: two buffers never share one
_GREETING = b"M"

Path = str | os.PathLike[str]


class SharedFile:
    """An anonymous file, and payloads that are sent as notes of their place in it.

    Arguments:
        descriptor: the open file, which `close` closes. None: a new file.

    >>> trainer = SharedFile()
    >>> (payload,) = trainer.buffers(1, 5)
    >>> payload[:] = 7
    >>> (note,) = trainer.outgoing(payload)
    >>> receiver, destination = SharedFile(os.dup(trainer.descriptor)), bytearray(5)
    >>> receiver.read(note, memoryview(destination))
    >>> destination
    bytearray(b'\\x07\\x07\\x07\\x07\\x07')
    >>> trainer.close(), receiver.close()
    (None, None)
    """

    def __init__(self, descriptor: int | None = None):
        self.descriptor = _anonymous() if descriptor is None else descriptor
        self._memory = np.empty(0, np.uint8)

    def buffers(self, count: int, nbytes: int) -> list[np.ndarray]:
        """Memory for payloads, `count` times uint8 [nbytes]. It overwrites the buffers of an earlier call."""
        stride = -(-nbytes // _PAGE) * _PAGE
        if self._memory.nbytes < count * stride:
            os.ftruncate(self.descriptor, count * stride)
            self._memory = np.frombuffer(mmap.mmap(self.descriptor, count * stride), np.uint8)
        return [self._memory[i * stride : i * stride + nbytes] for i in range(count)]

    def outgoing(self, payload: Any) -> Sequence[object]:
        """The note for a payload, which is copied into the file if it is not there."""
        given = np.frombuffer(payload, np.uint8)
        begin = given.ctypes.data - self._memory.ctypes.data
        if not (self._memory.nbytes and 0 <= begin <= self._memory.nbytes - given.nbytes):
            (own,) = self.buffers(1, given.nbytes)
            np.copyto(own, given)
            begin = 0
        return [_NOTE.pack(begin, given.nbytes)]

    def incoming(self, channel: Channel, frame: Frame, destination: memoryview, timeout: float) -> str | None:
        """Reads the payload that a frame's note points to. Raises BadFrame for any other note."""
        if frame.payload_bytes != _NOTE.size:
            raise BadFrame(f"a note of {frame.payload_bytes} bytes; needs {_NOTE.size}")
        note = bytearray(_NOTE.size)
        channel.receive_payload(note, timeout)
        self.read(note, destination)
        return None

    def read(self, note: bytes | bytearray, destination: memoryview) -> None:
        """Copies a payload to its destination. The file is read, not mapped, so a shortened file is only an error."""
        begin, nbytes = _NOTE.unpack(note)
        left, found = as_bytes(destination), os.fstat(self.descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise BadFrame("what was given as shared memory is not a file")
        if nbytes != left.nbytes or begin > found.st_size:
            raise BadFrame(f"a note of {nbytes} bytes at {begin}; the bucket has {left.nbytes}")
        while left.nbytes:
            try:
                got = os.preadv(self.descriptor, [left[: 1 << 30]], begin)
            except OSError as error:  # the file may be write-only, or on a disk that fails
                raise BadFrame(f"the shared memory cannot be read: {error.strerror}") from None
            if not got:
                raise BadFrame(f"the shared memory ends {left.nbytes} bytes before the bucket does")
            left, begin = left[got:], begin + got

    def close(self) -> None:
        """Releases the file; buffers stay valid as long as they are held. May be called more than once."""
        self._memory = np.empty(0, np.uint8)
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def send_descriptor(connection: socket.socket, descriptor: int, deadline: Deadline) -> None:
    """Sends a file to the other process. Raises PeerLost if that process went away.

    >>> a, b = socket.socketpair()
    >>> file = SharedFile()
    >>> send_descriptor(a, file.descriptor, Deadline(1.0, "room"))
    >>> SharedFile(receive_descriptor(b, Deadline(1.0, "a file"))).close()
    >>> file.close(); a.close(); b.close()
    """
    connection.settimeout(deadline.left())
    try:
        socket.send_fds(connection, [_GREETING], [descriptor])
    except TimeoutError:
        raise deadline.missed() from None
    except OSError as error:
        raise PeerLost(f"the peer went away: {error.strerror or error}") from None


def receive_descriptor(connection: socket.socket, deadline: Deadline) -> int:
    """The file that the other process sends. Raises PeerLost if it sends none."""
    connection.settimeout(deadline.left())
    try:
        greeting, descriptors, flags, _ = socket.recv_fds(connection, len(_GREETING), 1)
    except TimeoutError:
        raise deadline.missed() from None
    except OSError as error:
        raise PeerLost(f"the peer went away: {error.strerror or error}") from None
    if greeting != _GREETING or len(descriptors) != 1:
        for descriptor in descriptors:
            os.close(descriptor)
        if flags & socket.MSG_CTRUNC and not descriptors:
            raise PeerLost("the peer's shared memory could not be taken: this process has too many open files")
        raise PeerLost("the peer gave no shared memory: it went away, or speaks another protocol")
    return descriptors[0]


def _anonymous() -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("jaxlowprec weight sync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # The trainer maps the file: if the other process could shorten it, the trainer would end with SIGBUS.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return descriptor
    with tempfile.TemporaryFile() as file:  # it has no name any more
        return os.dup(file.fileno())


class SharedMemoryReceiver(Listening):
    """Listens for trainers on this machine and passes their requests to a receiver, as `TcpReceiver` does.

    Arguments:
        receiver: the receiver to pass requests to.
        secret: the secret that trainers have to hold, too: at least 16 bytes that nobody can guess.
        path: the socket's path, in a folder that others cannot write to: whoever can replace the socket can stand
            between both sides. Only its owner may open the socket. A socket that a killed receiver left there is
            replaced; one that a process holds is not, even if it does not listen yet.
        timeout: seconds of silence in a session, which have to cover the making of a bucket; also the most that a pause
            may take.
        handshake_timeout: seconds for the handshake.

    Raises:
        ValueError: the secret is too short, or the timeout never ends. OSError: the path is taken or too long, or the
            system has no Unix sockets; use TCP on loopback there.

    >>> import tempfile
    >>> from jaxlowprec.weight_sync.sending.session import push
    >>> from jaxlowprec.weight_sync.sending.source import WeightSource
    >>> secret, receiver = b"32 bytes of secrets.token_bytes ", Receiver()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with SharedMemoryReceiver(receiver, secret, f"{folder}/engine"):
    ...         transport = SharedMemoryTransport(f"{folder}/engine", secret)
    ...         version = push(WeightSource({"a": np.ones(2, np.float32)}), transport, timeout=5)
    ...         transport.close()
    >>> receiver.version, receiver.weights["a"]
    (1, array([1., 1.], dtype=float32))
    """

    def __init__(
        self,
        receiver: Receiver,
        secret: bytes | str,
        path: Path,
        *,
        timeout: float = 60.0,
        handshake_timeout: float = TIMEOUT,
    ):
        check_secret(secret)
        check_timeout("SharedMemoryReceiver", timeout)
        check_timeout("SharedMemoryReceiver", handshake_timeout)
        self.path = pathlib.Path(path)
        listener = listen_at(self.path, 4 * MOST_STRANGERS)
        self._name = self.path.lstat()
        try:
            super().__init__(receiver, secret, listener, timeout, handshake_timeout)
        except BaseException:
            self._remove_name()
            raise

    def close(self) -> None:
        """Stops listening and ends every connection; an open session is aborted. May be called more than once."""
        try:
            super().close()
        finally:
            self._remove_name()

    def _remove_name(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self.path.lstat(), self._name):  # it is not another receiver's socket
                self.path.unlink()

    @contextlib.contextmanager
    def _payloads(self, connection: socket.socket) -> Iterator[Payloads]:
        deadline = Deadline(self._handshake_timeout, "shared memory from the trainer")
        shared = SharedFile(receive_descriptor(connection, deadline))
        try:
            yield shared
        finally:
            shared.close()


class SharedMemoryTransport(RemoteTransport):
    """A trainer's transport to a `SharedMemoryReceiver`. See `Transport`. Each session makes a new connection.

    It holds memory for two buckets from the first session until `close`.

    Arguments:
        path: the path of the receiver's socket.
        secret: the receiver's.
        timeout: seconds for connecting and the handshake together, within the timeout of the call.

    Raises:
        NotAuthenticated: the secrets differ. PeerLost: nothing, or something else, listens there.

    >>> transport = SharedMemoryTransport("/no/such/socket", "0123456789abcdef")
    >>> transport.version(timeout=5)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    jaxlowprec.weight_sync.errors.PeerLost: /no/such/socket: No such file or directory; needs a ...
    >>> transport.close()
    """

    def __init__(self, path: Path, secret: bytes | str, timeout: float = TIMEOUT):
        self._path, self._secret = os.fspath(path), check_secret(secret)
        self._connecting = check_timeout("SharedMemoryTransport", timeout)
        self._shared = SharedFile()
        super().__init__(self._dial, self._shared)

    def buffers(self, count: int, nbytes: int) -> list[np.ndarray]:
        """Memory for payloads that need not be copied to shared memory, `count` times uint8 [nbytes]."""
        return self._shared.buffers(count, nbytes)

    def close(self) -> None:
        """Ends the connection and releases the memory. Nothing else works afterwards."""
        super().close()
        self._shared.close()

    def _dial(self, timeout: float) -> Channel:
        deadline = Deadline(min(timeout, self._connecting), "connection")
        with contextlib.ExitStack() as unless_connected:
            try:
                connection = unix_socket()
                unless_connected.callback(close, connection)
                connection.settimeout(deadline.left())
                connection.connect(self._path)
            except TimeoutError:
                raise PeerTimeout(f"{self._path}: no connection within {deadline.seconds:g} s") from None
            except OSError as error:
                raise no_connection(self._path, error, "a SharedMemoryReceiver") from None
            introduce(connection, self._secret, deadline.left())
            send_descriptor(connection, self._shared.descriptor, deadline)
            unless_connected.pop_all()
        return Channel(connection)
