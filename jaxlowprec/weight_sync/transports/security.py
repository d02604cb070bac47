"""TLS 1.3, and how both ends of a connection prove that they hold the same secret, without sending it.

Every TCP connection begins with the handshake of TLS. Then the engine's side speaks first. Lengths are fixed, and
nothing is parsed:

    engine -> trainer   magic [8], engine's nonce [32]
    trainer -> engine   magic [8], trainer's nonce [32], HMAC-SHA256(key, "trainer", both nonces) [32]
    engine -> trainer   verdict [1]: 1, then HMAC-SHA256(key, "engine", both nonces) [32]; 0, then zeros

The magic ends in the protocol's version: sides with two versions refuse each other before they prove anything. The key
is SHA-256 of a label, the secret's length and the secret, because HMAC by itself treats a secret and the same secret
with zeros at its end, or a long secret and its hash, as equal. Fresh nonces of both sides make a recorded proof
worthless. The labels of the roles keep a peer from answering a challenge with the other side's own answer.

The receiver listens, so it has the certificate: the caller's, or one that is made for it and signed by itself. Each
side adds the hash of the certificate that it has or sees to its proof of the secret (`binding`). Somebody in the middle
would need another certificate, whose hash differs, or the private key: its proofs are refused. So a certificate of no
authority is as safe as the secret. An authority is checked in addition if the trainer names one.

A Unix socket has no TLS (`binding` is empty): the kernel carries its bytes within one machine, the mode of its path
says who may connect, and shared memory is given as a file descriptor, which TLS cannot carry.

Why not a key from the secret by TLS-PSK: Python offers that from 3.13 on, and this library supports 3.11. A certificate
works on every Python in the same way.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import os
import pathlib
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

from jaxlowprec.weight_sync.errors import PeerLost, SyncError
from jaxlowprec.weight_sync.transports.sockets import Deadline, receive, send_all

LEAST_SECRET_BYTES = 16
TIMEOUT = 5.0
"""Seconds that a peer has to prove itself."""

PROTOCOL = 3
"""The protocol's version. Version 1 did not hash the secret; version 2 signed each frame and used TLS only if told."""

_NAME = b"JLPSYNC"
_MAGIC = _NAME + bytes([PROTOCOL])
_NONCE, _PROOF = 32, 32


class NotAuthenticated(SyncError):
    """The other end does not hold the same secret.

    >>> str(NotAuthenticated("the secrets differ"))
    'the secrets differ'
    """


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


