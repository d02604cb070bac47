"""One version to many receivers: all get the same bytes, and none holds the others back beyond its time."""

import contextlib
import threading
import time

import numpy as np
import pytest

from jaxlowprec.weight_sync import (
    DirectoryTransport,
    FanOut,
    InProcess,
    PeerLost,
    PeerTimeout,
    Receiver,
    Refused,
    SharedMemoryReceiver,
    SharedMemoryTransport,
    SyncError,
    TcpReceiver,
    TcpTransport,
    WeightSource,
    pull,
)
from jaxlowprec.weight_sync.sending import fan_out as module
from tests.weight_sync.syncing import SECRET, is_whole, model

SMALL = 4000  # bytes of a bucket: each model has several


def source(version):
    return WeightSource(model(version))


@contextlib.contextmanager
def reached(kind, folder, count=3):
    """(receivers, transports to them), by name."""
    receivers = {f"engine {i}": Receiver() for i in range(count)}
    with contextlib.ExitStack() as stack:
        transports = {}
        for i, (name, receiver) in enumerate(receivers.items()):
            this = ("in process", "shared", "tcp")[i % 3] if kind == "mixed" else kind
            if this == "in process":
                transports[name] = InProcess(receiver)
            elif this == "shared":
                stack.enter_context(SharedMemoryReceiver(receiver, SECRET, folder / str(i)))
                transports[name] = SharedMemoryTransport(folder / str(i), SECRET)
            else:
                listening = stack.enter_context(TcpReceiver(receiver, SECRET))
                transports[name] = TcpTransport(*listening.address, SECRET, timeout=60)
            stack.callback(transports[name].close)
        yield receivers, transports


@pytest.mark.parametrize("kind", ["in process", "shared", "tcp", "mixed"])
def test_all_receivers_get_the_same_version(kind, tmp_path):
    with reached(kind, tmp_path) as (receivers, transports):
        fan_out = FanOut(transports, max_bytes=SMALL, timeout=10)
        for version in (1, 2, 3):
            delivery = fan_out.push(source(version))
            assert (delivery.version, delivery.served, delivery.failed) == (version, tuple(receivers), {})
            for receiver in receivers.values():
                assert receiver.state == "serving" and is_whole(receiver.weights, version)


def test_a_version_is_bucketed_once_for_all(monkeypatch, tmp_path):
    made = []
    buckets = module.Bucketizer.buckets
    monkeypatch.setattr(module.Bucketizer, "buckets", lambda *a, **k: made.append(a[1]) or buckets(*a, **k))
    with reached("mixed", tmp_path, 6) as (_, transports):
        FanOut(transports, max_bytes=SMALL).push(source(1))
    assert len(made) == 1


def test_a_folder_and_an_engine_get_the_same_version(tmp_path):
    receiver, puller = Receiver(), Receiver()
    fan_out = FanOut({"folder": DirectoryTransport(tmp_path), "engine": InProcess(receiver)}, max_bytes=SMALL)
    assert fan_out.push(source(1)).served == ("folder", "engine")
    pull(tmp_path, puller)
    assert is_whole(puller.weights, 1) and is_whole(receiver.weights, 1)


class Stuck(InProcess):
    """A transport that waits for longer than it was told to, in one verb."""

    def __init__(self, receiver, verb, released):
        super().__init__(receiver)
        act = getattr(self, verb)

        def late(*arguments):
            released.wait(600)
            return act(*arguments)

        setattr(self, verb, late)


@pytest.mark.parametrize("verb", ["version", "pause", "begin", "send", "commit", "resume"])
def test_a_stuck_receiver_is_given_up_and_dropped(verb):
    released, stuck, others = threading.Event(), Receiver(), [Receiver(), Receiver()]
    fan_out = FanOut({str(i): InProcess(one) for i, one in enumerate(others)}, max_bytes=SMALL)
    fan_out.add("stuck", Stuck(stuck, verb, released), timeout=0.3)
    started = time.monotonic()
    delivery = fan_out.push(source(5), 5)
    assert time.monotonic() - started < 300  # it was not waited for
    assert delivery.served == ("0", "1") and isinstance(delivery.failed["stuck"], PeerTimeout)
    assert fan_out.receivers == ("0", "1")
    assert fan_out.push(source(6)).served == ("0", "1")
    assert all(is_whole(one.weights, 6) for one in others)
    released.set()
    until = time.monotonic() + 60
    while stuck.state != "serving" and time.monotonic() < until:
        time.sleep(0.01)
    assert stuck.state == "serving"
    assert (
        is_whole(stuck.weights, 5)
        if verb in ("commit", "resume") and stuck.version
        else stuck.version == 0 and not stuck.weights
    )


