"""Unix sockets by the paths of their names: one path, one receiver."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import socket
from collections.abc import Iterator

from jaxlowprec.weight_sync.locks import locked

_BOUND = pathlib.Path("/proc/net/unix")  # what processes of this machine have bound, on Linux
_PATIENCE = 5.0  # seconds that another receiver may take to begin


def unix_socket() -> socket.socket:
    """A socket that is neither bound nor connected. Raises OSError where the system has none.

    >>> unix_socket().close()
    """
    if not hasattr(socket, "AF_UNIX"):
        raise OSError("shared memory: this system has no Unix sockets; use TcpReceiver on loopback")
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def listen_at(path: pathlib.Path, backlog: int) -> socket.socket:
    """A socket that listens at a path and that its owner alone may open. What a killed process left there is replaced.

    Raises:
        OSError: something else is there, or a socket that somebody holds, listening or not; the path is too long.

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
        os.fchmod(listener.fileno(), 0o600)  # Linux gives its mode to the name
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
    """Keeps other receivers that begin in a folder waiting: one could take what another has just put in place."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            alone = locked(descriptor, _PATIENCE)
        except OSError:  # a file system that cannot lock a folder
            alone = True
        if not alone:
            raise OSError(errno.EBUSY, f"somebody has had the folder locked for {_PATIENCE:g} s", str(folder))
        yield
    finally:
        os.close(descriptor)


def _is_held(path: pathlib.Path) -> bool:
    """Whether a process has the socket, which it may not listen at yet."""
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
    """Paths of the sockets that are bound, as far as the system tells."""
    try:
        lines = _BOUND.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return set()
    return {parts[7] for line in lines if len(parts := line.split(maxsplit=7)) == 8}
