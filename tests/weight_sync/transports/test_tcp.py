"""Weights over TCP: whatever a peer does, a complete version is served and the engine goes on."""

import gc
import os
import pathlib
import socket
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlowprec.weight_sync.bucket import BucketHeader
from jaxlowprec.weight_sync.errors import PeerLost, PeerTimeout, Refused
from jaxlowprec.weight_sync.receiving.receiver import Receiver
from jaxlowprec.weight_sync.transports.protocol import Kind
from jaxlowprec.weight_sync.transports.receiving_end import MOST_STRANGERS
from jaxlowprec.weight_sync.transports.security import ClientTls, NotAuthenticated
from jaxlowprec.weight_sync.transports.sockets import Deadline
from jaxlowprec.weight_sync.transports.tcp import TcpReceiver, TcpTransport
from jaxlowprec.weight_sync.transports.transport import Transport
from tests.weight_sync.syncing import SECRET, connected, is_whole, model, over_tcp, packed, sync


def test_versions_arrive_whole_one_after_the_other():
    with over_tcp() as (receiver, _, transport, engine):
        assert isinstance(transport, Transport)
        assert transport.version(timeout=60) == 0
        for version in (1, 2, 7):
            sync(transport, version)
            assert transport.version(timeout=60) == receiver.version == version
            assert is_whole(receiver.weights, version)
            assert receiver.state == "serving" and engine.paused == 0


def test_it_listens_on_loopback_unless_told_otherwise():
    with TcpReceiver(Receiver(), SECRET) as listening:
        assert listening.address[0] == "127.0.0.1"


def test_every_refusal_reaches_the_trainer_with_its_reason():
    with over_tcp() as (receiver, _, transport, _):
        sync(transport, 5)
        manifest, buckets = packed(model(6), 6)
        with pytest.raises(PeerLost, match="no session is open"):
            transport.begin(6, manifest, 60)
        transport.pause(60)
        with pytest.raises(Refused, match="version 5 is stale"):
            transport.begin(5, manifest, 60)
        with pytest.raises(Refused, match="no version is being received"):
            transport.send(buckets[0], 60)
        transport.begin(6, manifest, 60)
        with pytest.raises(Refused, match="out of order; 0 comes next"):
            transport.send(buckets[1], 60)
        transport.send(buckets[0], 60)
        with pytest.raises(Refused, match="is there already"):
            transport.send(buckets[0], 60)
        buckets[1].payload[3] ^= 1
        with pytest.raises(Refused, match="is corrupt: checksum"):
            transport.send(buckets[1], 60)
        buckets[1].payload[3] ^= 1
        with pytest.raises(Refused, match="incomplete"):
            transport.commit(6, manifest.hash, 60)
        assert receiver.version == 5 and is_whole(receiver.weights, 5)
        for bucket in buckets[1:]:  # and it goes on where it was
            transport.send(bucket, 60)
        with pytest.raises(Refused, match="commit: manifest"):
            transport.commit(6, "0" * 64, 60)
        transport.commit(6, manifest.hash, 60)
        transport.resume(60)
        assert is_whole(receiver.weights, 6)


def test_an_abort_leaves_the_old_version():
    with over_tcp() as (receiver, _, transport, engine):
        sync(transport, 1)
        manifest, buckets = packed(model(2), 2)
        transport.pause(60)
        transport.begin(2, manifest, 60)
        transport.send(buckets[0], 60)
        transport.abort("changed its mind", 60)
        transport.resume(60)
        assert is_whole(receiver.weights, 1) and engine.paused == 0
        sync(transport, 2)
        assert is_whole(receiver.weights, 2)


def test_a_block_closes_it_at_its_end():
    with over_tcp() as (receiver, listening, *_):
        with TcpTransport(*listening.address, SECRET, timeout=60) as transport:
            sync(transport, 1)
        assert is_whole(receiver.weights, 1)
        with pytest.raises(ValueError, match="the transport is closed; make another"):
            transport.pause(60)


def test_another_secret_lets_nobody_in():
    with over_tcp() as (receiver, listening, transport, _):
        stranger = TcpTransport(*listening.address, b"another secret, as long as that", timeout=60)
        with pytest.raises(NotAuthenticated, match="both sides need the same"):
            stranger.pause(60)
        sync(transport, 1)
        assert is_whole(receiver.weights, 1)