class Slow(InProcess):
    """A transport each of whose buckets takes a while."""

    def send(self, bucket, timeout):
        time.sleep(0.25)
        super().send(bucket, timeout)


def test_a_slow_receiver_is_waited_for_once():
    fast, slow = Receiver(), Receiver()
    fan_out = FanOut({"fast": InProcess(fast)}, max_bytes=1)
    fan_out.add("slow", Slow(slow), timeout=0.6)  # longer than any of its buckets takes, shorter than all of them
    delivery = fan_out.push(source(1))
    assert delivery.served == ("fast",) and "0.6 s" in str(delivery.failed["slow"])
    assert is_whole(fast.weights, 1) and slow.version == 0 and slow.state == "serving"


def test_a_refusal_is_told_and_the_receiver_stays():
    full, other = Receiver(max_bytes=10), Receiver()
    fan_out = FanOut({"full": InProcess(full), "other": InProcess(other)})
    for version in (1, 2):
        delivery = fan_out.push(source(version))
        assert delivery.served == ("other",) and isinstance(delivery.failed["full"], Refused)
    assert fan_out.receivers == ("full", "other") and full.state == "serving"


def test_a_receiver_may_join_and_leave_between_versions():
    first, late, newest = Receiver(), Receiver(), Receiver()
    fan_out = FanOut({"first": InProcess(first)})
    fan_out.push(source(1))
    fan_out.add("late", InProcess(late))
    assert fan_out.push(source(2)).served == ("first", "late") and is_whole(late.weights, 2)
    fan_out.remove("first")
    FanOut({"newest": InProcess(newest)}).push(source(9), 9)
    fan_out.add("newest", InProcess(newest))
    assert fan_out.push(source(10)).version == 10  # above what the one that joined serves
    assert first.version == 2 and is_whole(late.weights, 10) and is_whole(newest.weights, 10)


def test_a_dead_receiver_is_dropped_with_the_reason():
    receiver = Receiver()
    fan_out = FanOut({"dead": TcpTransport("127.0.0.1", 1, SECRET), "alive": InProcess(receiver)})
    delivery = fan_out.push(source(1))
    assert isinstance(delivery.failed["dead"], PeerLost) and "Connection refused" in str(delivery.failed["dead"])
    assert fan_out.receivers == ("alive",) and is_whole(receiver.weights, 1)


def test_a_version_that_nobody_got_is_an_error_with_all_reasons():
    fan_out = FanOut({name: TcpTransport("127.0.0.1", 1, SECRET) for name in ("one", "two")})
    with pytest.raises(SyncError, match="no receiver got version 1: one: .*refused.*; two: .*refused"):
        fan_out.push(source(1))
    with pytest.raises(ValueError, match="no receivers are left"):
        fan_out.push(source(2))


def test_a_failed_bucket_leaves_all_at_the_old_version(monkeypatch):
    receivers = {name: Receiver() for name in ("one", "two")}
    fan_out = FanOut({name: InProcess(one) for name, one in receivers.items()}, max_bytes=1)
    fan_out.push(source(1))
    broken = source(2)
    monkeypatch.setattr(type(broken.bundles[2]), "arrays", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fan_out.push(broken)
    monkeypatch.undo()
    assert all(one.state == "serving" and is_whole(one.weights, 1) for one in receivers.values())
    assert fan_out.push(source(3)).served == ("one", "two")


def test_mistakes_are_errors_that_name_them():
    transport = InProcess(Receiver())
    fan_out = FanOut({"a": transport})
    with pytest.raises(ValueError, match="named 'a' already"):
        fan_out.add("a", InProcess(Receiver()))
    with pytest.raises(ValueError, match="'b' has the transport of another"):
        fan_out.add("b", transport)
    with pytest.raises(ValueError, match="timeout is"):
        fan_out.add("c", InProcess(Receiver()), timeout=float("inf"))
    with pytest.raises(TypeError, match="needs a WeightSource"):
        fan_out.push({"a": np.zeros(1)})
    with pytest.raises(ValueError, match="needs a whole number"):
        fan_out.push(source(1), 1.5)
    with pytest.raises(KeyError):
        fan_out.remove("z")
