"""Through shared memory: the same guarantees as over TCP, one copy, and nothing that could be left behind."""

import contextlib
import os
import pathlib
import resource
import socket
import tempfile
import time

import numpy as np
import pytest

from jaxlowprec.weight_sync import Receiver, Refused, WeightSource, differences, push
from jaxlowprec.weight_sync.bucket import pack
from jaxlowprec.weight_sync.errors import PeerLost
from jaxlowprec.weight_sync.transports.protocol import Channel, Kind
from jaxlowprec.weight_sync.transports.security import NotAuthenticated, introduce
from jaxlowprec.weight_sync.transports.shared_memory import (
    SharedFile,
    SharedMemoryReceiver,
    SharedMemoryTransport,
    receive_descriptor,
    send_descriptor,
)
from jaxlowprec.weight_sync.transports.sockets import Deadline
from jaxlowprec.weight_sync.transports.transport import Transport
from tests.weight_sync.syncing import SECRET, is_whole, model, packed, sync
from tests.weight_sync.trees import numbered


@pytest.fixture
def path(tmp_path):
    return tmp_path / "socket"


@contextlib.contextmanager
def connected(path, **options):
    receiver = Receiver()
    with SharedMemoryReceiver(receiver, SECRET, path, **options) as listening:
        transport = SharedMemoryTransport(path, SECRET)
        with contextlib.closing(transport):
            yield receiver, listening, transport


def open_descriptors():
    return len(list(pathlib.Path("/proc/self/fd").iterdir()))


def test_versions_arrive_whole_one_after_the_other(path):
    with connected(path) as (receiver, _, transport):
        assert isinstance(transport, Transport)
        for version in (1, 2, 7):
            sync(transport, version)  # buckets of numpy's memory
            assert transport.version(timeout=60) == receiver.version == version
            assert is_whole(receiver.weights, version) and receiver.state == "serving"


@pytest.mark.parametrize("max_bytes", [5000, 1 << 20])
def test_a_push_brings_every_byte(path, max_bytes):
    with connected(path) as (receiver, _, transport):
        for version in range(1, 5):
            source = WeightSource(numbered(version, size=1000 * version))
            push(source, transport, max_bytes=max_bytes, timeout=10)
            assert differences(source, receiver) == []


def test_a_pushed_bucket_is_made_in_the_shared_memory():
    shared = SharedFile()
    for payload in shared.buffers(2, 3 << 20):
        payload[:] = 5
        begin, nbytes = np.frombuffer(shared.outgoing(payload)[0], ">u8")
        assert os.pread(shared.descriptor, 10, int(begin)) == bytes([5]) * 10 and nbytes == 3 << 20
    assert (shared.buffers(2, 3 << 20)[0] == 5).all()  # the same memory
    shared.close()


def test_memory_grows_with_the_largest_bucket(path):
    with connected(path) as (receiver, _, transport):
        for version, size in enumerate((10, 2_000_000, 10, 4_000_000), 1):
            sync(transport, version, {"a": np.full(size, version, np.int32)})
            assert (receiver.weights["a"] == version).all() and receiver.weights["a"].size == size


def test_another_secret_lets_nobody_in(path):
    with connected(path) as (receiver, _, transport):
        stranger = SharedMemoryTransport(path, b"another secret, as long as that")
        with pytest.raises(NotAuthenticated):
            stranger.pause(60)
        stranger.close()
        sync(transport, 1)
        assert is_whole(receiver.weights, 1)


def test_the_socket_is_private_and_goes_with_the_receiver(path):
    with connected(path):
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()


def test_only_a_dead_receivers_socket_is_replaced(path):
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    with connected(path) as (receiver, _, transport):
        sync(transport, 1)
        assert is_whole(receiver.weights, 1)
        with pytest.raises(OSError, match="in use"):
            SharedMemoryReceiver(Receiver(), SECRET, path)
        sync(transport, 2)


def test_a_file_that_is_no_socket_stays(path):
    path.write_text("mine")
    with pytest.raises(OSError, match="in use"):
        SharedMemoryReceiver(Receiver(), SECRET, path)
    assert path.read_text() == "mine"


def session_with_a_bucket(path, shared, note):
    """What the receiver answers to a bucket with such a note, in a session of one's own."""
    manifest, (bucket,) = packed({"a": np.arange(100, dtype=np.uint8)}, 1, buckets=1)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    introduce(connection, SECRET)
    channel = Channel(connection)
    deadline = Deadline(60, "answer")
    send_descriptor(connection, shared.descriptor, deadline)
    with contextlib.closing(channel):
        for kind, header, payload in (
            (Kind.PAUSE, b'{"timeout":5}', []),
            (Kind.BEGIN, (1).to_bytes(8, "big") + manifest.to_json(), []),
            (Kind.BUCKET, bucket.header.to_json(), [note]),
        ):
            channel.send(kind, header, payload, deadline=deadline)
            answer = channel.receive(deadline)
        return answer


