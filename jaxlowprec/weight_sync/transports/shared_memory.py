"""Weights through shared memory, for a trainer and an engine on one machine.

Verbs and headers are sent as in `tcp`, over a Unix socket. A bucket is made in memory that both processes share, and
copied once, to where it is served from. That memory has no name: nothing is left behind if a process is killed. See
`shared_file`.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
from collections.abc import Iterator

import numpy as np

from jaxlowprec.weight_sync.errors import PeerTimeout
from jaxlowprec.weight_sync.receiving.receiver import Receiver
from jaxlowprec.weight_sync.transports.handshake import TIMEOUT, check_secret, introduce
from jaxlowprec.weight_sync.transports.listening import MOST_STRANGERS, Listening
from jaxlowprec.weight_sync.transports.remote import RemoteTransport
from jaxlowprec.weight_sync.transports.shared_file import SharedFile, receive_descriptor, send_descriptor
from jaxlowprec.weight_sync.transports.sockets import Deadline, check_timeout, close, no_connection
from jaxlowprec.weight_sync.transports.stream import Channel, Payloads
from jaxlowprec.weight_sync.transports.unix_sockets import listen_at, unix_socket

Path = str | os.PathLike[str]


class SharedMemoryReceiver(Listening):
    """Listens for trainers on this machine and passes their requests to a receiver, as `TcpReceiver` does.

    Arguments:
        receiver: the receiver to pass requests to.
        secret: the secret that trainers have to hold, too: at least 16 bytes that nobody can guess.
        path: the socket's path, in a folder that others cannot write to. Only its owner may open the socket. A socket
            that a killed receiver left there is replaced; one that a process holds is not, even if it does not listen
            yet.
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
            keys = introduce(connection, self._secret, deadline.left())
            send_descriptor(connection, self._shared.descriptor, deadline)
            unless_connected.pop_all()
        return Channel(connection, keys)
