"""JSON over HTTP with a deadline for each call and a bound on what is read."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import urllib.parse
from typing import Any

from jaxlowprec.weight_sync.errors import PeerLost, PeerTimeout, Refused
from jaxlowprec.weight_sync.sockets import Deadline

MAX_BYTES = 1 << 20
"""Of an answer."""

_MAX_REASON = 500  # characters


class HttpEngine:
    """An engine's server.

    Arguments:
        url: "http://host:port", or https, with a path that goes before every call's.
        api_key: sent as a bearer token, if any.

    Raises:
        ValueError: a URL of something else.

    >>> HttpEngine("localhost:30000")
    Traceback (most recent call last):
    ValueError: HttpEngine: url is 'localhost:30000'; needs http://host:port or https://host:port
    """

    def __init__(self, url: str, api_key: str | None = None):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise ValueError(f"HttpEngine: url is {url!r}; needs http://host:port or https://host:port")
        self._parts, self._where = parts, f"{parts.scheme}://{parts.netloc}"
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float, query: str = ""
    ) -> dict[str, Any]:
        """Sends a request, and gives the answer's object; {} for one that is no JSON object.

        Raises:
            Refused: another status than 200, or `"success": false`; with what the engine says.
            PeerTimeout: no answer in time: whether the call took effect is unknown. PeerLost: no connection.
        """
        status, answer = self._exchange(method, path + (f"?{query}" if query else ""), body, timeout)
        try:
            content = json.loads(answer)
        except (ValueError, RecursionError):
            content = None
        said = content if isinstance(content, dict) else {}
        if status != 200 or said.get("success") is False:
            reason = said.get("message") or said.get("error") or said.get("detail") or answer.decode(errors="replace")
            raise Refused(f"{self._where}{path}: status {status}: {str(reason)[:_MAX_REASON]}")
        return said

    def _exchange(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> tuple[int, bytes]:
        connect = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = connect(self._parts.hostname or "", self._parts.port, timeout=timeout)
        deadline = Deadline(timeout, "answer")
        late = threading.Event()
        timer: threading.Timer | None = None
        try:
            connection.connect()
            timer = threading.Timer(deadline.left(), _cut, (connection.sock, late))
            timer.daemon = True
            timer.start()  # the socket's own timeout is for each byte: a slow answer would have no end
            data = json.dumps(body).encode() if body is not None else b""
            connection.request(method, self._parts.path.rstrip("/") + path, data, self._headers)
            response = connection.getresponse()
            answer = response.read(MAX_BYTES)
            if late.is_set():
                raise TimeoutError
            return response.status, answer
        except (OSError, http.client.HTTPException, PeerTimeout) as error:
            if late.is_set() or isinstance(error, TimeoutError | PeerTimeout):
                raise PeerTimeout(f"{self._where}{path}: no answer within {timeout:g} s") from None
            fault = str(error) or type(error).__name__
            raise PeerLost(f"{self._where}{path}: {fault}; is the engine up?") from None
        finally:
            if timer is not None:
                timer.cancel()
            connection.close()


def _cut(connection: socket.socket, late: threading.Event) -> None:
    """Ends a connection whose time is over, which wakes whoever reads it."""
    late.set()
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
