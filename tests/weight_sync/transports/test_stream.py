"""Frames through TLS: only the next frame of this connection is read, and no length that a peer claims takes memory."""

import concurrent.futures
import contextlib
import hashlib
import socket
import ssl
import struct
import threading
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlowprec.weight_sync.errors import PeerLost, PeerTimeout
from jaxlowprec.weight_sync.transports.protocol import MAX_HEADER_BYTES, BadFrame, Channel, Kind
from jaxlowprec.weight_sync.transports.security import (
    ClientTls,
    NotAuthenticated,
    ServerTls,
    admit,
    check_secret,
    introduce,
)
from jaxlowprec.weight_sync.transports.sockets import Deadline, receive_into, send_all
from tests.weight_sync.syncing import SECRET

RECORD = 5 + 1 + 16  # bytes that TLS adds: a header, the type, the tag
SERVER, CLIENT = ServerTls(None, None), ClientTls(None)


@pytest.fixture
def pair():
    a, b = socket.socketpair()
    yield a, b
    a.close()
    b.close()


class Wire:
    """A trainer and an engine that agreed on TLS. What they send stays on the way until somebody passes it on."""

    def __init__(self):
        trainer, self.from_trainer = socket.socketpair()
        engine, self.to_engine = socket.socketpair()
        waiting = [CLIENT.wrapped(trainer, "engine"), SERVER.wrapped(engine)]
        self.trainer, self.engine = map(Channel, waiting)
        while waiting:
            for end in tuple(waiting):
                end.settimeout(0)
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
                    waiting.remove(end)
            for source, target in ((self.from_trainer, self.to_engine), (self.to_engine, self.from_trainer)):
                with contextlib.suppress(BlockingIOError):
                    target.sendall(source.recv(1 << 16, socket.MSG_DONTWAIT))

    def recorded(self, *frames):
        """The bytes of some frames that the trainer sends, one piece each."""
        pieces = []
        for kind, header, payload in frames:
            self.trainer.send(kind, header, [payload], deadline=Deadline(1, "room"))
            pieces.append(self.from_trainer.recv(1 << 16))
        return pieces

    def played(self, data):
        """The frames that the engine reads from bytes after which the connection ends, and how it ends."""
        self.to_engine.sendall(data)
        self.to_engine.close()
        found = []
        try:
            while True:
                frame = self.engine.receive(Deadline(1, "frame"))
                payload = bytearray(frame.payload_bytes)
                self.engine.receive_payload(payload, 1.0)
                found.append((frame.kind, frame.header, bytes(payload)))
        except PeerLost as error:
            return found, error
        finally:
            for end in (self.from_trainer, self.trainer, self.engine):
                end.close()


FRAMES = [
    (Kind.PAUSE, b'{"timeout":1}', b""),
    (Kind.BUCKET, b"some header", b"some payload of some bytes"),
    (Kind.BUCKET, b"another", b"and its payload"),
    (Kind.RESUME, b"", b""),
]


def test_frames_arrive_as_they_were_sent():
    wire = Wire()
    pieces = wire.recorded(*FRAMES)
    assert [len(piece) for piece in pieces] == [RECORD + 20 + len(header + payload) for _, header, payload in FRAMES]
    found, error = wire.played(b"".join(pieces))
    assert found == FRAMES
    assert "the connection was closed" in str(error)


@given(st.integers(0, 3), st.integers(0), st.integers(0, 7))
def test_a_flipped_bit_ends_reading(frame, position, bit):
    wire = Wire()
    pieces = wire.recorded(*FRAMES)
    damaged = bytearray(pieces[frame])
    damaged[position % len(damaged)] ^= 1 << bit
    found, error = wire.played(b"".join([*pieces[:frame], bytes(damaged), *pieces[frame + 1 :]]))
    assert found == FRAMES[:frame]
    assert isinstance(error, PeerLost) and not isinstance(error, PeerTimeout)


@given(st.integers(0))
def test_of_a_truncated_stream_only_whole_frames_are_read(length):
    wire = Wire()
    pieces = wire.recorded(*FRAMES)
    data = b"".join(pieces)
    length %= len(data)
    found, error = wire.played(data[:length])
    whole = sum(len(b"".join(pieces[: i + 1])) <= length for i in range(len(pieces)))
    assert found == FRAMES[:whole]
    assert "the connection was closed" in str(error)


