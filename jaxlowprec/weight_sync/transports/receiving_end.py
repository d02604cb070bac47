"""The receiver's side of a sync: listens for trainers at a socket of any kind, and carries out a trainer's requests.

Each frame is answered by one frame: DONE with `{"version": v}`, or FAILED with `{"error": ..., "reason": ...}`. If a
connection ends before `resume`, for any reason, the session is aborted and the engine resumed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import select
import socket
import threading
import time

from jaxlowprec.weight_sync.bucket import BucketHeader
from jaxlowprec.weight_sync.errors import PeerLost, Refused, SyncError
from jaxlowprec.weight_sync.receiving.receiver import Receiver
from jaxlowprec.weight_sync.transports import protocol
from jaxlowprec.weight_sync.transports.protocol import BadFrame, Channel, Frame, Inline, Kind, Payloads
from jaxlowprec.weight_sync.transports.security import (
    EncryptedSocket,
    NotAuthenticated,
    ServerTls,
    admit,
    check_secret,
)
from jaxlowprec.weight_sync.transports.sockets import Deadline, Silence, close
from jaxlowprec.weight_sync.transports.transport import Closing

_LOG = logging.getLogger(__name__)
_MOST_SKIPPED = 1 << 30  # bytes of a refused payload; a longer one costs the connection

MOST_STRANGERS = 32
"""The most connections that have not proved themselves yet; one more closes the oldest."""
MOST_TRAINERS = 8
"""The most connections that have proved themselves; one more is told so and closed. Only one can have a session."""
_PAUSE_MS = 100  # the wait after a connection that could not be accepted
_NO_ROOM = f"{MOST_TRAINERS} trainers are connected already; let one end, or stop it"


class Slot:
    """The trainer that has the session: one at a time, from its `pause` to its `resume` or its end.

    >>> slot = Slot()
    >>> slot.take("10.0.0.7")
    >>> slot.take("10.0.0.8")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    jaxlowprec.weight_sync.errors.Refused: pause: another trainer, 10.0.0.7, has had a session open for 0 s; let it ...
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._owner: str | None = None
        self._since = 0.0

    def take(self, name: str) -> None:
        """Takes the session for a trainer. Raises Refused if a trainer has it, even if it is the same one."""
        with self._lock:
            if self._owner is not None:
                raise Refused(
                    f"pause: another trainer, {self._owner}, has had a session open for "
                    f"{time.monotonic() - self._since:.0f} s; let it end, or stop it: the session of a dead one ends "
                    "by itself"
                )
            self._owner, self._since = name, time.monotonic()

    def release(self) -> None:
        """Ends the session."""
        with self._lock:
            self._owner = None


