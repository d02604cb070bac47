"""A handshake in which both ends of a connection prove that they hold the same secret, without sending it.

The engine's side speaks first. Lengths are fixed, and nothing is parsed:

    engine -> trainer   magic [8], engine's nonce [32]
    trainer -> engine   magic [8], trainer's nonce [32], HMAC-SHA256(key, "trainer", both nonces) [32]
    engine -> trainer   verdict [1]: 1, then HMAC-SHA256(key, "engine", both nonces) [32]; 0, then zeros

The magic ends in the protocol's version: sides with two versions refuse each other before they prove anything. The key
is SHA-256 of a label, the secret's length and the secret, because HMAC by itself treats a secret and the same secret
with zeros at its end, or a long secret and its hash, as equal. Fresh nonces of both sides make a recorded proof
worthless. Under TLS each proof also covers the hash of the receiver's certificate (`binding`; see `tls.py`), so that
nobody can stand between. The labels of the roles keep a peer from answering a challenge with the other side's own
answer. The two keys that sign the frames, one per direction, are derived from the same key and nonces.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import os
import socket
from collections.abc import Callable

from jaxlowprec.weight_sync.errors import PeerLost, SyncError
from jaxlowprec.weight_sync.transports.sockets import Deadline, receive, send_all

LEAST_SECRET_BYTES = 16
TIMEOUT = 5.0
"""Seconds that a peer has to prove itself."""

PROTOCOL = 2
"""The protocol and its version. In version 1, HMAC took the secret without hashing it first."""

_NAME = b"JLPSYNC"
_MAGIC = _NAME + bytes([PROTOCOL])
_NONCE, _PROOF = 32, 32


class NotAuthenticated(SyncError):
    """The other end does not hold the same secret.

    >>> str(NotAuthenticated("the secrets differ"))
    'the secrets differ'
    """


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys that sign the frames of one connection: one for each direction.

    >>> Keys(b"a", b"b").outgoing
    b'a'
    """

    outgoing: bytes
    incoming: bytes


def check_secret(secret: bytes | str) -> bytes:
    """The bytes of a secret.

    Raises:
        ValueError: it is shorter than 16 bytes. TypeError: it is neither bytes nor text.

    >>> len(check_secret("0123456789abcdef"))
    16
    >>> check_secret("hunter2")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: secret: has 7 bytes; needs at least 16 that nobody can guess; make one with python ...
    """
    if not isinstance(secret, bytes | str):
        raise TypeError(f"secret: is a {type(secret).__name__}; needs bytes or str")
    found = secret.encode() if isinstance(secret, str) else secret
    if len(found) < LEAST_SECRET_BYTES:
        raise ValueError(
            f"secret: has {len(found)} bytes; needs at least {LEAST_SECRET_BYTES} that nobody can guess; make one with "
            "python -c 'import secrets; print(secrets.token_hex(32))' and give it to both sides"
        )
    return found


def admit(connection: socket.socket, secret: bytes, timeout: float = TIMEOUT, binding: bytes = b"") -> Keys:
    """The engine's part: admits a trainer that holds the secret.

    Arguments:
        connection, secret, timeout: a connected socket, the secret, seconds for all of it.
        binding: what the proofs cover beside the nonces: nothing, or the hash of the certificate, 32 bytes.

    Raises:
        NotAuthenticated: it does not hold it. PeerLost: it was silent, went away, or speaks another protocol.

    >>> import threading
    >>> a, b = socket.socketpair()
    >>> thread = threading.Thread(target=introduce, args=(b, b"0123456789abcdef"))
    >>> thread.start()
    >>> len(admit(a, b"0123456789abcdef").outgoing)
    32
    >>> thread.join(); a.close(); b.close()
    """
    deadline = Deadline(timeout, "a proof of the secret")
    mine = os.urandom(_NONCE)
    send_all(connection, [_MAGIC, mine], deadline)
    _expect_magic(connection, deadline)
    theirs = bytes(receive(connection, _NONCE, deadline))
    proof = receive(connection, _PROOF, deadline)
    signed = _signer(secret, mine, theirs, binding)
    if not hmac.compare_digest(proof, signed(b"trainer")):
        send_all(connection, [bytes(1 + _PROOF)], deadline)
        raise NotAuthenticated("the trainer does not hold this receiver's secret")
    send_all(connection, [b"\x01", signed(b"engine")], deadline)
    return Keys(outgoing=signed(b"to trainer"), incoming=signed(b"to engine"))


def introduce(connection: socket.socket, secret: bytes, timeout: float = TIMEOUT, binding: bytes = b"") -> Keys:
    """The trainer's part: proves itself, and makes the engine prove itself. Arguments: see `admit`.

    Raises:
        NotAuthenticated: the secrets differ. PeerLost: no answer in time, or one of another protocol.

    >>> a, b = socket.socketpair()
    >>> a.sendall(b"HTTP/1.1 400 Bad Request")
    >>> introduce(b, b"0123456789abcdef", timeout=1.0)
    Traceback (most recent call last):
    jaxlowprec.weight_sync.errors.PeerLost: the peer speaks another protocol: it began with b'HTTP/1.1'
    >>> a.close(); b.close()
    """
    deadline = Deadline(timeout, "an answer to the handshake")
    _expect_magic(connection, deadline)
    theirs, mine = bytes(receive(connection, _NONCE, deadline)), os.urandom(_NONCE)
    signed = _signer(secret, theirs, mine, binding)
    send_all(connection, [_MAGIC, mine, signed(b"trainer")], deadline)
    verdict = receive(connection, 1, deadline)
    proof = receive(connection, _PROOF, deadline)
    if verdict != b"\x01":
        raise NotAuthenticated("the receiver refused the secret; both sides need the same one")
    if not hmac.compare_digest(proof, signed(b"engine")):
        raise NotAuthenticated("the receiver could not prove that it holds the secret; is it the right one?")
    return Keys(outgoing=signed(b"to engine"), incoming=signed(b"to trainer"))


def _expect_magic(connection: socket.socket, deadline: Deadline) -> None:
    magic = bytes(receive(connection, len(_MAGIC), deadline))
    if magic[:-1] == _NAME and magic != _MAGIC:
        raise PeerLost(
            f"the peer speaks version {magic[-1]} of the protocol, this side {PROTOCOL}; install the same jaxlowprec "
            "on both sides"
        )
    if magic != _MAGIC:
        raise PeerLost(f"the peer speaks another protocol: it began with {magic!r}")


def _key(secret: bytes) -> bytes:
    """HMAC's key: 32 bytes, which differ for different secrets."""
    return hashlib.sha256(b"jaxlowprec weight sync secret " + len(secret).to_bytes(8, "big") + secret).digest()


def _signer(secret: bytes, engine_nonce: bytes, trainer_nonce: bytes, binding: bytes) -> Callable[[bytes], bytes]:
    """A function from a role to its HMAC in this connection. The role ends at its zero, the nonces have fixed lengths:
    no two inputs are equal."""
    key, session = _key(secret), engine_nonce + trainer_nonce + binding

    def signed(role: bytes) -> bytes:
        return hmac.digest(key, b"jaxlowprec weight sync %d " % PROTOCOL + role + b"\0" + session, hashlib.sha256)

    return signed
