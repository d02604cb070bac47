"""Faults within the trainer's process, for one push."""

import contextlib
import errno
import os
import resource
import signal
import socket
import threading

from jaxlowprec.weight_sync.transports.tcp import TcpTransport
from tests.weight_sync.relay import Relay
from tests.weight_sync.syncing import SECRET


def fail_threads(start, count):
    """Lets the next starts of threads of this process fail."""
    left = [count]

    def started(thread):
        if left[0] > 0:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = started if count else start


@contextlib.contextmanager
def cut(transport, nbytes):
    """The connection ends after so many bytes of the trainer's, in the middle of whatever they are."""
    connect = transport._connect

    def connected(timeout):
        channel = connect(timeout)
        channel.connection = _Cut(channel.connection, nbytes)
        return channel

    transport._connect = connected
    try:
        yield
    finally:
        transport._connect = connect


class _Cut:
    def __init__(self, connection, nbytes):
        self._connection, self._left = connection, nbytes

    def sendmsg(self, buffers):
        first = buffers[0][: self._left]
        if first:
            sent = self._connection.send(first)
            self._left -= sent
            return sent
        self._connection.shutdown(socket.SHUT_RDWR)
        raise OSError(errno.EPIPE, "cut")

    def __getattr__(self, name):
        return getattr(self._connection, name)


@contextlib.contextmanager
def damaged(transport, kind, to_engine, place, size):
    """Bytes are flipped, left out, repeated, swapped or cut off on the way, in one direction. Gives a transport."""
    relay = Relay(transport._address, kind, to_engine, place, size)
    try:
        yield TcpTransport(*relay.address, SECRET, timeout=60)
    finally:
        relay.close()


@contextlib.contextmanager
def full(transport, writes):
    """After so many writes the disk is full."""
    pwrite, left = os.pwrite, [writes]

    def written(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(*arguments)

    os.pwrite = written
    try:
        yield
    finally:
        os.pwrite = pwrite


@contextlib.contextmanager
def small_files(transport, nbytes):
    """No file may have more bytes: the system's own error, in the middle of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