class Serving:
    """One trainer's connection on the receiver's side.

    Arguments:
        channel: the connection to the trainer; closed when `run` returns.
        receiver: the receiver that carries out the requests.
        timeout: seconds of silence within a frame or between two, after which the trainer counts as dead, however much
            it still has to send; also the most that a pause may take.
        slot: shared by all connections to the receiver.
        name: the trainer's name, for messages.
        payloads: how buckets are transferred.

    >>> import socket
    >>> a, b = socket.socketpair()
    >>> a.close()
    >>> Serving(Channel(b), Receiver(), 1.0, Slot()).run()  # the trainer went away: nothing to do
    """

    def __init__(
        self,
        channel: Channel,
        receiver: Receiver,
        timeout: float,
        slot: Slot,
        name: str = "trainer",
        payloads: Payloads | None = None,
    ):
        self._channel, self._receiver, self._timeout, self._slot, self._name = channel, receiver, timeout, slot, name
        self._payloads = Inline() if payloads is None else payloads
        self._open = False  # whether this trainer has the receiver's session

    def run(self) -> None:
        """Serves until the connection ends. Raises nothing that a trainer can cause."""
        reason = "the trainer's connection ended"
        try:
            while True:
                self._answer(self._channel.receive(Silence(self._timeout, "frame from the trainer")))
        except BadFrame as error:
            reason = str(error)
            _LOG.warning("weight sync: %s: %s", self._name, error)
            with contextlib.suppress(PeerLost):
                self._send(Kind.FAILED, protocol.write_error(Refused(reason)))
        except PeerLost as error:
            reason = str(error)
        finally:
            self._clean_up(reason)
            self._channel.close()

    def _clean_up(self, reason: str) -> None:
        if not self._open:
            return
        _LOG.warning("weight sync: %s: %s; its session is aborted, the engine resumes", self._name, reason)
        try:
            self._receiver.abort(reason)
        finally:
            try:
                self._receiver.resume()
            finally:
                self._close_session()

    def _answer(self, frame: Frame) -> None:
        if frame.payload_bytes and frame.kind is not Kind.BUCKET:
            raise BadFrame(f"a {frame.kind.name} with a payload of {frame.payload_bytes} bytes")
        try:
            self._carry_out(frame)
        except PeerLost:  # of the stream, not of the receiver: see _call
            raise
        except _Failed as failed:
            self._send(Kind.FAILED, protocol.write_error(failed.error))
        else:
            self._send(Kind.DONE, protocol.write(version=self._receiver.version))

    def _carry_out(self, frame: Frame) -> None:
        kind, header, receiver = frame.kind, frame.header, self._receiver
        if kind is Kind.VERSION:
            return
        if kind is Kind.BUCKET:
            self._take_bucket(frame)
            return
        with _failing():
            if kind is Kind.PAUSE:
                self._pause(protocol.read_timeout(header))
            elif kind is Kind.BEGIN:
                self._need_session(kind)
                receiver.begin(*protocol.read_begin(header, self._channel.check_peer))
            elif kind is Kind.COMMIT:
                self._need_session(kind)
                receiver.commit(*protocol.read_commit(header))
            elif kind is Kind.ABORT and self._open:
                receiver.abort(protocol.read_reason(header))
            elif kind is Kind.RESUME and self._open:
                try:
                    receiver.resume()
                finally:
                    self._close_session()
            elif kind in (Kind.DONE, Kind.FAILED):
                raise Refused(f"{kind.name}: is an answer; a trainer asks")

    def _pause(self, timeout: float) -> None:
        self._slot.take(self._name)
        try:
            self._receiver.pause(min(timeout, self._timeout))
        except BaseException:
            self._slot.release()
            raise
        self._open = True

    def _take_bucket(self, frame: Frame) -> None:
        try:
            with _failing():
                self._need_session(frame.kind)
                header = BucketHeader.from_json(frame.header, self._channel.check_peer)
                destination = self._receiver.destination(header)
        except _Failed:
            if frame.payload_bytes > _MOST_SKIPPED:
                raise BadFrame(f"a refused bucket with a payload of {frame.payload_bytes} bytes") from None
            self._channel.skip_payload(frame.payload_bytes, self._timeout)
            raise
        digest = self._payloads.incoming(self._channel, frame, destination, self._timeout)
        with _failing():
            self._receiver.received(header, digest)

    def _need_session(self, kind: Kind) -> None:
        if not self._open:
            raise Refused(f"{kind.name.lower()}: this connection has no session; pause first")

    def _close_session(self) -> None:
        self._open = False
        self._slot.release()

    def _send(self, kind: Kind, header: bytes) -> None:
        self._channel.send(kind, header, deadline=Deadline(self._timeout, "room for an answer"))


def turn_away(channel: Channel, reason: str, timeout: float) -> None:
    """Refuses a trainer's first request, so that it learns the reason, and ends the connection.

    Arguments:
        channel: the connection to the trainer.
        reason: the reason that it is told.
        timeout: seconds that its request may take.
    """
    with contextlib.closing(channel):
        asked = channel.receive(Deadline(timeout, "frame from the trainer"))
        refusal = protocol.write_error(Refused(f"{asked.kind.name.lower()}: {reason}"))
        channel.send(Kind.FAILED, refusal, deadline=Deadline(timeout, "room for an answer"))


class _Failed(Exception):
    """An error of a receiver's verb, as opposed to an error of the stream."""

    def __init__(self, error: Exception):
        self.error = error


@contextlib.contextmanager
def _failing():
    """Sends the receiver's errors to the trainer; the connection goes on."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, Refused):
            _LOG.warning("weight sync: %s: %s", type(error).__name__, error)
        raise _Failed(error) from error


class Listening(Closing):
    """Admits trainers that prove a secret. A context manager; `close` ends it.

    Arguments:
        receiver: the receiver to pass requests to.
        secret: the secret that trainers have to hold, too.
        listener: a listening socket; `close` closes it.
        timeout: seconds of silence in a session, which have to cover the making of a bucket; also the most that a pause
            may take.
        handshake_timeout: seconds for the handshake, TLS included.
        tls: the certificate. None: a Unix socket's connections, which are not encrypted.

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
            if self._admit(number, connection, name):
                channel = Channel(connection)
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

    def _admit(self, number: int, connection: socket.socket, name: str) -> bool:
        """Whether a stranger proved the secret, and there is room for it or for telling it that there is none."""
        try:
            deadline = Deadline(self._handshake_timeout, "proof of the secret")
            binding = b""
            if self._tls is not None:
                assert isinstance(connection, EncryptedSocket)
                binding = self._tls.agree(connection, deadline)
            admit(connection, self._secret, deadline.left(), binding)
        except SyncError as error:
            level = logging.WARNING if isinstance(error, NotAuthenticated) else logging.INFO  # strangers may fill logs
            _LOG.log(level, "weight sync: %s was not let in: %s", name, error)
            return False
        with self._lock:
            self._strangers.pop(number, None)
            if self._closed or len(self._admitted) >= 2 * MOST_TRAINERS:  # too many even to tell them why
                return False
            self._admitted[number] = connection
        return True

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
