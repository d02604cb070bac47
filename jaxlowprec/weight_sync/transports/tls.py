"""TLS 1.3 under the handshake of the shared secret, for TCP.

The receiver listens, so it has the certificate: the caller's, or one that is made for it and signed by itself.
Each side then adds the hash of the certificate that it has or sees to its proof of the secret (see `handshake.py`).
Somebody in the middle would need another certificate, whose hash differs, or the private key: its proofs are refused.
So a certificate of no authority is as safe as the secret. An authority is checked in addition if the trainer names one.

Why not a key from the secret by TLS-PSK: Python offers that from 3.13 on, and this library supports 3.11. A certificate
works on every Python in the same way.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import pathlib
import socket
import ssl
import tempfile
from collections.abc import Iterable
from typing import Any

from jaxlowprec.weight_sync.errors import PeerLost
from jaxlowprec.weight_sync.transports.sockets import Deadline

Path = str | os.PathLike[str]

_DAYS = 3650  # of a certificate that is made; it lives as long as its receiver, and nobody checks the date
_END = "-----END CERTIFICATE-----"


class EncryptedSocket(ssl.SSLSocket):
    """A TLS connection with the methods of a socket that `sockets` and `stream` use.

    Python's own class sends plain bytes on after `shutdown`, and has neither `sendmsg` nor `recvmsg_into`.

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

    def recvmsg_into(self, buffers: Iterable[Any], *_: Any) -> Any:  # type: ignore[override]
        """Receives into the first buffer. Returns the number of bytes and nothing else that is of use."""
        return self.recv_into(next(iter(buffers))), [], 0, None

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receives and decrypts; 0 at the end."""
        try:
            return int(self.read(nbytes or len(buffer), buffer))  # type: ignore[arg-type]
        except ValueError as error:  # another thread closed it
            raise OSError(str(error)) from None

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
        _agree(connection, deadline, "the trainer did not agree on TLS; does it pass encrypt=True?")
        return self.binding


class ClientTls:
    """What a trainer wants of a receiver's certificate, beside the proof of the secret.

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

    def connect(self, connection: socket.socket, host: str, deadline: Deadline) -> tuple[EncryptedSocket, bytes]:
        """(the encrypted connection, what the proof of the secret has to cover). Takes the socket over.

        Raises:
            PeerLost: the receiver does not speak TLS 1.3, or its certificate is not the authority's or names another
            host. PeerTimeout: it was silent.
        """
        with connection:  # closed if it cannot be wrapped
            wrapped: EncryptedSocket = self._context.wrap_socket(  # type: ignore[assignment]
                connection, server_hostname=host, do_handshake_on_connect=False
            )
        try:
            _agree(wrapped, deadline, "the receiver did not agree on TLS; does it listen with encrypt=True?")
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
            "TcpReceiver: encrypt=True without a certificate makes one, which needs cryptography; "
            "pip install 'jaxlowprec[tls]', or give certificate= and key="
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