@pytest.mark.parametrize(
    ("note", "reason"),
    [
        (np.asarray([0, 99], ">u8").tobytes(), b"a note of 99 bytes at 0; the bucket has 100"),
        (np.asarray([2**62, 100], ">u8").tobytes(), b"a note of 100 bytes at 4611686018427387904"),
        (np.asarray([2**64 - 1, 100], ">u8").tobytes(), b"a note of 100 bytes at 18446744073709551615"),
        (np.asarray([2 << 20, 100], ">u8").tobytes(), b"the shared memory ends 100 bytes before"),
        (np.asarray([(2 << 20) - 60, 100], ">u8").tobytes(), b"the shared memory ends 40 bytes before"),
        (b"x" * 15, b"a note of 15 bytes; needs 16"),
        (np.asarray([0, 100], ">u8").tobytes(), b"is corrupt: checksum"),
    ],
)
def test_a_note_of_what_is_not_there_is_refused(path, note, reason):
    with connected(path) as (receiver, _, transport):
        shared = SharedFile()
        shared.buffers(1, 100)
        answer = session_with_a_bucket(path, shared, note)
        assert answer.kind is Kind.FAILED and reason in answer.header
        shared.close()
        for _ in range(100):
            with contextlib.suppress(Refused):  # the receiver may still be ending that session
                sync(transport, 1, timeout=60)
                break
            time.sleep(0.05)
        assert is_whole(receiver.weights, 1)


def test_a_trainer_without_shared_memory_is_dropped(path):
    with connected(path, handshake_timeout=0.2) as (receiver, _, transport):
        for greeting in (b"M", b"", b"x" * 100):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                introduce(connection, SECRET)
                connection.sendall(greeting)
                connection.settimeout(60)
                with contextlib.suppress(ConnectionResetError):  # what was not read
                    assert connection.recv(1) == b""
        sync(transport, 1)
        assert is_whole(receiver.weights, 1)


def test_a_file_that_is_cut_short_is_an_error_and_no_crash():
    with tempfile.TemporaryFile() as file:  # a peer may give any file
        shared, destination = SharedFile(os.dup(file.fileno())), bytearray(100)
    note = shared.outgoing(shared.buffers(1, 100)[0])[0]
    os.ftruncate(shared.descriptor, 50)
    with pytest.raises(PeerLost, match="the shared memory ends 50 bytes before the bucket does"):
        shared.read(note, memoryview(destination))
    shared.close()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="anonymous files of other systems cannot be sealed")
def test_a_trainer_cannot_cut_short_what_it_gave():
    shared = SharedFile()
    (payload,) = shared.buffers(1, 100)
    payload[:] = 7
    given = os.dup(shared.descriptor)
    with pytest.raises(PermissionError):
        os.ftruncate(given, 0)
    assert (payload == 7).all()  # a mapped file that became shorter would end this process here
    (larger,) = shared.buffers(1, 5 << 20)
    assert larger.nbytes == 5 << 20
    os.close(given)
    shared.close()


def no_file():
    reading, writing = os.pipe()
    os.write(writing, bytes(100))
    os.close(writing)
    return reading


def write_only():
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(100)
        return os.open(file.name, os.O_WRONLY)


@pytest.mark.parametrize(("given", "reason"), [(no_file, "is not a file"), (write_only, "cannot be read")])
def test_a_descriptor_of_anything_but_a_readable_file_is_refused(path, given, reason):
    with connected(path) as (receiver, _, transport):
        shared = SharedFile(given())
        answer = session_with_a_bucket(path, shared, np.asarray([0, 100], ">u8").tobytes())
        assert answer.kind is Kind.FAILED and reason.encode() in answer.header
        shared.close()
        until = time.monotonic() + 60
        while True:  # the receiver may not have seen yet that the session before has ended
            try:
                sync(transport, 1, timeout=60)
                break
            except Refused as refused:
                assert "another trainer" in str(refused) and time.monotonic() < until
        assert is_whole(receiver.weights, 1)


def test_a_descriptor_too_many_is_a_clear_error():
    a, b = socket.socketpair()
    shared = SharedFile()
    send_descriptor(a, shared.descriptor, Deadline(1, "room"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unused = os.dup(0)
    os.close(unused)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (unused, hard))
        with pytest.raises(PeerLost, match="this process has too many open files"):
            receive_descriptor(b, Deadline(1, "a file"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for one in (a, b, shared):
        one.close()


def test_overwriting_a_checked_bucket_changes_nothing(path):
    with connected(path) as (receiver, _, transport):
        (payload,) = transport.buffers(1, 400)
        made = pack(1, 0, True, {"a": np.arange(100, dtype=np.int32)})
        payload[:] = made.payload
        manifest = packed({"a": np.arange(100, dtype=np.int32)}, 1, buckets=1)[0]
        transport.pause(60)
        transport.begin(1, manifest, 60)
        transport.send(type(made)(made.header, payload), 5)
        payload[:] = 255
        transport.commit(1, manifest.hash, 60)
        transport.resume(60)
        assert (receiver.weights["a"] == np.arange(100)).all()


def test_refusals_reach_the_trainer_and_the_session_goes_on(path):
    with connected(path) as (receiver, _, transport):
        manifest, buckets = packed(model(1), 1)
        transport.pause(60)
        transport.begin(1, manifest, 60)
        with pytest.raises(Refused, match="out of order"):
            transport.send(buckets[1], 60)
        for bucket in buckets:
            transport.send(bucket, 60)
        transport.commit(1, manifest.hash, 60)
        transport.resume(60)
        assert is_whole(receiver.weights, 1)


@pytest.mark.skipif(not pathlib.Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
def test_many_syncs_leave_no_descriptors_and_no_names_behind(path):
    names = sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else []  # noqa: PTH112, PTH208
    with connected(path) as (_, _, transport):
        sync(transport, 1)
        before = open_descriptors()
        for version in range(2, 102):
            sync(transport, version)
        transport.version(60)
        assert open_descriptors() <= before + 2  # a connection that is being closed
    assert (sorted(os.listdir("/dev/shm")) if names else names) == names  # noqa: PTH208
