"""TLS: nothing is readable, no side falls back to plain bytes, and nobody can stand between the two sides."""

import contextlib
import os
import socket
import sys
import threading

import pytest
from cryptography import x509

from jaxlowprec.weight_sync.errors import PeerLost, SyncError
from jaxlowprec.weight_sync.receiving.receiver import Receiver
from jaxlowprec.weight_sync.transports.security import ClientTls, NotAuthenticated, ServerTls, admit, introduce
from jaxlowprec.weight_sync.transports.sockets import Deadline
from jaxlowprec.weight_sync.transports.tcp import TcpReceiver, TcpTransport
from tests.weight_sync.relay import Relay
from tests.weight_sync.syncing import SECRET, connected, is_whole, model, over_tcp, packed, sync


def trainer_of(listening, secret=SECRET, **options):
    return TcpTransport(*listening.address, secret, timeout=60, **options)


def certificate(folder, name, host="127.0.0.1", authority=None):
    """(certificate file, key file), signed by itself or by an authority: its (certificate, key) objects."""
    import datetime
    import ipaddress

    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    signer, signing = (subject, key) if authority is None else (authority[0].subject, authority[1])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
    made = (
        x509.CertificateBuilder(signer, subject, key.public_key(), x509.random_serial_number(), now - day, now + day)
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
        .sign(signing, hashes.SHA256())
    )
    crt, pem = folder / f"{name}.crt", folder / f"{name}.key"
    crt.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    pem.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return crt, pem, (made, key)


def undamaged(address):
    """A relay that only keeps what it passes on."""
    return Relay(address, "flip", to_engine=True, place=-1, size=1)


def test_the_wire_shows_nothing():
    with over_tcp() as (receiver, listening, _, _):
        relay = undamaged(listening.address)
        transport = TcpTransport(*relay.address, SECRET, timeout=60)
        transport.pause(60)
        manifest, buckets = packed(model(0x41424344), 1)
        transport.begin(1, manifest, 60)
        for bucket in buckets:
            transport.send(bucket, 60)
        transport.commit(1, manifest.hash, 60)
        transport.resume(60)
        transport.close()
        assert is_whole(receiver.weights, 0x41424344)
        relay.close()
        seen = bytes(relay.seen[True] + relay.seen[False])
        assert len(seen) > sum(bucket.payload.nbytes for bucket in buckets)
        assert seen[:3] == b"\x16\x03\x01"  # TLS from the first byte on
        for plain in (b"DCBA" * 4, b"layer.0.q", b"JLPF", b"JLPSYNC"):
            assert plain not in seen


def in_the_middle(listening):
    """The address of somebody who has a certificate of its own for each side and passes everything on."""
    server = socket.create_server(("127.0.0.1", 0))

    def run():
        with contextlib.suppress(OSError, SyncError, ValueError), server:
            tls = ServerTls(None, None)
            one = tls.wrapped(server.accept()[0])
            tls.agree(one, Deadline(3, "x"))
            other, _ = ClientTls(None).connect(socket.create_connection(listening.address), "x", Deadline(3, "x"))
            with one, other:
                for connection in (one, other):
                    connection.settimeout(60)
                one.sendall(other.recv(1000))  # the challenge
                other.sendall(one.recv(1000))  # the trainer's proof
                one.sendall(other.recv(1000))  # the verdict

    thread = threading.Thread(target=run)
    thread.start()
    return server.getsockname(), thread


def test_somebody_in_the_middle_is_refused():
    with over_tcp() as (receiver, listening, _, engine):
        sync(trainer_of(listening), 1)
        address, thread = in_the_middle(listening)
        with pytest.raises(NotAuthenticated):
            TcpTransport(*address, SECRET, timeout=60).pause(60)
        thread.join(60)
        assert receiver.state == "serving" and is_whole(receiver.weights, 1) and not engine.paused


@pytest.mark.parametrize(("one", "other"), [(b"a" * 32, b"b" * 32), (b"", b"a" * 32), (b"a" * 32, b"")])
def test_proofs_over_other_certificates_are_refused(one, other):
    a, b = socket.socketpair()
    found = []

    def run():
        with pytest.raises(NotAuthenticated) as raised:
            admit(a, SECRET, 2.0, one)
        found.append(raised)

    thread = threading.Thread(target=run)
    thread.start()
    with pytest.raises(NotAuthenticated):
        introduce(b, SECRET, 2.0, other)
    thread.join()
    assert found
    a.close()
    b.close()


def test_a_trainer_of_version_2_without_tls_is_not_let_in():
    with over_tcp(handshake_timeout=0.5) as (receiver, listening, _, _):
        with socket.create_connection(listening.address) as connection, pytest.raises(PeerLost, match="went away"):
            introduce(connection, SECRET)  # it waits for the first byte, as the receiver does
        assert receiver.state == "serving"


