"""Messages between two processes of one machine: a line of JSON, and arrays as the bytes of a safetensors file.

Nothing is unpickled. Every wait ends. If one process ends, the other gets an error at once.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy

LONGEST_LINE = 1 << 16
MOST_BYTES = 1 << 28


class Ended(Exception):
    """The other process is gone, or sent nothing in time."""


class Channel:
    """Messages over one end of a socket pair.

    Arguments:
        end: one end of `socket.socketpair`.
        other: the name of the other process in errors.

    >>> ours, theirs = (Channel(end, "the other") for end in socket.socketpair())
    >>> ours.send({"do": "add"}, {"x": np.arange(3)}, timeout=1)
    >>> theirs.receive(timeout=1)
    ({'do': 'add'}, {'x': array([0, 1, 2])})
    >>> theirs.close()
    >>> ours.receive(timeout=1)
    Traceback (most recent call last):
    rl.channel.Ended: the other has ended
    """

    def __init__(self, end: socket.socket, other: str):
        self._end, self._other = end, other
        self._unread = bytearray()

    def send(self, message: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None, *, timeout: float):
        """Sends a message. Raises Ended if the other process does not take it within `timeout` seconds."""
        # safetensors writes the memory of an array, in whatever order its axes lie there.
        whole = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
        payload = safetensors.numpy.save(whole) if whole else b""
        line = json.dumps({"message": message, "bytes": len(payload)}).encode() + b"\n"
        self._end.settimeout(timeout)
        try:
            self._end.sendall(line + payload)
        except TimeoutError:
            raise Ended(f"{self._other} did not read for {timeout:g} s") from None
        except OSError as error:
            raise Ended(f"{self._other} has ended") from error

    def receive(self, *, timeout: float) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The next message and its arrays. Raises Ended if they are not complete within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (newline := self._unread.find(b"\n")) < 0:
            if len(self._unread) > LONGEST_LINE:
                raise Ended(f"{self._other} sent {len(self._unread)} bytes that are no message")
            self._read(deadline, timeout)
        head = json.loads(self._unread[:newline])
        size = head["bytes"]
        if not 0 <= size <= MOST_BYTES:
            raise Ended(f"{self._other} announced {size} bytes; at most {MOST_BYTES} are taken")
        while len(self._unread) < newline + 1 + size:
            self._read(deadline, timeout)
        payload = bytes(self._unread[newline + 1 : newline + 1 + size])
        del self._unread[: newline + 1 + size]
        return head["message"], safetensors.numpy.load(payload) if size else {}

    def close(self) -> None:
        """Ends the channel, which the other process notices."""
        self._end.close()

    def _read(self, deadline: float, timeout: float) -> None:
        try:
            self._end.settimeout(max(1e-3, deadline - time.monotonic()))
            more = self._end.recv(1 << 16)
        except TimeoutError:
            raise Ended(f"{self._other} said nothing for {timeout:g} s") from None
        except OSError as error:
            raise Ended(f"{self._other} has ended") from error
        if not more:
            raise Ended(f"{self._other} has ended")
        self._unread += more