@given(st.permutations(range(len(FRAMES))))
def test_reordered_frames_are_refused(order):
    wire = Wire()
    pieces = wire.recorded(*FRAMES)
    found, error = wire.played(b"".join(pieces[i] for i in order))
    in_turn = next((i for i, j in enumerate(order) if i != j), len(order))
    assert found == FRAMES[:in_turn]
    assert ("bad record mac" in str(error)) == (in_turn < len(order))


@pytest.mark.parametrize("index", range(4))
def test_a_repeated_frame_is_refused(index):
    wire = Wire()
    pieces = wire.recorded(*FRAMES)
    found, error = wire.played(b"".join([*pieces[: index + 1], *pieces[index:]]))
    assert found == FRAMES[: index + 1]
    assert "bad record mac" in str(error)


@pytest.mark.parametrize("index", range(3))
def test_a_frame_left_out_is_noticed(index):
    wire = Wire()
    pieces = wire.recorded(*FRAMES)
    found, error = wire.played(b"".join([*pieces[:index], *pieces[index + 1 :]]))
    assert found == FRAMES[:index]
    assert "bad record mac" in str(error)


def test_a_frame_of_another_connection_is_refused():
    other = Wire().recorded(*FRAMES)
    found, error = Wire().played(b"".join(other))
    assert not found and "bad record mac" in str(error)


def test_a_frame_sent_back_to_its_sender_is_refused():
    wire = Wire()
    wire.from_trainer.sendall(wire.recorded(FRAMES[0])[0])
    with pytest.raises(PeerLost, match="bad record mac"):
        wire.trainer.receive(Deadline(1, "frame"))


@given(st.binary(max_size=200))
def test_noise_is_no_frame(data):
    found, _ = Wire().played(data)
    assert not found


@given(st.binary(max_size=200))
def test_noise_within_tls_is_no_frame(data):
    wire = Wire()
    send_all(wire.trainer.connection, [data], Deadline(1, "room"))
    with contextlib.suppress(BlockingIOError):
        data = wire.from_trainer.recv(1 << 16, socket.MSG_DONTWAIT)
    found, _ = wire.played(data)
    assert not found


def test_claimed_lengths_take_no_memory(pair):
    engine = Channel(pair[1])
    pair[0].sendall(struct.pack("!4sB3xIQ", b"JLPF", Kind.BEGIN, MAX_HEADER_BYTES, 0) + b"{" * 1000)
    tracemalloc.start()
    try:
        with pytest.raises(PeerTimeout):
            engine.receive(Deadline(0.2, "frame"))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    for header, payload in ((MAX_HEADER_BYTES + 1, 0), (2**32 - 1, 0), (0, 2**48 + 1), (0, 2**64 - 1)):
        (a, b) = socket.socketpair()
        with a, b:
            a.sendall(struct.pack("!4sB3xIQ", b"JLPF", Kind.BUCKET, header, payload))
            with pytest.raises(BadFrame, match="are read"):
                Channel(b).receive(Deadline(60, "frame"))


def test_a_peer_that_sends_a_byte_now_and_then_is_not_waited_for(pair):
    def dribble():
        try:
            while True:
                pair[0].send(b"J")
                time.sleep(0.02)
        except OSError:
            pass

    thread = threading.Thread(target=dribble)
    thread.start()
    with pytest.raises(PeerTimeout, match="no frame within 0.3 s"):
        receive_into(pair[1], bytearray(1000), Deadline(0.3, "frame"))
    pair[1].close()
    thread.join()


def test_a_peer_that_takes_nothing_is_not_waited_for(pair):
    with pytest.raises(PeerTimeout, match="no room within 0.2 s"):
        send_all(pair[0], [bytes(64 << 20)], Deadline(0.2, "room"))


def shake(engine_secret, trainer_secret):
    """(what the engine's part gives or raises, what the trainer's does)."""
    a, b = socket.socketpair()
    results = {}

    def run(name, part, connection, secret):
        try:
            results[name] = part(connection, secret, 2.0)
        except Exception as error:
            results[name] = error

    thread = threading.Thread(target=run, args=("engine", admit, a, engine_secret))
    thread.start()
    run("trainer", introduce, b, trainer_secret)
    thread.join()
    a.close()
    b.close()
    return results["engine"], results["trainer"]


