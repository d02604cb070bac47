"""Frames: what is not the next frame of this connection is refused, and no length that a peer claims takes memory."""

import hashlib
import socket
import struct
import threading
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlowprec.weight_sync.errors import PeerLost, PeerTimeout
from jaxlowprec.weight_sync.transports.protocol import MAX_HEADER_BYTES, BadFrame, Channel, Kind
from jaxlowprec.weight_sync.transports.security import Keys, NotAuthenticated, admit, check_secret, introduce
from jaxlowprec.weight_sync.transports.sockets import Deadline, receive_into, send_all
from tests.weight_sync.syncing import SECRET

PREFIX, CODE = 20, 32


@pytest.fixture
def pair():
    a, b = socket.socketpair()
    yield a, b
    a.close()
    b.close()


def channels(a, b):
    return Channel(a, Keys(b"a" * 32, b"b" * 32)), Channel(b, Keys(b"b" * 32, b"a" * 32))


def recorded(*frames):
    """The bytes of some frames, one piece each."""
    a, b = socket.socketpair()
    trainer, _ = channels(a, b)
    pieces = []
    for kind, header, payload in frames:
        trainer.send(kind, header, [payload], deadline=Deadline(1, "room"))
        pieces.append(b.recv(1 << 16))
    a.close()
    b.close()
    return pieces


def played(data):
    """The frames that a receiver reads from bytes after which the connection ends, and how it ends."""
    a, b = socket.socketpair()
    _, engine = channels(socket.socket(), b)
    a.sendall(data)
    a.close()
    found = []
    try:
        while True:
            frame = engine.receive(Deadline(1, "frame"))
            payload = bytearray(frame.payload_bytes)
            engine.receive_payload(payload, 1.0)
            found.append((frame.kind, frame.header, bytes(payload)))
    except PeerLost as error:
        return found, error
    finally:
        b.close()


FRAMES = [
    (Kind.PAUSE, b'{"timeout":1}', b""),
    (Kind.BUCKET, b"some header", b"some payload of some bytes"),
    (Kind.BUCKET, b"another", b"and its payload"),
    (Kind.RESUME, b"", b""),
]


def test_frames_arrive_as_they_were_sent():
    found, error = played(b"".join(recorded(*FRAMES)))
    assert found == FRAMES
    assert "the connection was closed" in str(error)


@given(st.integers(0, 3), st.integers(0), st.integers(0, 7))
def test_a_flipped_bit_before_the_payload_ends_reading(frame, position, bit):
    pieces = recorded(*FRAMES)
    signed = PREFIX + CODE + len(FRAMES[frame][1])
    damaged = bytearray(pieces[frame])
    damaged[position % signed] ^= 1 << bit
    found, error = played(b"".join([*pieces[:frame], bytes(damaged), *pieces[frame + 1 :]]))
    assert found == FRAMES[:frame]
    assert isinstance(error, BadFrame) or "closed" in str(error)  # a longer header may end with the stream


@given(st.integers(0))
def test_of_a_truncated_stream_only_whole_frames_are_read(length):
    pieces = recorded(*FRAMES)
    data = b"".join(pieces)
    length %= len(data)
    found, error = played(data[:length])
    whole = sum(len(b"".join(pieces[: i + 1])) <= length for i in range(len(pieces)))
    assert found == FRAMES[:whole]
    assert "the connection was closed" in str(error)


@given(st.permutations(range(len(FRAMES))))
def test_reordered_frames_are_refused(order):
    pieces = recorded(*FRAMES)
    found, error = played(b"".join(pieces[i] for i in order))
    in_turn = next((i for i, j in enumerate(order) if i != j), len(order))
    assert found == FRAMES[:in_turn]
    assert isinstance(error, BadFrame) == (in_turn < len(order))


@given(st.integers(0, 3))
def test_a_repeated_frame_is_refused(index):
    pieces = recorded(*FRAMES)
    found, error = played(b"".join([*pieces[: index + 1], *pieces[index:]]))
    assert found == FRAMES[: index + 1]
    assert isinstance(error, BadFrame)
    assert "repeated or is out of turn" in str(error)


