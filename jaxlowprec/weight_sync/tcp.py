"""Weights over TCP: for trainers and engines on different machines, or in different containers of one.

Both ends prove that they hold one secret, and every frame is signed, but nothing is encrypted and payloads are only
checked for damage: who can read the network can read the weights, and who can rewrite packets can change them. Outside
a trusted network use an SSH tunnel, WireGuard or the like, and leave the receiver on loopback, where it listens unless
told otherwise.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import select
import socket
import threading

from jaxlowprec.weight_sync.errors import PeerLost, PeerTimeout, SyncError
from jaxlowprec.weight_sync.handshake import TIMEOUT, Keys, admit, check_secret, introduce
from jaxlowprec.weight_sync.receiver import Receiver
from jaxlowprec.weight_sync.remote import RemoteTransport
from jaxlowprec.weight_sync.serving import Serving, Slot
from jaxlowprec.weight_sync.sockets import Deadline, check_timeout, close
from jaxlowprec.weight_sync.stream import Channel

MOST_STRANGERS = 32
"""Connections that have not proved themselves yet; one more closes the oldest."""

MOST_TRAINERS = 8
"""Connections that have; one more is closed. Only one of them can have a session."""

_LOG = logging.getLogger(__name__)


class TcpReceiver:
    """Listens for trainers and feeds a receiver, from threads of its own. A context manager; `close` ends it.

    A trainer whose connection breaks, or that is silent for `timeout` seconds in its session, counts as dead: its
    session is aborted, the engine resumes, and the next trainer may come. Peers that do not prove the secret within
    `handshake_timeout` seconds are dropped; they get no memory and no session, however many they are.

    Arguments:
        receiver: to feed.
        secret: that trainers have to hold too, at least 16 bytes that nobody can guess.
        host, port: to listen at; port 0 is one that is free, see `address`.
        timeout: seconds of silence, which has to cover the making of a bucket; also the most that a pause may take.
        handshake_timeout: seconds.

    Attributes:
        address: (host, port) that it listens at.

    Raises:
        ValueError: a secret that is too short, or a timeout that never ends. OSError: the address cannot be had.

    >>> from jaxlowprec.weight_sync.bucket import pack
    >>> from jaxlowprec.weight_sync.manifest import Manifest
    >>> import numpy as np
    >>> secret = b"32 bytes of secrets.token_bytes "
    >>> receiver = Receiver()
    >>> bucket = pack(1, 0, True, {"a": np.ones(2, np.float32)})
    >>> manifest = Manifest(tuple(placed.entry for placed in bucket.entries))
    >>> with TcpReceiver(receiver, secret) as listening:
    ...     trainer = TcpTransport(*listening.address, secret)
    ...     trainer.pause(timeout=5)
    ...     trainer.begin(1, manifest, timeout=5)
    ...     trainer.send(bucket, timeout=5)
    ...     trainer.commit(1, manifest.hash, timeout=5)
    ...     trainer.resume(timeout=5)
    >>> receiver.version, receiver.weights["a"]
    (1, array([1., 1.], dtype=float32))
    """

    def __init__(
        self,
        receiver: Receiver,
        secret: bytes | str,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        timeout: float = 60.0,
        handshake_timeout: float = TIMEOUT,
    ):
        self._receiver, self._secret = receiver, check_secret(secret)
        self._timeout = check_timeout("TcpReceiver", timeout)
        self._handshake_timeout = check_timeout("TcpReceiver", handshake_timeout)
        self._slot, self._lock, self._numbers = Slot(), threading.Lock(), itertools.count()
        self._strangers: dict[int, socket.socket] = {}  # in the order in which they came
        self._trainers: dict[int, socket.socket] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._closed = False
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, port), family=family, backlog=4 * MOST_STRANGERS)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._wake, self._woken = socket.socketpair()
        self._accepting = threading.Thread(target=self._accept, name="weight sync, listening", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Stops listening and ends every connection; an open session is aborted. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._wake.close()  # wakes the listening thread
            for connection in (*self._strangers.values(), *self._trainers.values()):
                _shut(connection)
            threads = list(self._threads.values())
        for thread in (self._accepting, *threads):
            thread.join(self._timeout)
        self._listener.close()
        self._woken.close()

    def __enter__(self) -> TcpReceiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while self._woken not in select.select([self._listener, self._woken], [], [])[0]:
            try:
                connection, address = self._listener.accept()
            except OSError as error:  # it went away again, or there are no descriptors left
                _LOG.warning("weight sync: a connection could not be taken: %s", error)
                select.select([self._woken], [], [], 0.1)
                continue
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                if len(self._strangers) >= MOST_STRANGERS:
                    _shut(self._strangers.pop(next(iter(self._strangers))))
                number = next(self._numbers)
                thread = threading.Thread(
                    target=self._meet, args=(number, connection, str(address[0])), name="weight sync", daemon=True
                )
                self._strangers[number], self._threads[number] = connection, thread
            thread.start()

    def _meet(self, number: int, connection: socket.socket, name: str) -> None:
        try:
            keys = self._admit(number, connection, name)
            if keys is not None:
                channel = Channel(connection, keys)
                Serving(channel, self._receiver, self._timeout, self._slot, name).run()
        except Exception:  # what the engine raised when it was resumed: it is the engine's, not the next trainer's
            _LOG.exception("weight sync: the session of %s could not be ended", name)
        finally:
            with self._lock:
                self._strangers.pop(number, None)
                self._trainers.pop(number, None)
                self._threads.pop(number, None)
            close(connection)

    def _admit(self, number: int, connection: socket.socket, name: str) -> Keys | None:
        try:
            keys = admit(connection, self._secret, self._handshake_timeout)
        except SyncError as error:
            _LOG.warning("weight sync: %s was not let in: %s", name, error)
            return None
        with self._lock:
            self._strangers.pop(number, None)
            if self._closed or len(self._trainers) >= MOST_TRAINERS:
                return None
            self._trainers[number] = connection
        return keys


class TcpTransport(RemoteTransport):
    """A trainer's transport to a `TcpReceiver`. See `Transport`. Each session connects anew.

    Arguments:
        host, port: of the receiver.
        secret: the receiver's.
        timeout: seconds that connecting and the handshake may take together, within those of the call.

    Raises:
        NotAuthenticated: the secrets differ. PeerLost: nobody listens there, or something else does.

    >>> TcpTransport("127.0.0.1", 1, "0123456789abcdef").version(timeout=5)
    Traceback (most recent call last):
    jaxlowprec.weight_sync.errors.PeerLost: 127.0.0.1:1: Connection refused; needs a TcpReceiver that listens there
    """

    def __init__(self, host: str, port: int, secret: bytes | str, timeout: float = TIMEOUT):
        self._address, self._secret = (host, port), check_secret(secret)
        self._connecting = check_timeout("TcpTransport", timeout)
        super().__init__(self._dial)

    def _dial(self, timeout: float) -> Channel:
        deadline = Deadline(min(timeout, self._connecting), "connection")
        where = f"{self._address[0]}:{self._address[1]}"
        try:
            connection = socket.create_connection(self._address, deadline.left())
        except TimeoutError:
            raise PeerTimeout(f"{where}: no connection within {deadline.seconds:g} s") from None
        except OSError as error:
            fault = error.strerror or error
            raise PeerLost(f"{where}: {fault}; needs a TcpReceiver that listens there") from None
        try:
            return Channel(connection, introduce(connection, self._secret, deadline.left()))
        except BaseException:
            close(connection)
            raise


def _shut(connection: socket.socket) -> None:
    """Ends a connection that another thread reads and will close."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
