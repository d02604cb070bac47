"""The receiver's side of a channel: carries out a trainer's requests, and cleans up after a trainer that dies.

Each frame is answered by one frame: DONE with `{"version": v}`, or FAILED with `{"error": ..., "reason": ...}`. If a
connection ends before `resume`, for any reason, the session is aborted and the engine resumed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from jaxlowprec.weight_sync.bucket import BucketHeader
from jaxlowprec.weight_sync.errors import PeerLost, Refused
from jaxlowprec.weight_sync.receiving.receiver import Receiver
from jaxlowprec.weight_sync.transports import messages
from jaxlowprec.weight_sync.transports.sockets import Deadline, Silence
from jaxlowprec.weight_sync.transports.stream import BadFrame, Channel, Frame, Inline, Kind, Payloads

_LOG = logging.getLogger(__name__)
_MOST_SKIPPED = 1 << 30  # bytes of a refused payload; a longer one costs the connection


class Slot:
    """Which trainer has the session: one at a time, from its `pause` to its `resume` or its end.

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
    >>> from jaxlowprec.weight_sync.transports.handshake import Keys
    >>> a, b = socket.socketpair()
    >>> a.close()
    >>> Serving(Channel(b, Keys(b"1", b"2")), Receiver(), 1.0, Slot()).run()  # the trainer went away: nothing to do
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
                self._send(Kind.FAILED, messages.write_error(Refused(reason)))
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
            self._send(Kind.FAILED, messages.write_error(failed.error))
        else:
            self._send(Kind.DONE, messages.write(version=self._receiver.version))

    def _carry_out(self, frame: Frame) -> None:
        kind, header, receiver = frame.kind, frame.header, self._receiver
        if kind is Kind.VERSION:
            return
        if kind is Kind.BUCKET:
            self._take_bucket(frame)
            return
        with _failing():
            if kind is Kind.PAUSE:
                self._pause(messages.read_timeout(header))
            elif kind is Kind.BEGIN:
                self._need_session(kind)
                receiver.begin(*messages.read_begin(header, self._channel.check_peer))
            elif kind is Kind.COMMIT:
                self._need_session(kind)
                receiver.commit(*messages.read_commit(header))
            elif kind is Kind.ABORT and self._open:
                receiver.abort(messages.read_reason(header))
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
        refusal = messages.write_error(Refused(f"{asked.kind.name.lower()}: {reason}"))
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