def test_a_second_session_is_refused_with_the_reason():
    with over_tcp() as (receiver, listening, transport, _):
        transport.pause(60)
        second = TcpTransport(*listening.address, SECRET, timeout=60)
        with pytest.raises(Refused, match="another trainer, 127.0.0.1, has had a session open for 0 s"):
            second.pause(60)
        assert second.version(60) == 0  # to ask is allowed
        second.resume(60)  # and does not end the first one's session
        assert receiver.state == "paused"
        transport.resume(60)
        sync(second, 1)
        assert is_whole(receiver.weights, 1)


def test_verbs_without_a_session_of_ones_own_are_refused():
    with over_tcp() as (receiver, listening, transport, _):
        transport.pause(60)
        manifest, buckets = packed(model(1), 1)
        channel = connected(listening)
        for kind, header, payload in (
            (Kind.BEGIN, bytes(8) + manifest.to_json(), b""),
            (Kind.BUCKET, buckets[0].header.to_json(), buckets[0].payload),
            (Kind.COMMIT, b"{}", b""),
        ):
            channel.send(kind, header, [payload], deadline=Deadline(60, "room"))
            answer = channel.receive(Deadline(60, "answer"))
            assert answer.kind is Kind.FAILED and b"pause first" in answer.header
        for kind in (Kind.ABORT, Kind.RESUME):
            channel.send(kind, deadline=Deadline(60, "room"))
            assert channel.receive(Deadline(60, "answer")).kind is Kind.DONE
        assert receiver.state == "paused"
        channel.close()
        time.sleep(0.1)
        assert receiver.state == "paused"  # the end of a connection without a session ends no session
        transport.resume(60)


@pytest.mark.parametrize(
    "stage", ["paused", "begun", "a bucket sent", "within a bucket", "within a header", "within a record"]
)
@pytest.mark.parametrize("end", ["closed", "silent"])
def test_a_dead_trainer_leaves_the_old_version(stage, end):
    with over_tcp(timeout=60 if end == "closed" else 1.0) as (receiver, listening, transport, engine):
        sync(transport, 1)
        manifest, buckets = packed(model(2), 2)
        dying = TcpTransport(*listening.address, SECRET, timeout=60)
        dying.pause(60)
        if stage != "paused":
            dying.begin(2, manifest, 60)
        if stage == "a bucket sent":
            dying.send(buckets[0], 60)
        connection = dying._channel.connection
        if stage == "within a header":
            connection.sendall(b"JLPF\x04\0")
        if stage == "within a record":
            socket.socket.send(connection, b"\x17\x03\x03\x40\x00 of which a part came")
        if stage == "within a bucket":
            send_half(dying._channel, buckets[0])
        assert engine.paused == 1 and is_whole(receiver.weights, 1)
        if end == "closed":
            connection.close()
        assert engine.resumed.wait(60)
        assert receiver.state == "serving" and is_whole(receiver.weights, 1)
        sync(transport, 2)
        assert is_whole(receiver.weights, 2)
        with pytest.raises(PeerLost):
            dying.resume(1)
        dying.resume(1)  # it knows now that nothing is left to do


def send_half(channel, bucket):
    """A bucket's frame of which half of the payload comes."""
    connection, missing = channel.connection, bucket.payload.nbytes // 2

    class Cut:
        def settimeout(self, seconds):
            connection.settimeout(seconds)

        def sendmsg(self, buffers):
            whole = b"".join(buffers)
            connection.sendall(whole[:-missing])
            return len(whole)

    channel.connection = Cut()
    channel.send(Kind.BUCKET, bucket.header.to_json(), [bucket.payload], deadline=Deadline(60, "room"))
    channel.connection = connection


