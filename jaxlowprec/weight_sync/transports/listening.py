"""Listens for trainers at a socket of any kind, and passes their requests to a receiver."""

from __future__ import annotations

import contextlib
import itertools
import logging
import select
import socket
import threading

from jaxlowprec.weight_sync.errors import SyncError
from jaxlowprec.weight_sync.receiving.receiver import Receiver
from jaxlowprec.weight_sync.transports.handshake import Keys, NotAuthenticated, admit, check_secret
from jaxlowprec.weight_sync.transports.serving import Serving, Slot, turn_away
from jaxlowprec.weight_sync.transports.sockets import Deadline, close
from jaxlowprec.weight_sync.transports.stream import Channel, Inline, Payloads
from jaxlowprec.weight_sync.transports.tls import EncryptedSocket, ServerTls
from jaxlowprec.weight_sync.transports.transport import Closing

MOST_STRANGERS = 32
"""The most connections that have not proved themselves yet; one more closes the oldest."""

MOST_TRAINERS = 8
"""The most connections that have proved themselves; one more is told so and closed. Only one can have a session."""

_PAUSE_MS = 100  # the wait after a connection that could not be accepted
_NO_ROOM = f"{MOST_TRAINERS} trainers are connected already; let one end, or stop it"
_LOG = logging.getLogger(__name__)


class Listening(Closing):
    """Admits trainers that prove a secret. A context manager; `close` ends it.

    Arguments:
        receiver: the receiver to pass requests to.
        secret: the secret that trainers have to hold, too.
        listener: a listening socket; `close` closes it.
        timeout: seconds of silence in a session, which have to cover the making of a bucket; also the most that a pause
            may take.
        handshake_timeout: seconds for the handshake, TLS included.
        tls: the certificate; every connection is encrypted then. None: none is.

    >>> with Listening(Receiver(), "0123456789abcdef", socket.create_server(("127.0.0.1", 0)), 5.0, 5.0) as listening:
    ...     pass
    """

    def __init__(
        self,
        receiver: Receiver,
        secret: bytes | str,
        listener: socket.socket,
        timeout: float,
        handshake_timeout: float,
        tls: ServerTls | None = None,
    ):
        self._receiver, self._secret = receiver, check_secret(secret)
        self._timeout = timeout
        self._handshake_timeout = handshake_timeout
        self._tls = tls
        self._slot, self._lock, self._numbers = Slot(), threading.Lock(), itertools.count()
        self._strangers: dict[int, socket.socket] = {}  # in the order of their arrival
        self._admitted: dict[int, socket.socket] = {}
        self._trainers: set[int] = set()  # the admitted connections that are served
        self._threads: dict[int, threading.Thread] = {}
        self._closed = False
        self._listener = listener
        self._accepting = threading.Thread(target=self._accept, name="weight sync, listening", daemon=True)
        with contextlib.ExitStack() as unless_listening:
            unless_listening.enter_context(listener)
            self._wake, self._woken = map(unless_listening.enter_context, socket.socketpair())
            self._accepting.start()
            unless_listening.pop_all()

    def _payloads(self, connection: socket.socket) -> contextlib.AbstractContextManager[Payloads]:
        """How buckets are transferred on an admitted connection."""
        return contextlib.nullcontext(Inline())

    def close(self) -> None:
        """Stops listening and ends every connection; an open session is aborted. May be called more than once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for connection in (*self._strangers.values(), *self._admitted.values()):
                _shut(connection)
            threads = [self._accepting, *self._threads.values()]
        self._wake.close()  # wakes the listening thread
        try:
            for thread in threads:
                if thread is not threading.current_thread():  # an engine may close this while it is paused or resumed
                    thread.join(self._timeout)
        finally:
            self._listener.close()
            self._woken.close()

    def _accept(self) -> None:
        coming, woken = select.poll(), select.poll()  # select() refuses descriptors from 1024 on, and engines have many
        coming.register(self._listener, select.POLLIN)
        for waiting in (coming, woken):
            waiting.register(self._woken, select.POLLIN)
        while self._woken.fileno() not in dict(coming.poll()) and not self._closed:
            try:
                self._take()
            except (OSError, RuntimeError, MemoryError) as error:
                # The connection is gone, or descriptors, threads or memory ran out: others may release some.
                _LOG.warning("weight sync: a connection could not be taken: %s", error)
                woken.poll(_PAUSE_MS)

    def _take(self) -> None:
        """Takes the next connection, and starts a thread for it."""
        connection, address = self._listener.accept()
        name = str(address[0] if address else "a process of this machine")
        with contextlib.ExitStack() as unless_met, self._lock:
            unless_met.enter_context(connection)
            if self._closed:
                return
            if self._tls is not None:
                try:
                    connection = unless_met.enter_context(self._tls.wrapped(connection))
                except OSError:  # the peer went away already
                    return
            if len(self._strangers) >= MOST_STRANGERS:
                _shut(self._strangers.pop(next(iter(self._strangers))))
            number = next(self._numbers)
            thread = threading.Thread(
                target=self._meet, args=(number, connection, name), name="weight sync", daemon=True
            )
            thread.start()  # before the lock is released: `close` joins the threads that have started
            self._strangers[number], self._threads[number] = connection, thread
            unless_met.pop_all()

    def _meet(self, number: int, connection: socket.socket, name: str) -> None:
        try:
            keys = self._admit(number, connection, name)
            if keys is not None:
                channel = Channel(connection, keys)
                with self._payloads(connection) as payloads:
                    if self._enlist(number):
                        Serving(channel, self._receiver, self._timeout, self._slot, name, payloads).run()
                    else:
                        turn_away(channel, _NO_ROOM, self._handshake_timeout)
        except SyncError as error:
            _LOG.warning("weight sync: %s: %s", name, error)
        except Exception:  # raised by the engine when it was resumed: not the next trainer's error
            _LOG.exception("weight sync: the session of %s could not be ended", name)
        finally:
            with self._lock:
                self._strangers.pop(number, None)
                self._admitted.pop(number, None)
                self._trainers.discard(number)
                self._threads.pop(number, None)
            close(connection)

    def _admit(self, number: int, connection: socket.socket, name: str) -> Keys | None:
        try:
            deadline = Deadline(self._handshake_timeout, "proof of the secret")
            binding = b""
            if self._tls is not None:
                assert isinstance(connection, EncryptedSocket)
                binding = self._tls.agree(connection, deadline)
            keys = admit(connection, self._secret, deadline.left(), binding)
        except SyncError as error:
            level = logging.WARNING if isinstance(error, NotAuthenticated) else logging.INFO  # strangers may fill logs
            _LOG.log(level, "weight sync: %s was not let in: %s", name, error)
            return None
        with self._lock:
            self._strangers.pop(number, None)
            if self._closed or len(self._admitted) >= 2 * MOST_TRAINERS:  # too many even to tell them why
                return None
            self._admitted[number] = connection
        return keys

    def _enlist(self, number: int) -> bool:
        """Whether there is room for another trainer; if so, it is added."""
        with self._lock:
            room = len(self._trainers) < MOST_TRAINERS
            if room:
                self._trainers.add(number)
        return room


def _shut(connection: socket.socket) -> None:
    """Ends a connection that another thread reads and closes later."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
