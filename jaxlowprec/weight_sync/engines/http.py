"""JSON over HTTP with a deadline for each call and a limit on the answer's size. Only complete answers count."""

from __future__ import annotations

import http.client
import io
import json
import socket
import urllib.parse
from typing import Any

from jaxlowprec.checkpoints.errors import escaped
from jaxlowprec.weight_sync.errors import PeerLost, PeerTimeout, Refused
from jaxlowprec.weight_sync.transports.sockets import Deadline

MAX_BYTES = 1 << 20
"""The most bytes of an answer."""

_MAX_REASON = 500  # characters


class HttpEngine:
    """Calls an engine's server.

    Arguments:
        url: "http://host:port", or https; it may have a path, which every call's path is appended to.
        api_key: sent as a bearer token, if any.
        without: what to do if the server has no such call, which errors of status 404 end with.

    Raises:
        ValueError: the URL is of another kind.

    >>> HttpEngine("localhost:30000")
    Traceback (most recent call last):
    ValueError: HttpEngine: url is 'localhost:30000'; needs http://host:port or https://host:port
    """

    def __init__(self, url: str, api_key: str | None = None, without: str = ""):
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port  # raises if it is no number, or too large
            whole = parts.scheme in ("http", "https") and parts.hostname and port != 0
        except (ValueError, TypeError, AttributeError):
            whole = False
        if not whole or parts.query or parts.username:
            raise ValueError(f"HttpEngine: url is {url!r}; needs http://host:port or https://host:port")
        self._parts, self._where, self._without = parts, f"{parts.scheme}://{parts.netloc}", without
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout: float,
        query: str = "",
        needs: str | None = None,
    ) -> dict[str, Any]:
        """Sends a request and returns the answer's object; {} if the answer is text or empty.

        Arguments:
            method, path, query, body: the request's.
            timeout: seconds for the whole call.
            needs: a field that an answer of status 200 must have to show that the call took effect.

        Raises:
            Refused: another status than 200, or a `success` that is not true; with the engine's reason.
            PeerTimeout: no answer in time. PeerLost: no connection, or an answer that is cut off or lacks `needs`. It
                is then unknown whether the call took effect.
        """
        status, answer = self._exchange(method, path + (f"?{query}" if query else ""), body, timeout)
        try:
            content = json.loads(answer)
        except (ValueError, RecursionError):
            content = None
        said = content if isinstance(content, dict) else {}
        if status != 200 or said.get("success", True) is not True:
            hint = f"; {self._without}" if status == 404 and self._without else ""
            raise Refused(f"{self._where}{path}: status {status}: {_reason(said, answer)}{hint}")
        if content is None and answer.lstrip().startswith((b"{", b"[")):
            raise self._incomplete(path, f"its JSON breaks off after {len(answer)} bytes")
        if needs is not None and needs not in said:
            raise self._incomplete(path, f"it has no {needs!r}")
        return said

    def _incomplete(self, path: str, fault: str) -> PeerLost:
        return PeerLost(f"{self._where}{path}: an incomplete answer, {fault}: the engine may have done it or not")

    def _exchange(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> tuple[int, bytes]:
        connect = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = connect(self._parts.hostname or "", self._parts.port, timeout=timeout)
        deadline = Deadline(timeout, "answer")
        try:
            connection.connect()
            connection.sock = _Timed(connection.sock, deadline)  # type: ignore[assignment]
            data = json.dumps(body).encode() if body is not None else b""
            connection.request(method, self._parts.path.rstrip("/") + path, data, self._headers)
            response = connection.getresponse()
            announced, answer = response.length, response.read(MAX_BYTES)
        except (TimeoutError, PeerTimeout):
            raise PeerTimeout(f"{self._where}{path}: no answer within {timeout:g} s") from None
        except http.client.IncompleteRead:
            raise self._incomplete(path, "its last chunk is missing") from None
        except (OSError, http.client.HTTPException, ValueError, OverflowError) as error:  # numbers that are none
            fault = escaped(str(error)[:_MAX_REASON].strip()) or type(error).__name__
            raise PeerLost(f"{self._where}{path}: {fault}; is the engine up?") from None
        finally:
            connection.close()
        if len(answer) < min(announced or 0, MAX_BYTES):
            raise self._incomplete(path, f"{len(answer)} of {announced} bytes")
        if announced is None and not response.chunked and not answer:
            raise self._incomplete(path, "it ends where it begins, without a length")
        return response.status, answer


def _reason(said: dict[str, Any], answer: bytes) -> str:
    """The reason of a failure in an answer, which has one of the forms of engines.

    >>> _reason({"error": {"message": "out of memory", "code": 500}}, b"")
    'out of memory'
    """
    reason = said.get("message") or said.get("error") or said.get("detail")
    if isinstance(reason, dict):
        reason = reason.get("message") or reason
    return escaped(str(reason or answer.decode(errors="replace"))[:_MAX_REASON])


class _Timed:
    """The part of a socket that `http.client` uses. All reads and writes share one deadline.

    A socket's own timeout is for each read: an answer that sends a byte now and then would never end.
    """

    def __init__(self, connection: socket.socket, deadline: Deadline):
        self._connection, self._deadline = connection, deadline

    def sendall(self, data: Any) -> None:
        left = memoryview(data)
        while left:
            self._connection.settimeout(self._deadline.left())
            left = left[self._connection.send(left) :]

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReads(self._connection, self._deadline))

    def close(self) -> None:
        self._connection.close()  # the file of `makefile` can be read until it is closed, too


class _TimedReads(io.RawIOBase):
    def __init__(self, connection: socket.socket, deadline: Deadline):
        self._connection, self._deadline = connection, deadline
        self._raw: Any = connection.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(self._deadline.left())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