@settings(max_examples=60)
@given(st.data())
def test_frames_with_wrong_contents_are_refused(data):
    """What a trainer that holds the secret but is broken may send: the receiver answers each, and serves."""
    manifest, buckets = packed(model(2), 2)
    with over_tcp(timeout=5) as (receiver, listening, transport, engine):
        sync(transport, 1)
        channel = connected(listening)

        def ask(kind, header, payload=b""):
            channel.send(kind, header, [payload], deadline=Deadline(60, "room"))
            return channel.receive(Deadline(60, "answer"))

        assert ask(Kind.PAUSE, b'{"timeout":5}').kind is Kind.DONE
        texts = {
            Kind.PAUSE: b'{"timeout":5}',
            Kind.BEGIN: (2).to_bytes(8, "big") + manifest.to_json(),
            Kind.BUCKET: buckets[0].header.to_json(),
            Kind.COMMIT: b'{"version":2,"manifest_hash":"' + manifest.hash.encode() + b'"}',
            Kind.ABORT: b'{"reason":"x"}',
        }
        for _ in range(data.draw(st.integers(1, 6))):
            kind = data.draw(st.sampled_from([*texts, Kind.DONE]))
            header = bytearray(texts.get(kind, b""))
            for _ in range(data.draw(st.integers(0, 3))):
                if header:
                    header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
            header = bytes(header[: data.draw(st.integers(0, len(header)))] if data.draw(st.booleans()) else header)
            payload = b""
            if kind is Kind.BUCKET:
                payload = bytes(buckets[0].payload)
                try:
                    if BucketHeader.from_json(header).nbytes != len(payload):
                        continue
                except ValueError:
                    pass
            assert ask(kind, header, payload).kind in (Kind.DONE, Kind.FAILED)
            assert receiver.version == 1 and is_whole(receiver.weights, 1)
        channel.close()
        assert engine.resumed.wait(60)
        sync(transport, 3)
        assert is_whole(receiver.weights, 3)


def test_a_payload_of_a_wrong_length_ends_the_session():
    with over_tcp() as (receiver, _, transport, engine):
        manifest, buckets = packed(model(1), 1)
        transport.pause(60)
        transport.begin(1, manifest, 60)
        with pytest.raises((Refused, PeerLost)):
            transport._exchange(Kind.BUCKET, buckets[0].header.to_json(), b"short", Deadline(60, "answer"))
            transport.send(buckets[0], 60)
        assert engine.resumed.wait(60) and receiver.version == 0


def test_a_bucket_that_claims_terabytes_takes_no_memory():
    with over_tcp() as (receiver, _, transport, engine):
        manifest, _ = packed({"a": np.zeros(4, np.uint8)}, 1, buckets=1)
        transport.pause(60)
        transport.begin(1, manifest, 60)
        huge = BucketHeader.from_json(
            b'{"checksum":"%s","entries":[["a","U8",[1099511627776],0]],"index":0,"last":true,"nbytes":1099511627776,'
            b'"version":1}' % (b"0" * 32)
        )
        before = resident_bytes()
        with pytest.raises(Refused, match="the manifest says"):
            transport._exchange(Kind.BUCKET, huge.to_json(), b"", Deadline(60, "answer"))
        assert resident_bytes() - before < 64 << 20
        transport.resume(60)
        assert engine.paused == 0


def open_descriptors():
    return len(list(pathlib.Path("/proc/self/fd").iterdir()))


def resident_bytes():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_strangers_that_say_nothing_keep_no_trainer_out():
    with over_tcp(handshake_timeout=300.0) as (receiver, listening, transport, _):
        strangers = [socket.create_connection(listening.address) for _ in range(3 * MOST_STRANGERS)]
        started = time.monotonic()
        sync(transport, 1)
        assert time.monotonic() - started < 200  # it did not wait until strangers were dropped
        assert is_whole(receiver.weights, 1)
        before = threading.active_count()
        assert before <= MOST_STRANGERS + 8
        for stranger in strangers:
            stranger.close()