def admit(connection: socket.socket, secret: bytes, timeout: float = TIMEOUT, binding: bytes = b"") -> None:
    """The engine's part: admits a trainer that holds the secret.

    Arguments:
        connection, secret, timeout: a connected socket, the secret, seconds for all of it.
        binding: what the proofs cover beside the nonces: the hash of the certificate, 32 bytes; nothing without TLS.

    Raises:
        NotAuthenticated: it does not hold it. PeerLost: it was silent, went away, or speaks another protocol.

    >>> import threading
    >>> a, b = socket.socketpair()
    >>> thread = threading.Thread(target=introduce, args=(b, b"0123456789abcdef"))
    >>> thread.start()
    >>> admit(a, b"0123456789abcdef")
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


def introduce(connection: socket.socket, secret: bytes, timeout: float = TIMEOUT, binding: bytes = b"") -> None:
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


Path = str | os.PathLike[str]

_DAYS = 3650  # of a certificate that is made; it lives as long as its receiver, and nobody checks the date
_END = "-----END CERTIFICATE-----"


class EncryptedSocket(ssl.SSLSocket):
    """A TLS connection with the methods of a socket that `sockets` and `protocol` use.

    Python's own class sends plain bytes on after `shutdown`, has no `sendmsg`, and receives one record of 16 KiB in a
    call.

    >>> issubclass(EncryptedSocket, socket.socket)
    True
    """

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:  # type: ignore[override]
        """Encrypts and sends the first buffers, together if they are short. Returns the number of bytes sent."""
        views = list(buffers)
        first = views[0]
        if first.nbytes < _RECORD and len(views) > 1:
            first = b"".join(_short(views))
        try:
            return self.write(first)
        except ValueError as error:  # another thread closed it
            raise OSError(str(error)) from None

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receives and decrypts a record, and as many more as are there already. Returns the bytes; 0 at the end."""
        view = memoryview(buffer)
        try:
            got = more = int(self.read(view.nbytes, view))  # type: ignore[arg-type]
            self.settimeout(0)  # whoever calls sets a timeout before each call
            with contextlib.suppress(ssl.SSLWantReadError):
                while more and got < view.nbytes:
                    more = int(self.read(view.nbytes - got, view[got:]))  # type: ignore[arg-type]
                    got += more
        except ValueError as error:  # another thread closed it
            raise OSError(str(error)) from None
        return got

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Receives; with MSG_PEEK it looks at what has come, still encrypted."""
        return socket.socket.recv(self, buflen, flags) if flags == socket.MSG_PEEK else super().recv(buflen, flags)

    def shutdown(self, how: int) -> None:
        """Ends the connection below TLS: no thread can send plain bytes meanwhile."""
        socket.socket.shutdown(self, how)


_RECORD = 16384  # the most bytes of a TLS record


def _short(views: list[memoryview]) -> list[memoryview]:
    """The first views that fit in a record together."""
    taken, total = [], 0
    for view in views:
        total += view.nbytes
        if total > _RECORD // 2:
            break
        taken.append(view)
    return taken or views[:1]


class ServerTls:
    """The receiver's certificate.

    Arguments:
        certificate: a PEM file with the receiver's certificate, first, and those that lead to its authority. None: one
            is made, with a key that exists in this process only.
        key: a PEM file with the certificate's private key, without a password. None: it is in the same file.

    Raises:
        ValueError: a key without a certificate, or files that do not hold a certificate and its key. OSError: a file
        cannot be read. ImportError: a certificate has to be made, and the package cryptography is not installed.

    >>> ServerTls(None, "engine.key")
    Traceback (most recent call last):
    ValueError: TcpReceiver: key='engine.key' without a certificate; give certificate=, too
    """

    def __init__(self, certificate: Path | None, key: Path | None):
        if certificate is None and key is not None:
            raise ValueError(f"TcpReceiver: key={os.fspath(key)!r} without a certificate; give certificate=, too")
        self._context = _context(ssl.PROTOCOL_TLS_SERVER)
        self._context.num_tickets = 0  # no connection is resumed: each proves the secret
        if certificate is None:
            self.binding = _made(self._context)
        else:
            self.binding = _given(self._context, pathlib.Path(certificate), key)

    def wrapped(self, connection: socket.socket) -> EncryptedSocket:
        """A connection that `agree` encrypts. Takes the socket over; sends and receives nothing yet."""
        return self._context.wrap_socket(  # type: ignore[return-value]
            connection, server_side=True, do_handshake_on_connect=False
        )

    def agree(self, connection: EncryptedSocket, deadline: Deadline) -> bytes:
        """Agrees on keys with a trainer. Returns what its proof of the secret has to cover, 32 bytes.

        Raises:
            PeerLost: the trainer does not speak TLS 1.3 or does not trust the certificate. PeerTimeout: it was silent.
        """
        _agree(connection, deadline, "the trainer did not agree on TLS 1.3; does it run the same jaxlowprec?")
        return self.binding


class ClientTls:
    """The certificate that a trainer accepts of a receiver, beside the proof of the secret.

    Arguments:
        authority: a PEM file with the certificate of the authority that signed the receiver's, or the receiver's own;
            it has to name the host. None: any certificate that the holder of the secret confirms.

    Raises:
        ValueError: the file holds no certificate. OSError: it cannot be read.

    >>> ClientTls(None) is not None
    True
    """

    def __init__(self, authority: Path | None):
        self._context = _context(ssl.PROTOCOL_TLS_CLIENT)
        if authority is None:
            self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE
            return
        self._context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        path = pathlib.Path(authority)
        _first(path, "TcpTransport: authority")
        self._context.load_verify_locations(path)

    def wrapped(self, connection: socket.socket, host: str) -> EncryptedSocket:
        """A connection to encrypt. Takes the socket over; sends and receives nothing yet."""
        return self._context.wrap_socket(  # type: ignore[return-value]
            connection, server_hostname=host, do_handshake_on_connect=False
        )

    def connect(self, connection: socket.socket, host: str, deadline: Deadline) -> tuple[EncryptedSocket, bytes]:
        """(the encrypted connection, what the proof of the secret has to cover). Takes the socket over.

        Raises:
            PeerLost: the receiver does not speak TLS 1.3, or its certificate is not the authority's or names another
            host. PeerTimeout: it was silent.
        """
        with connection:  # closed if it cannot be wrapped
            wrapped = self.wrapped(connection, host)
        try:
            _agree(wrapped, deadline, "the receiver did not agree on TLS 1.3; is it one of the same jaxlowprec?")
            seen = wrapped.getpeercert(binary_form=True)
            if not seen:
                raise PeerLost("the receiver showed no certificate")
        except BaseException:
            wrapped.close()
            raise
        return wrapped, hashlib.sha256(seen).digest()


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslsocket_class = EncryptedSocket
    return context


def _agree(connection: EncryptedSocket, deadline: Deadline, otherwise: str) -> None:
    try:
        connection.settimeout(deadline.left())
        connection.do_handshake()
    except TimeoutError:
        raise deadline.missed() from None
    except ssl.SSLCertVerificationError as error:
        raise PeerLost(
            f"the receiver's certificate is refused: {error.verify_message}; give the authority= that signed it, and "
            "the host that it names"
        ) from None
    except (OSError, ValueError) as error:
        raise PeerLost(f"{otherwise} ({getattr(error, 'reason', None) or error})") from None


def _given(context: ssl.SSLContext, certificate: pathlib.Path, key: Path | None) -> bytes:
    """Loads a certificate and its key; the certificate's hash."""
    der = _first(certificate, "TcpReceiver: certificate")
    try:
        context.load_cert_chain(certificate, key, password=lambda: b"")  # never asks at a terminal
    except ssl.SSLError as error:
        where = certificate if key is None else os.fspath(key)
        raise ValueError(
            f"TcpReceiver: {where}: not the private key of {certificate}, or one with a password ({error.reason}); "
            "needs its key in PEM without a password"
        ) from None
    return hashlib.sha256(der).digest()