def test_a_frame_sent_back_to_its_sender_is_refused(pair):
    trainer, engine = channels(*pair)
    trainer.send(Kind.RESUME, deadline=Deadline(1, "room"))
    pair[1].sendall(pair[1].recv(1000))
    with pytest.raises(BadFrame, match="its code is wrong"):
        trainer.receive(Deadline(1, "frame"))


@given(st.binary(max_size=200))
def test_noise_is_no_frame(data):
    found, _ = played(data)
    assert not found


def test_claimed_lengths_take_no_memory(pair):
    _, engine = channels(*pair)
    pair[0].sendall(struct.pack("!4sB3xIQ", b"JLPF", Kind.BEGIN, MAX_HEADER_BYTES, 0) + bytes(CODE) + b"{" * 1000)
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
                channels(a, b)[1].receive(Deadline(60, "frame"))


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
        receive_into(pair[1], [bytearray(1000)], Deadline(0.3, "frame"))
    pair[1].close()
    thread.join()


def test_a_peer_that_takes_nothing_is_not_waited_for(pair):
    with pytest.raises(PeerTimeout, match="no room within 0.2 s"):
        send_all(pair[0], [bytes(64 << 20)], Deadline(0.2, "room"))


def shake(engine_secret, trainer_secret):
    """(keys or error of the engine, of the trainer)."""
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


def test_a_secret_gives_both_ends_the_same_fresh_keys():
    engine, trainer = shake(SECRET, SECRET)
    assert (engine.outgoing, engine.incoming) == (trainer.incoming, trainer.outgoing)
    assert engine.outgoing != engine.incoming
    assert shake(SECRET, SECRET)[0] != engine


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
        engine, trainer = shake(secret, secret)
        assert engine.outgoing == trainer.incoming


@pytest.mark.parametrize("version", [0, 1, 3, 255])
@pytest.mark.parametrize("part", [admit, introduce])
def test_two_protocol_versions_refuse_each_other(pair, part, version):
    pair[0].sendall(b"JLPSYNC" + bytes([version]) + bytes(64))
    with pytest.raises(PeerLost, match=f"the peer speaks version {version} of the protocol, this side 2; install"):
        part(pair[1], SECRET, 1.0)


def test_an_open_engine_must_still_prove_itself(pair):
    a, b = pair

    def impostor():
        a.sendall(b"JLPSYNC\x02" + bytes(32))
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
        a.sendall(b"JLPSYNC\x02" + b"n" * 32)
        answer = a.recv(72, socket.MSG_WAITALL)
        a.sendall(b"\x01" + answer[40:])

    thread = threading.Thread(target=mirror)
    thread.start()
    with pytest.raises(NotAuthenticated, match="could not prove"):
        introduce(b, SECRET, 2.0)
    thread.join()


def test_an_engines_answer_to_one_connection_opens_no_other():
    """A stranger relays the challenge of one connection as the engine of another: the trainer's proof fits both nonces
    of its own connection only when the stranger passes everything on, and then the stranger has no key."""
    a, b = socket.socketpair()
    c, d = socket.socketpair()
    keys = {}
    threads = [
        threading.Thread(target=lambda: keys.update(engine=admit(a, SECRET, 2.0))),
        threading.Thread(target=lambda: keys.update(trainer=introduce(d, SECRET, 2.0))),
    ]
    for thread in threads:
        thread.start()
    c.sendall(b.recv(40, socket.MSG_WAITALL))
    b.sendall(c.recv(72, socket.MSG_WAITALL))
    c.sendall(b.recv(33, socket.MSG_WAITALL))
    for thread in threads:
        thread.join()
    b.sendall(struct.pack("!4sB3xIQ", b"JLPF", Kind.PAUSE, 2, 0) + bytes(32) + b"{}")
    with pytest.raises(BadFrame, match="its code is wrong"):
        Channel(a, keys["engine"]).receive(Deadline(1, "frame"))
    for connection in (a, b, c, d):
        connection.close()


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