def test_strangers_get_only_a_challenge_and_are_dropped():
    with over_tcp(handshake_timeout=0.5) as (_, listening, _, _):
        stranger, _ = ClientTls(None).connect(socket.create_connection(listening.address), "x", Deadline(60, "TLS"))
        stranger.settimeout(60)
        assert len(stranger.recv(1000)) == 40
        assert stranger.recv(1000) == b""
        silent = socket.create_connection(listening.address)
        silent.settimeout(60)
        assert silent.recv(1000) == b""
        noisy = socket.create_connection(listening.address)
        noisy.sendall(b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n" + bytes(100))
        noisy.settimeout(60)
        got = b""
        try:
            while piece := noisy.recv(1000):
                got += piece
        except ConnectionResetError:
            pass
        assert len(got) <= 7  # an alert of TLS
        for connection in (stranger, silent, noisy):
            connection.close()


def test_a_receiver_that_goes_silent_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        transport = TcpTransport(*silent.getsockname(), SECRET, timeout=0.3)
        started = time.monotonic()
        with pytest.raises(PeerTimeout, match="no connection within 0.3 s"):
            transport.pause(timeout=300)
        assert time.monotonic() - started < 200


def test_an_engine_that_does_not_pause_is_an_error():
    resumed = threading.Event()

    def never(timeout):
        time.sleep(min(timeout, 0.2))
        raise TimeoutError

    receiver = Receiver(on_pause=never, on_resume=resumed.set)
    with TcpReceiver(receiver, SECRET) as listening:
        transport = TcpTransport(*listening.address, SECRET, timeout=60)
        with pytest.raises(PeerTimeout, match="did not stop"):
            transport.pause(timeout=1.0)
        assert resumed.wait(60) and receiver.state == "serving"


def test_a_broken_receiver_is_a_refusal_that_says_why():
    def broken(timeout):
        raise RuntimeError("the scheduler is gone")

    with (
        TcpReceiver(Receiver(on_pause=broken), SECRET) as listening,
        pytest.raises(Refused, match="RuntimeError: the scheduler is gone"),
    ):
        TcpTransport(*listening.address, SECRET, timeout=60).pause(60)


def test_nobody_listening_is_an_error_that_says_where():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(PeerLost, match=f"127.0.0.1:{port}: Connection refused"):
        TcpTransport("127.0.0.1", port, SECRET, timeout=60).pause(60)


def test_closing_ends_an_open_session_and_frees_the_port():
    with over_tcp() as (receiver, listening, transport, engine):
        transport.pause(60)
        listening.close()
        assert engine.resumed.wait(60) and receiver.state == "serving"
        manifest, _ = packed(model(1), 1)
        with pytest.raises(PeerLost):
            transport.begin(1, manifest, 60)
        transport.abort("it was lost", 60)  # nothing left to do, and no second error
        transport.resume(60)
        with TcpReceiver(receiver, SECRET, port=listening.address[1]) as again:
            sync(TcpTransport(*again.address, SECRET, timeout=60), 1)
        assert is_whole(receiver.weights, 1)


def test_a_closed_transport_says_so():
    with over_tcp() as (_, _, transport, _):
        transport.close()
        with pytest.raises(ValueError, match="the transport is closed"):
            transport.pause(60)


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), "10"])
def test_a_timeout_that_never_ends_is_an_error(timeout):
    with pytest.raises(ValueError, match="timeout is"):
        TcpReceiver(Receiver(), SECRET, timeout=timeout)


def test_many_syncs_leave_no_descriptors_or_threads_behind():
    with over_tcp() as (receiver, _, transport, _):
        for version in range(1, 11):
            sync(transport, version)
        time.sleep(0.2)
        gc.collect()
        descriptors, threads = open_descriptors(), threading.active_count()
        for version in range(11, 111):
            sync(transport, version)
        time.sleep(0.2)
        gc.collect()
        assert open_descriptors() <= descriptors
        assert threading.active_count() <= threads
        assert is_whole(receiver.weights, 110)


def test_ipv6_loopback_works_where_the_machine_has_it():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    receiver = Receiver()
    with TcpReceiver(receiver, SECRET, host="::1") as listening:
        sync(TcpTransport(*listening.address, SECRET, timeout=60), 1)
    assert is_whole(receiver.weights, 1)


@pytest.mark.parametrize(
    ("port", "message"), [(70000, "port=70000; needs at most 65535"), (-1, "port=-1"), ("1", "port='1'")]
)
def test_a_port_out_of_range_is_named(port, message):
    for make in (lambda: TcpReceiver(Receiver(), SECRET, port=port), lambda: TcpTransport("127.0.0.1", port, SECRET)):
        with pytest.raises((TypeError, ValueError), match=message):
            make()
