"""Weights over TCP, for trainers and engines on different machines, or in different containers of one machine.

Everything goes through TLS 1.3, within which both ends prove that they hold one secret (see `security.py`).
"""

from __future__ import annotations

import socket

from jaxlowprec.arguments import whole_number
from jaxlowprec.weight_sync.errors import PeerTimeout
from jaxlowprec.weight_sync.receiving.receiver import Receiver
from jaxlowprec.weight_sync.transports.protocol import Channel
from jaxlowprec.weight_sync.transports.receiving_end import MOST_STRANGERS, Listening
from jaxlowprec.weight_sync.transports.security import TIMEOUT, ClientTls, Path, ServerTls, check_secret, introduce
from jaxlowprec.weight_sync.transports.sockets import Deadline, check_timeout, close, no_connection
from jaxlowprec.weight_sync.transports.transport import RemoteTransport

_MOST_PORT = 65535


class TcpReceiver(Listening):
    """Listens for trainers and passes their requests to a receiver, in its own threads. A context manager.

    A trainer whose connection breaks, or that is silent for `timeout` seconds in its session, counts as dead: its
    session is aborted, the engine resumes, and the next trainer may connect. Peers that do not prove the secret within
    `handshake_timeout` seconds are dropped. They get no memory and no session, however many there are.

    Arguments:
        receiver: the receiver to pass requests to.
        secret: the secret that trainers have to hold, too: at least 16 bytes that nobody can guess.
        host, port: the address to listen at; port 0 chooses a free one, see `address`.
        timeout: seconds of silence, which have to cover the making of a bucket; also the most that a pause may take.
        handshake_timeout: seconds for the handshake, TLS included.
        certificate, key: PEM files with the certificate and its private key. None: a certificate is made, which the
            proofs of the secret confirm; needs `pip install 'jaxlowprec[serve]'`.

    Attributes:
        address: the (host, port) that it listens at.

    Raises:
        ValueError: the secret is too short, the timeout never ends, or the certificate and key are none. OSError: the
        address is not available or a file cannot be read. ImportError: making a certificate needs cryptography.

    >>> from jaxlowprec.weight_sync.bucket import pack
    >>> from jaxlowprec.weight_sync.manifest import Manifest
    >>> import numpy as np
    >>> secret = b"32 bytes of secrets.token_bytes "
    >>> receiver = Receiver()
    >>> bucket = pack(1, 0, True, {"a": np.ones(2, np.float32)})
    >>> manifest = Manifest(tuple(placed.entry for placed in bucket.entries))
    >>> with TcpReceiver(receiver, secret) as listening:
    ...     trainer = TcpTransport(*listening.address, secret)
    ...     trainer.pause(timeout=5)
    ...     trainer.begin(1, manifest, timeout=5)
    ...     trainer.send(bucket, timeout=5)
    ...     trainer.commit(1, manifest.hash, timeout=5)
    ...     trainer.resume(timeout=5)
    >>> receiver.version, receiver.weights["a"]
    (1, array([1., 1.], dtype=float32))
    """

    def __init__(
        self,
        receiver: Receiver,
        secret: bytes | str,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        timeout: float = 60.0,
        handshake_timeout: float = TIMEOUT,
        certificate: Path | None = None,
        key: Path | None = None,
    ):
        check_secret(secret)
        check_timeout("TcpReceiver", timeout)
        check_timeout("TcpReceiver", handshake_timeout)
        tls = ServerTls(certificate, key)
        port = whole_number("TcpReceiver", "port", port, 0, _MOST_PORT)
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=4 * MOST_STRANGERS)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        super().__init__(receiver, secret, listener, timeout, handshake_timeout, tls)


class TcpTransport(RemoteTransport):
    """A trainer's transport to a `TcpReceiver`. See `Transport`. Each session makes a new connection.

    Arguments:
        host, port: the receiver's address.
        secret: the receiver's.
        timeout: seconds for connecting and the handshake together, within the timeout of the call.
        authority: a PEM file with the certificate of the authority that signed the receiver's, or the receiver's own;
            it has to name `host`. None: any certificate that the holder of the secret confirms.

    Raises:
        NotAuthenticated: the secrets differ, or somebody stands between both sides. PeerLost: nothing, or something
        else, listens there, or its certificate is refused. ValueError, OSError: `authority` holds no certificate.

    >>> TcpTransport("127.0.0.1", 1, "0123456789abcdef").version(timeout=5)
    Traceback (most recent call last):
    jaxlowprec.weight_sync.errors.PeerLost: 127.0.0.1:1: Connection refused; needs a TcpReceiver that listens there
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes | str,
        timeout: float = TIMEOUT,
        *,
        authority: Path | None = None,
    ):
        port = whole_number("TcpTransport", "port", port, 0, _MOST_PORT)
        self._address, self._secret = (host, port), check_secret(secret)
        self._connecting = check_timeout("TcpTransport", timeout)
        self._tls = ClientTls(authority)
        super().__init__(self._dial)

    def _dial(self, timeout: float) -> Channel:
        deadline = Deadline(min(timeout, self._connecting), "connection")
        where = f"{self._address[0]}:{self._address[1]}"
        try:
            connection = socket.create_connection(self._address, deadline.left())
        except TimeoutError:
            raise PeerTimeout(f"{where}: no connection within {deadline.seconds:g} s") from None
        except OSError as error:
            raise no_connection(where, error, "a TcpReceiver") from None
        encrypted, binding = self._tls.connect(connection, self._address[0], deadline)
        try:
            introduce(encrypted, self._secret, deadline.left(), binding)
        except BaseException:
            close(encrypted)
            raise
        return Channel(encrypted)
