"""A listener outlives whatever runs short: descriptors, threads, room for another trainer."""

import contextlib
import os
import resource
import socket
import threading
import time

import pytest

from jaxlowprec.weight_sync.errors import PeerLost, Refused
from jaxlowprec.weight_sync.receiving.receiver import Receiver
from jaxlowprec.weight_sync.transports import receiving_end as listening_module
from jaxlowprec.weight_sync.transports.receiving_end import MOST_TRAINERS
from jaxlowprec.weight_sync.transports.shared_memory import SharedMemoryReceiver, SharedMemoryTransport
from jaxlowprec.weight_sync.transports.tcp import TcpReceiver, TcpTransport
from tests.weight_sync.syncing import SECRET, connected, is_whole, over_tcp, sync

BEYOND_SELECT = 1100  # select() takes descriptors below 1024


@contextlib.contextmanager
def many_descriptors(count=BEYOND_SELECT):
    """The next descriptor of this process has a number beyond what select() takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * count:
        pytest.skip(f"this system allows {hard} descriptors")
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * count), hard))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while taken[-1] < count:
            taken.append(os.dup(taken[0]))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_engine_with_1024_open_files_is_synced():
    with many_descriptors(), over_tcp() as (receiver, listening, transport, _):
        assert listening._listener.fileno() > 1023
        sync(transport, 1, timeout=60)
        assert is_whole(receiver.weights, 1)


class Failing:
    """`threading.Thread` whose next so many starts fail."""

    def __init__(self, starts):
        self.left = starts

    def __call__(self, *args, **options):
        thread = threading.Thread(*args, **options)
        start = thread.start

        def started():
            if self.left:
                self.left -= 1
                raise RuntimeError("can't start new thread")
            start()

        thread.start = started
        return thread


class Threads:
    """What `listening` uses of the threading module, with other threads."""

    def __init__(self, thread):
        self.Thread = thread

    def __getattr__(self, name):
        return getattr(threading, name)


def test_a_failed_thread_costs_one_connection_only(monkeypatch):
    with over_tcp() as (receiver, listening, transport, _):
        monkeypatch.setattr(listening_module, "threading", Threads(Failing(starts=2)))
        for _ in range(2):
            with socket.create_connection(listening.address) as stranger:
                stranger.settimeout(60)
                assert stranger.recv(1) == b""  # closed, not left waiting
        sync(transport, 1, timeout=60)
        assert is_whole(receiver.weights, 1)
        listening.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(listening.address)


def test_a_lack_of_descriptors_does_not_end_the_listener():
    with over_tcp() as (receiver, listening, transport, _):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        waiting = [socket.socket() for _ in range(3)]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (waiting[-1].fileno() + 1, hard))
            for stranger in waiting:
                stranger.connect(listening.address)
            time.sleep(0.15)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for stranger in waiting:
                stranger.close()
        sync(transport, 1, timeout=60)
        assert is_whole(receiver.weights, 1)


@pytest.mark.parametrize("kind", ["tcp", "shared"])
def test_a_listener_that_cannot_start_gives_back_what_it_took(monkeypatch, tmp_path, kind):
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208
    monkeypatch.setattr(listening_module, "threading", Threads(Failing(starts=1)))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        if kind == "tcp":
            TcpReceiver(Receiver(), SECRET)
        else:
            SharedMemoryReceiver(Receiver(), SECRET, tmp_path / "socket")
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["tcp", "shared"])
def test_a_trainer_without_descriptors_is_told_that(kind, tmp_path):
    listening, transport = transports(kind, tmp_path)
    with listening, contextlib.closing(transport()) as trainer:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        unused = os.dup(0)
        os.close(unused)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (unused, hard))
            with pytest.raises(PeerLost, match="Too many open files: no connection can be made before some are closed"):
                trainer.version(60)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        sync(trainer, 1, timeout=60)


def test_an_engine_may_close_its_listener_while_it_is_resumed():
    closed = threading.Event()

    def resumed():
        listening.close()
        closed.set()

    receiver = Receiver(on_resume=resumed)
    listening = TcpReceiver(receiver, SECRET)
    transport = TcpTransport(*listening.address, SECRET, timeout=60)
    transport.pause(60)
    transport.close()
    assert closed.wait(60) and receiver.state == "serving"


def transports(kind, folder):
    """(listening, what makes transports to it) of a receiver."""
    if kind == "tcp":
        listening = TcpReceiver(Receiver(), SECRET)
        return listening, lambda: TcpTransport(*listening.address, SECRET, timeout=60)
    listening = SharedMemoryReceiver(Receiver(), SECRET, folder / "socket")
    return listening, lambda: SharedMemoryTransport(folder / "socket", SECRET)


@pytest.mark.parametrize("kind", ["tcp", "shared"])
def test_one_trainer_too_many_is_told_and_may_come_later(kind, tmp_path):
    listening, transport = transports(kind, tmp_path)
    with listening, contextlib.ExitStack() as stack:
        connected = [stack.enter_context(contextlib.closing(transport())) for _ in range(MOST_TRAINERS)]
        connected[0].pause(60)
        for one in connected[1:]:
            one._channel = one._connect(5)
            one.version(60)
        late = stack.enter_context(contextlib.closing(transport()))
        for call in (late.version, late.pause):
            with pytest.raises(Refused, match="8 trainers are connected already; let one end"):
                call(5)
        connected[0].resume(60)
        until = time.monotonic() + 60
        while len(listening._trainers) == MOST_TRAINERS and time.monotonic() < until:
            time.sleep(0.005)
        sync(late, 1, timeout=60)


def test_trainers_beyond_all_room_take_no_threads():
    with over_tcp() as (receiver, listening, transport, _):
        admitted = []
        for _ in range(4 * MOST_TRAINERS):
            admitted.append(connected(listening))
        until = time.monotonic() + 60
        while len(listening._threads) > 2 * MOST_TRAINERS and time.monotonic() < until:
            time.sleep(0.005)
        assert len(listening._threads) <= 2 * MOST_TRAINERS
        for channel in admitted:
            channel.close()
        while listening._threads and time.monotonic() < until:
            time.sleep(0.005)
        sync(transport, 1, timeout=60)
        assert is_whole(receiver.weights, 1)