def test_a_receiver_of_version_2_without_tls_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as old:
        thread = threading.Thread(target=lambda: old.accept()[0].sendall(b"JLPSYNC\x02" + bytes(32)))
        thread.start()
        with pytest.raises(PeerLost, match="did not agree on TLS 1.3; is it one of the same jaxlowprec"):
            TcpTransport(*old.getsockname(), SECRET, timeout=60).pause(60)
        thread.join()


def test_an_older_tls_is_refused():
    import ssl

    with over_tcp() as (receiver, listening, _, _):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with socket.create_connection(listening.address) as connection, pytest.raises(ssl.SSLError):
            context.wrap_socket(connection)
        sync(trainer_of(listening), 1)
        assert is_whole(receiver.weights, 1)


def test_a_recorded_connection_played_again_does_nothing():
    with over_tcp(handshake_timeout=1) as (receiver, listening, _, engine):
        relay = undamaged(listening.address)
        sync(TcpTransport(*relay.address, SECRET, timeout=60), 1)
        relay.close()
        sent = relay.seen[True]
        assert len(sent) > 1000
        with socket.create_connection(listening.address) as again, contextlib.suppress(OSError):
            again.sendall(bytes(sent))
            again.settimeout(60)
            while again.recv(1000):
                pass
        assert receiver.version == 1 and receiver.state == "serving" and not engine.paused


@pytest.mark.parametrize("signed", ["by itself", "by an authority"])
def test_a_certificate_is_checked_by_an_authority(tmp_path, signed):
    ca, _, authority = certificate(tmp_path, "ca")
    crt, key, _ = certificate(tmp_path, "engine", authority=None if signed == "by itself" else authority)
    stranger, _, _ = certificate(tmp_path, "stranger")
    trusted = crt if signed == "by itself" else ca
    with over_tcp(certificate=crt, key=key) as (receiver, listening, _, _):
        sync(trainer_of(listening, authority=trusted), 1)
        assert is_whole(receiver.weights, 1)
        with pytest.raises(PeerLost, match="certificate is refused"):
            trainer_of(listening, authority=stranger).pause(60)
        sync(trainer_of(listening), 2)  # the secret alone


def test_a_certificate_for_another_host_is_refused(tmp_path):
    crt, key, _ = certificate(tmp_path, "engine", host="10.1.2.3")
    with (
        over_tcp(certificate=crt, key=key) as (_, listening, _, _),
        pytest.raises(PeerLost, match="certificate is refused: IP address mismatch"),
    ):
        trainer_of(listening, authority=crt).pause(60)


def test_files_that_are_none_are_errors_that_name_them(tmp_path):
    crt, key, _ = certificate(tmp_path, "engine")
    _, other, _ = certificate(tmp_path, "other")
    noise = tmp_path / "noise"
    noise.write_bytes(os.urandom(300))
    for options, match in (
        ({"certificate": noise, "key": key}, "noise: no certificate in PEM"),
        ({"certificate": crt, "key": other}, "other.key: not the private key of"),
        ({"certificate": crt, "key": noise}, "noise: not the private key of"),
        ({"key": key}, "without a certificate"),
    ):
        with pytest.raises(ValueError, match=match):
            TcpReceiver(Receiver(), SECRET, **options)
    with pytest.raises(FileNotFoundError):
        TcpReceiver(Receiver(), SECRET, certificate=tmp_path / "none")
    with pytest.raises(ValueError, match="authority: .*noise: no certificate"):
        TcpTransport("127.0.0.1", 1, SECRET, authority=noise)


def test_a_missing_package_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ImportError, match=r"making a certificate needs cryptography; pip install .jaxlowprec\[serve\]"):
        TcpReceiver(Receiver(), SECRET)


def test_a_given_certificate_needs_no_package(tmp_path, monkeypatch):
    crt, key, _ = certificate(tmp_path, "engine")
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with over_tcp(certificate=crt, key=key) as (receiver, _, transport, _):
        sync(transport, 1)
        assert is_whole(receiver.weights, 1)


def test_a_channel_knows_whether_its_peer_is_there():
    with over_tcp() as (_, listening, _, _):
        channel = connected(listening)
        channel.check_peer()
        listening.close()
        with pytest.raises(PeerLost, match="the peer went away"):
            channel.check_peer()
        channel.close()


@pytest.mark.parametrize("noise", [b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET / HTTP/1.1\r\n\r\n"])
def test_strangers_are_dropped_and_keep_no_trainer_out(noise):
    with over_tcp(handshake_timeout=2) as (receiver, listening, _, _):
        strangers = [socket.create_connection(listening.address) for _ in range(40)]
        for stranger in strangers:
            with contextlib.suppress(OSError):
                stranger.sendall(noise)
        sync(trainer_of(listening), 1)
        assert is_whole(receiver.weights, 1)
        for stranger in strangers:
            stranger.settimeout(60)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(1000):
                    pass
            stranger.close()