def test_the_same_secret_lets_both_ends_in():
    assert shake(SECRET, SECRET) == (None, None)


def test_another_secret_is_refused_at_both_ends():
    engine, trainer = shake(SECRET, SECRET + b"!")
    assert isinstance(engine, NotAuthenticated) and isinstance(trainer, NotAuthenticated)
    assert "refused the secret" in str(trainer)


LONG = SECRET * 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (SECRET, SECRET + b"\0"),
        (SECRET, SECRET + bytes(32)),
        (LONG, hashlib.sha256(LONG).digest()),
        (LONG, hashlib.sha256(LONG).digest() + bytes(32)),
    ],
    ids=["a zero more", "zeros up to HMAC's block", "a long one and its hash", "a long one and its padded hash"],
)
def test_secrets_equal_to_hmac_differ_in_the_handshake(one, other):
    for engine, trainer in ((one, other), (other, one)):
        assert all(isinstance(end, NotAuthenticated) for end in shake(engine, trainer))
    for secret in (one, other):
        assert shake(secret, secret) == (None, None)


@pytest.mark.parametrize("version", [0, 1, 2, 4, 255])
@pytest.mark.parametrize("part", [admit, introduce])
def test_two_protocol_versions_refuse_each_other(pair, part, version):
    pair[0].sendall(b"JLPSYNC" + bytes([version]) + bytes(64))
    with pytest.raises(PeerLost, match=f"the peer speaks version {version} of the protocol, this side 3; install"):
        part(pair[1], SECRET, 1.0)


def test_an_open_engine_must_still_prove_itself(pair):
    a, b = pair

    def impostor():
        a.sendall(b"JLPSYNC\x03" + bytes(32))
        a.recv(72, socket.MSG_WAITALL)
        a.sendall(b"\x01" + bytes(32))

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(NotAuthenticated, match="could not prove"):
        introduce(b, SECRET, 2.0)
    thread.join()


def test_a_trainers_own_proof_sent_back_to_it_proves_nothing(pair):
    a, b = pair

    def mirror():  # the engine's challenge is the trainer's own answer, as far as lengths allow
        a.sendall(b"JLPSYNC\x03" + b"n" * 32)
        answer = a.recv(72, socket.MSG_WAITALL)
        a.sendall(b"\x01" + answer[40:])

    thread = threading.Thread(target=mirror)
    thread.start()
    with pytest.raises(NotAuthenticated, match="could not prove"):
        introduce(b, SECRET, 2.0)
    thread.join()


def test_a_recorded_proof_is_worthless(pair):
    """Of either side: the other's nonce is a new one."""
    a, b = pair
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        c, d = socket.socketpair()
        ends = [threads.submit(admit, a, SECRET, 2.0), threads.submit(introduce, d, SECRET, 2.0)]
        challenge = b.recv(40, socket.MSG_WAITALL)
        c.sendall(challenge)
        answer = c.recv(72, socket.MSG_WAITALL)
        b.sendall(answer)
        verdict = b.recv(33, socket.MSG_WAITALL)
        c.sendall(verdict)
        assert [end.result() for end in ends] == [None, None]
        b.sendall(answer)
        with pytest.raises(NotAuthenticated, match="does not hold"):
            admit(a, SECRET, 2.0)
        c.sendall(challenge + verdict)
        with pytest.raises(NotAuthenticated, match="could not prove"):
            introduce(d, SECRET, 2.0)
        c.close()
        d.close()


def test_a_silent_peer_is_dropped_in_time(pair):
    with pytest.raises(PeerTimeout, match="no proof of the secret within 0.2 s"):
        admit(pair[0], SECRET, 0.2)
    with pytest.raises(PeerTimeout, match="no answer to the handshake within 0.2 s"):
        pair[1].recv(1000)
        introduce(pair[0], SECRET, 0.2)


@pytest.mark.parametrize("secret", [b"", b"short", "fifteen letters"])
def test_a_short_secret_is_an_error_that_says_how_to_make_one(secret):
    with pytest.raises(ValueError, match="token_hex"):
        check_secret(secret)


def test_a_secret_that_is_no_text_is_a_type_error():
    with pytest.raises(TypeError, match="bytes or str"):
        check_secret(12345678901234567890)
