"""Unix sockets at paths: one receiver per path."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import socket
from collections.abc import Iterator

from jaxlowprec.locks import locked

_BOUND = pathlib.Path("/proc/net/unix")  # the sockets that processes of this machine have bound, on Linux
_PATIENCE = 5.0  # seconds that another receiver may take to start


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
