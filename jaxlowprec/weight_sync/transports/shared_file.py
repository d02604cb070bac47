"""Memory without a name that two processes share: the system frees it with the last process that holds it.

The descriptor of an anonymous file is sent over a Unix socket. Nothing has to be removed, whichever process is killed
at any moment.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxlowprec.weight_sync.errors import PeerLost
from jaxlowprec.weight_sync.transports.sockets import Deadline, as_bytes
from jaxlowprec.weight_sync.transports.stream import BadFrame, Channel, Frame

_NOTE = struct.Struct("!QQ")  # the payload's offset in the file, and its bytes
_PAGE = 1 << 21  # bytes of the largest page: two buffers never share one
_GREETING = b"M"


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
