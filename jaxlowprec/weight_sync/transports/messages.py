"""The headers of a session's frames, other than those of buckets and manifests: versions, timeouts, answers."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable

from jaxlowprec.checkpoints.errors import brief
from jaxlowprec.weight_sync.bucket import MAX_VERSION
from jaxlowprec.weight_sync.errors import Aborted, PeerLost, PeerTimeout, Refused, SyncError
from jaxlowprec.weight_sync.manifest import Manifest, parse
from jaxlowprec.weight_sync.versions import newer, whole_number

MAX_BYTES = 1 << 16
"""The most bytes of each header except BEGIN's, which holds a manifest."""

_MAX_REASON = 4000  # characters
_VERSION = struct.Struct("!Q")
_ERRORS: dict[str, Callable[[str], SyncError]] = {
    "Refused": Refused,
    "Aborted": Aborted,
    "PeerTimeout": PeerTimeout,
    "PeerLost": PeerLost,
}


def write(**fields: object) -> bytes:
    """A header with a few fields.

    >>> write(version=3)
    b'{"version":3}'
    """
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()


def read_version(header: bytes) -> int:
    """The version in an answer. Raises ValueError for anything else.

    >>> read_version(write(version=3))
    3
    """
    version = parse("version", header, MAX_BYTES, {"version"})["version"]
    if type(version) is not int or not 0 <= version <= MAX_VERSION:
        raise ValueError(f"version: is {brief(version)}; needs a whole number from 0")
    return version


def read_timeout(header: bytes) -> float:
    """The seconds that a pause may take.

    >>> read_timeout(write(timeout=2.5))
    2.5
    >>> read_timeout(b'{"timeout": -1}')
    Traceback (most recent call last):
    ValueError: pause: timeout is -1; needs seconds, more than 0 and finite
    """
    timeout = parse("pause", header, MAX_BYTES, {"timeout"})["timeout"]
    if type(timeout) not in (int, float) or not timeout > 0 or not math.isfinite(timeout):
        raise ValueError(f"pause: timeout is {brief(timeout)}; needs seconds, more than 0 and finite")
    return float(timeout)


def write_commit(version: int, manifest_hash: str) -> bytes:
    """The header that `read_commit` reads.

    >>> read_commit(write_commit(3, "ab"))
    (3, 'ab')
    """
    return write(version=whole_number(version), manifest_hash=str(manifest_hash))


def read_commit(header: bytes) -> tuple[int, str]:
    """The version and manifest hash of a commit; the receiver compares them with its own.

    >>> read_commit(write(version=3, manifest_hash="ab"))
    (3, 'ab')
    """
    content = parse("commit", header, MAX_BYTES, {"version", "manifest_hash"})
    return content["version"], content["manifest_hash"]


def read_reason(header: bytes) -> str:
    """The reason of an abort.

    >>> read_reason(write(reason="the trainer stops"))
    'the trainer stops'
    """
    return str(parse("abort", header, MAX_BYTES, {"reason"})["reason"])[:_MAX_REASON]


def write_begin(version: int, manifest: Manifest) -> bytes:
    """The header with a version and its manifest.

    >>> read_begin(write_begin(3, Manifest(())))
    (3, Manifest(entries=(), scheme=None))
    """
    number = 0 if whole_number(version) == 0 else newer(version, 0)  # the receiver reports stale versions
    return _VERSION.pack(number) + manifest.to_json()


def read_begin(header: bytes, check: Callable[[], None] | None = None) -> tuple[int, Manifest]:
    """The inverse of `write_begin`. Raises ValueError for anything else. `check`: see `manifest.checked`.

    >>> read_begin(b"")
    Traceback (most recent call last):
    ValueError: begin: 0 bytes; needs a version and a manifest
    """
    if len(header) < _VERSION.size:
        raise ValueError(f"begin: {len(header)} bytes; needs a version and a manifest")
    return _VERSION.unpack_from(header)[0], Manifest.from_json(header[_VERSION.size :], check)


def write_error(error: Exception) -> bytes:
    """The header that tells the other side about an error.

    >>> read_error(write_error(Refused("version 3 is stale")))
    Refused('version 3 is stale')
    >>> read_error(write_error(OSError("no space left")))
    Refused('OSError: no space left')
    """
    kind = type(error).__name__
    reason = str(error) if kind in _ERRORS else f"{kind}: {error}"
    reason = reason[:_MAX_REASON].encode(errors="replace").decode()
    return write(error=kind if kind in _ERRORS else "Refused", reason=reason)


def read_error(header: bytes) -> SyncError:
    """The error that a header tells about."""
    content = parse("error", header, MAX_BYTES, {"error", "reason"})
    kind, reason = content["error"], content["reason"]
    return _ERRORS.get(kind, Refused)(reason) if isinstance(kind, str) else Refused(str(reason))