def _first(path: pathlib.Path, who: str) -> bytes:
    """The first certificate in a PEM file."""
    text = path.read_bytes().decode("ascii", "replace")
    begin, end = text.find(ssl.PEM_HEADER), text.find(_END)
    try:
        if begin < 0 or end < begin:
            raise ValueError
        return ssl.PEM_cert_to_DER_cert(text[begin : end + len(_END)])
    except ValueError:
        raise ValueError(f"{who}: {path}: no certificate in PEM; needs one that begins with {ssl.PEM_HEADER}") from None


def _made(context: ssl.SSLContext) -> bytes:
    """Makes a key and a certificate that it signs, and loads them; the certificate's hash."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise ImportError(
            "TcpReceiver: making a certificate needs cryptography; pip install 'jaxlowprec[serve]', or give "
            "certificate="
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "jaxlowprec weight sync")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + _DAYS * day)
    ).sign(key, hashes.SHA256())
    with tempfile.TemporaryDirectory() as folder:  # mode 0700; ssl reads keys from files only
        path = pathlib.Path(folder, "both.pem")
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            + made.public_bytes(serialization.Encoding.PEM)
        )
        context.load_cert_chain(path)
    return hashlib.sha256(made.public_bytes(serialization.Encoding.DER)).digest()
