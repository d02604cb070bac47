"""Sends and receives bytes over a connected socket, completely or not at all, and never later than a deadline.

A `Deadline` covers a whole wait, such as for a stranger's proof or a trainer's call. A `Silence` covers each read of
what an authenticated peer sends, however much that is and however slow its network is. At the path of a Unix socket
there is one receiver.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import socket
import time
from collections.abc import Iterable, Iterator

from jaxlowprec.locks import locked
from jaxlowprec.weight_sync.errors import PeerLost, PeerTimeout

MOST_SECONDS = 2_000_000
"""The longest wait in seconds; from a little more on, the system's sockets and locks raise OverflowError."""

_MOST_AT_ONCE = 1 << 30  # macOS refuses more in one call
_MOST_BUFFERS = 64  # buffers of one sendmsg; systems allow 1024

_BOUND = pathlib.Path("/proc/net/unix")  # the sockets that processes of this machine have bound, on Linux
_PATIENCE = 5.0  # seconds that another receiver may take to start


class Deadline:
    """A moment that all steps of a wait count down to.

    Arguments:
        seconds: from now on.
        what: names what is waited for, for the error.

    >>> Deadline(5.0, "an answer").left() <= 5.0
    True
    >>> Deadline(0.0, "an answer to commit").left()
    Traceback (most recent call last):
    jaxlowprec.weight_sync.errors.PeerTimeout: no answer to commit within 0 s
    """

    def __init__(self, seconds: float, what: str):
        if not 0 <= seconds <= MOST_SECONDS:
            raise ValueError(f"{what}: timeout is {seconds!r}; needs seconds, from 0 to {MOST_SECONDS}")
        self.seconds, self.what = seconds, what
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until the deadline, more than 0. Raises PeerTimeout afterwards."""
        left = self._at - time.monotonic()
        if left <= 0:
            raise self.missed()
        return left

    def came(self) -> None:
        """Called when some bytes came or went and more are waited for."""

    def missed(self) -> PeerTimeout:
        """The error of a deadline that has passed."""
        return PeerTimeout(f"no {self.what.removeprefix('an ').removeprefix('a ')} within {self.seconds:g} s")


class Silence(Deadline):
    """A deadline that starts again with every byte: it passes if nothing comes for `seconds`.

    A peer that sends a byte now and then is waited for without limit.

    >>> silence = Silence(5.0, "more of the payload")
    >>> silence.came()
    >>> silence.left() <= 5.0
    True
    """

    def came(self) -> None:
        """Called when some bytes came or went: the deadline starts again."""
        self._at = time.monotonic() + self.seconds


def check_timeout(who: str, timeout: float) -> float:
    """A timeout that ends. Raises ValueError for one that never ends.

    >>> check_timeout("example", float("inf"))
    Traceback (most recent call last):
    ValueError: example: timeout is inf; needs seconds, more than 0 and finite
    """
    if not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
        raise ValueError(f"{who}: timeout is {timeout!r}; needs seconds, more than 0 and finite")
    if timeout > MOST_SECONDS:
        raise ValueError(f"{who}: timeout is {timeout!r}; needs at most {MOST_SECONDS} seconds")
    return float(timeout)


def as_bytes(buffer: object) -> memoryview:
    """A buffer's bytes as a one-dimensional view.

    >>> as_bytes(bytearray(b"abc")).nbytes
    3
    """
    view = memoryview(buffer)  # type: ignore[arg-type]
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def send_all(connection: socket.socket, buffers: Iterable[object], deadline: Deadline) -> None:
    """Sends buffers one after the other, without copying.

    Raises:
        PeerTimeout: the peer did not take them in time. PeerLost: it went away. A part may have been sent.

    >>> a, b = socket.socketpair()
    >>> send_all(a, [b"one", b"", bytearray(b"two")], Deadline(1.0, "room"))
    >>> b.recv(10)
    b'onetwo'
    >>> a.close(), b.close()
    (None, None)
    """
    waiting = [view for view in map(as_bytes, buffers) if view.nbytes]
    while waiting:
        left = deadline.left()
        try:
            connection.settimeout(left)
            sent = connection.sendmsg([view[:_MOST_AT_ONCE] for view in waiting[:_MOST_BUFFERS]])
        except TimeoutError:
            raise deadline.missed() from None
        except OSError as error:
            raise PeerLost(f"the peer went away: {error.strerror or error}") from None
        deadline.came()
        waiting = _rest(waiting, sent)


def receive_into(connection: socket.socket, buffer: object, deadline: Deadline) -> None:
    """Fills a buffer with received bytes.

    Raises:
        PeerTimeout: the bytes did not come in time. PeerLost: the peer went away before.

    >>> a, b = socket.socketpair()
    >>> a.sendall(b"onetwo")
    >>> found = bytearray(6)
    >>> receive_into(b, found, Deadline(1.0, "bytes"))
    >>> found
    bytearray(b'onetwo')
    >>> a.close()
    >>> receive_into(b, found, Deadline(1.0, "bytes"))
    Traceback (most recent call last):
    jaxlowprec.weight_sync.errors.PeerLost: the peer went away: the connection was closed
    >>> b.close()
    """
    missing = as_bytes(buffer)
    while missing.nbytes:
        left = deadline.left()
        try:
            connection.settimeout(left)
            got = connection.recv_into(missing)
        except TimeoutError:
            raise deadline.missed() from None
        except OSError as error:
            raise PeerLost(f"the peer went away: {error.strerror or error}") from None
        if not got:
            raise PeerLost("the peer went away: the connection was closed")
        deadline.came()
        missing = missing[got:]


def receive(connection: socket.socket, count: int, deadline: Deadline) -> bytearray:
    """Receives `count` bytes. Memory grows with what has come, not with what was announced.

    >>> a, b = socket.socketpair()
    >>> a.sendall(b"abc")
    >>> receive(b, 3, Deadline(1.0, "bytes"))
    bytearray(b'abc')
    >>> a.close(), b.close()
    (None, None)
    """
    found = bytearray()
    while len(found) < count:
        piece = bytearray(min(count - len(found), 1 << 20))
        receive_into(connection, piece, deadline)
        found += piece
    return found


def no_connection(where: str, error: OSError, needs: str) -> PeerLost:
    """The error for a connection that could not be made.

    >>> no_connection("engine:5000", ConnectionRefusedError(111, "Connection refused"), "a TcpReceiver")
    PeerLost('engine:5000: Connection refused; needs a TcpReceiver that listens there')
    """
    fault = error.strerror or error
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return PeerLost(f"{where}: {fault}: no connection can be made before some are closed")
    return PeerLost(f"{where}: {fault}; needs {needs} that listens there")


def close(connection: socket.socket) -> None:
    """Ends a connection, and wakes another thread that waits for it.

    >>> a, b = socket.socketpair()
    >>> close(a)
    >>> b.recv(1)
    b''
    >>> close(b)
    """
    with contextlib.suppress(OSError):  # it had ended already
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _rest(views: list[memoryview], done: int) -> list[memoryview]:
    """The rest of buffers whose first `done` bytes are done."""
    for index, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[index + 1 :]]
        done -= view.nbytes
    return []


def unix_socket() -> socket.socket:
    """A socket that is neither bound nor connected. Raises OSError if the system has no Unix sockets.

    >>> unix_socket().close()
    """
    if not hasattr(socket, "AF_UNIX"):
        raise OSError("shared memory: this system has no Unix sockets; use TcpReceiver on loopback")
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def listen_at(path: pathlib.Path, backlog: int) -> socket.socket:
    """A socket that listens at a path and that only its owner may open. Replaces a socket that a killed process left.

    Raises:
        OSError: something else is at the path, or a socket that a process holds, listening or not; the path is too
            long.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = listen_at(pathlib.Path(folder, "engine"), 1)
    ...     listen_at(pathlib.Path(folder, "engine"), 1)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    OSError: [Errno ...] Address already in use
    >>> first.close()
    """
    with contextlib.ExitStack() as unless_listening:
        listener = unless_listening.enter_context(unix_socket())
        os.fchmod(listener.fileno(), 0o600)  # on Linux the path gets this mode
        with _alone(path.parent):
            if path.is_socket() and not _is_held(path):
                path.unlink(missing_ok=True)
            listener.bind(os.fspath(path))
            if path.lstat().st_mode & 0o777 != 0o600:
                path.chmod(0o600)  # before anybody can connect
            listener.listen(backlog)
        unless_listening.pop_all()
    return listener


@contextlib.contextmanager
def _alone(folder: pathlib.Path) -> Iterator[None]:
    """Makes other receivers that start in a folder wait: otherwise one could remove a socket that another just made."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            alone = locked(descriptor, _PATIENCE)
        except OSError:  # the file system cannot lock a folder
            alone = True
        if not alone:
            raise OSError(errno.EBUSY, f"somebody has had the folder locked for {_PATIENCE:g} s", str(folder))
        yield
    finally:
        os.close(descriptor)


def _is_held(path: pathlib.Path) -> bool:
    """Whether a process holds the socket, even if it does not listen yet."""
    with unix_socket() as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return os.fspath(path) in _bound() or os.fspath(path.absolute()) in _bound()
        except OSError:
            return True
        return True


def _bound() -> set[str]:
    """Paths of the bound sockets, as far as the system shows them."""
    try:
        lines = _BOUND.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return set()
    return {parts[7] for line in lines if len(parts := line.split(maxsplit=7)) == 8}
