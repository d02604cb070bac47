"""A session commits or aborts, and resumes whatever happens."""

import dataclasses
import threading
import time

import numpy as np
import pytest

from jaxlowprec.weight_sync import (
    Aborted,
    FanOut,
    InProcess,
    PeerLost,
    Receiver,
    Refused,
    Session,
    SyncError,
    WeightSource,
    differences,
    push,
)
from jaxlowprec.weight_sync.sending.bucketizer import Bucketizer
from tests.weight_sync.trees import is_whole, numbered, synced

VERBS = ("version", "pause", "begin", "send", "commit", "abort", "resume")


class Faulty(InProcess):
    """Fails at some verbs, after or before it did what was asked, and lists all calls."""

    def __init__(self, receiver, fails=(), after=False, error=PeerLost):
        super().__init__(receiver)
        self.calls = []
        for verb in VERBS:
            setattr(self, verb, self._listed(verb, getattr(self, verb), verb in fails, after, error))

    def _listed(self, verb, call, fails, after, error):
        def listed(*args):
            self.calls.append(verb)
            if fails and not after:
                raise error(verb)
            result = call(*args)
            if fails:
                raise error(verb)
            return result

        return listed


class AsBytes(InProcess):
    """Buckets are bytes, as over a wire."""

    takes_arrays = False


def both(test):
    return pytest.mark.parametrize("transport", [InProcess, AsBytes])(test)


@both
def test_a_push_brings_every_byte(transport):
    source = WeightSource(numbered(3))
    receiver = Receiver()
    assert push(source, transport(receiver), max_bytes=5000) == 1
    assert differences(source, receiver) == []
    assert (receiver.state, receiver.version) == ("serving", 1)


@both
def test_versions_are_the_callers_or_count_up(transport):
    receiver = Receiver()
    assert [push(WeightSource(numbered(i)), transport(receiver), version=v) for i, v in enumerate((7, None, 20))] == [
        7,
        8,
        20,
    ]
    with pytest.raises(Refused, match="version 20 is stale"):
        push(WeightSource(numbered(4)), transport(receiver), version=20)
    assert receiver.version == 20 and receiver.state == "serving"


def test_the_steps_come_in_their_order():
    transport = Faulty(Receiver())
    push(WeightSource(numbered(1)), transport, max_bytes=9000)
    assert transport.calls == ["version", "pause", "begin", "send", "send", "commit", "resume"]


@pytest.mark.parametrize("after", [False, True], ids=["before it worked", "after it worked"])
@pytest.mark.parametrize("verb", ["pause", "begin", "send", "commit"])
def test_any_failing_step_leaves_a_complete_version(verb, after):
    receiver = synced(numbered(1))
    transport = Faulty(receiver, (verb,), after)
    with pytest.raises(PeerLost, match=verb):
        push(WeightSource(numbered(2)), transport)
    assert transport.calls[-2:] == ["abort", "resume"]
    assert receiver.state == "serving" and is_whole(receiver.weights)
    assert receiver.version == (2 if verb == "commit" and after else 1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_an_interrupted_trainer_resumes_too(error):
    receiver = synced(numbered(1))
    with pytest.raises(error), Session(InProcess(receiver)) as session:
        session.send(WeightSource(numbered(2)))
        raise error
    assert (receiver.state, receiver.version) == ("serving", 1)


def test_a_failed_abort_is_a_note_and_the_engine_resumes():
    receiver = synced(numbered(1))
    transport = Faulty(receiver, ("send", "abort"))
    with pytest.raises(PeerLost, match="send") as caught:
        push(WeightSource(numbered(2)), transport)
    assert caught.value.__notes__ == ["abort failed as well: PeerLost: abort"]
    assert (receiver.state, receiver.version) == ("serving", 1)


def test_a_session_that_is_refused_leaves_the_others_alone():
    receiver = Receiver()
    with Session(InProcess(receiver)) as first:
        transport = Faulty(receiver)
        with pytest.raises(Refused, match="paused already, in a session that was not ended"):
            push(WeightSource(numbered(2)), transport)
        assert transport.calls == ["version", "pause"]
        first.send(WeightSource(numbered(1)))
    assert receiver.version == 1


def test_a_session_can_be_aborted():
    receiver = synced(numbered(1))
    with pytest.raises(Aborted, match="not good enough"), Session(InProcess(receiver)) as session:
        session.send(WeightSource(numbered(2)))
        session.abort("not good enough")
    assert (receiver.state, receiver.version) == ("serving", 1)


def test_a_session_sends_one_version():
    receiver = Receiver()
    with pytest.raises(SyncError, match="nothing was sent"), Session(InProcess(receiver)):
        pass
    with pytest.raises(SyncError, match="has sent its version"), Session(InProcess(receiver)) as session:
        session.send(WeightSource(numbered(1)))
        session.send(WeightSource(numbered(1)))
    assert (receiver.state, receiver.version) == ("serving", 0)


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), "10"])
def test_a_timeout_that_never_ends_is_an_error(timeout):
    for made in (lambda: Session(InProcess(Receiver()), timeout=timeout), lambda: Receiver(timeout=timeout)):
        with pytest.raises(ValueError, match="needs seconds, more than 0 and finite"):
            made()


def test_a_tree_is_no_source():
    receiver = Receiver()
    with pytest.raises(TypeError, match="source is a dict; needs a WeightSource"), Session(InProcess(receiver)) as s:
        s.send(numbered(1))
    assert receiver.state == "serving"


@pytest.mark.parametrize("given", [Receiver(), "http://localhost:8000", WeightSource(numbered(1))])
def test_what_is_no_transport_is_named(given):
    message = f"transport is a {type(given).__name__}; needs a Transport, such as InProcess"
    with pytest.raises(TypeError, match=f"^Session: {message}"):
        push(WeightSource(numbered(1)), given)
    with pytest.raises(TypeError, match=f"^FanOut.add: 'engine': {message}"):
        FanOut({"engine": given})


class Slow(WeightSource):
    """Every tensor takes a while to make, or fails."""

    def __init__(self, tree, seconds=0.0, fails=None):
        super().__init__(tree)
        outer = self

        class SlowBundle(type(self.bundles[0])):
            def arrays(self, on_device=False):
                if self.key == fails:
                    raise ValueError(f"{self.key} holds NaN")
                time.sleep(outer.seconds)
                yield from super().arrays(on_device)

        self.seconds = seconds
        self.bundles = tuple(
            SlowBundle(**{f.name: getattr(g, f.name) for f in dataclasses.fields(g)}) for g in self.bundles
        )


@both
def test_a_tensor_that_cannot_be_made_aborts(transport):
    receiver = synced(numbered(1))
    with pytest.raises(ValueError, match="m2 holds NaN"):
        push(Slow(numbered(2), fails="m2"), transport(receiver), max_bytes=5000)
    assert (receiver.state, receiver.version) == ("serving", 1)


@both
def test_a_thread_that_cannot_be_started_aborts(transport, monkeypatch):
    def none(_):
        raise RuntimeError("can't start new thread")

    receiver = synced(numbered(1))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        with pytest.raises(SyncError, match="the thread that makes buckets did not start: can't start new thread"):
            push(WeightSource(numbered(2)), transport(receiver))
    assert (receiver.state, receiver.version) == ("serving", 1)


@both
def test_a_tensor_that_takes_too_long_aborts(transport):
    receiver = synced(numbered(1))
    with pytest.raises(SyncError, match=r"no bucket was made within 0.3 s"):
        push(Slow(numbered(2), seconds=1.0), transport(receiver), timeout=0.3)
    assert (receiver.state, receiver.version) == ("serving", 1)


def watched(source, told):
    """Tells of each bundle that its arrays are being made."""
    for bundle in source.bundles:
        inner = bundle.arrays
        object.__setattr__(bundle, "arrays", lambda on_device=False, g=bundle, i=inner: (told(g), i(on_device))[1])


@both
def test_making_buckets_overlaps_their_transfer(transport):
    """A bucket is not sent before the next one is being made."""
    source = WeightSource(numbered(1, arrays=10))
    begun = [threading.Event() for _ in source.bundles]
    watched(source, lambda bundle: begun[int(bundle.key[1:])].set())

    class Waiting(transport):
        def send(self, bucket, timeout):
            assert all(event.wait(60) for event in begun[bucket.header.index + 1 :][:1])
            super().send(bucket, timeout)

    receiver = Receiver()
    push(source, Waiting(receiver), max_bytes=4000)
    assert receiver.version == 1 and len(receiver.weights) == 10


def test_two_payloads_are_alive_at_most():
    source, addresses = WeightSource(numbered(1, arrays=20)), set()
    with Bucketizer(4000).buckets(source, 1, timeout=10) as buckets:
        for bucket in buckets:
            addresses.add(bucket.payload.ctypes.data)
    assert len(addresses) == 2


def test_no_bucket_is_made_beyond_the_next_one():
    made, before = [], set(threading.enumerate())
    source = Slow(numbered(1, arrays=10))
    watched(source, lambda bundle: made.append(bundle.key))
    with Bucketizer(4000).buckets(source, 1, timeout=60) as buckets:
        for expected in (["m0", "m1"], ["m0", "m1", "m2"]):
            next(buckets)
            until = time.monotonic() + 60
            while len(made) < len(expected) and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(0.1)
            assert made == expected
    assert len(made) <= 4 and not set(threading.enumerate()) - before


@both
def test_readers_see_whole_versions_only_while_versions_come(transport):
    receiver, stop, seen, wrong = synced(numbered(1)), threading.Event(), set(), []

    def read():
        while not stop.is_set():
            weights = receiver.weights
            first = is_whole(weights)
            time.sleep(0)
            if not (first and is_whole(weights)):
                wrong.append(weights.version)
            seen.add(weights.version)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for version in range(2, 80):
        if version % 3:
            push(WeightSource(numbered(version, size=20_000)), transport(receiver), version=version, max_bytes=4000)
        else:
            with pytest.raises(PeerLost):
                push(WeightSource(numbered(version)), Faulty(receiver, ("commit",)), version=version)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not wrong and len(seen) > 5
    assert not [version for version in seen if version % 3 == 0]


@both
def test_a_snapshot_stays_as_it_was(transport):
    receiver = Receiver()
    push(WeightSource(numbered(1, size=20_000)), transport(receiver))
    old = receiver.weights
    for version in range(2, 6):
        push(WeightSource(numbered(version, size=20_000)), transport(receiver), version=version)
        assert is_whole(old) and old.version == 1 and is_whole(receiver.weights)


def test_arrays_may_be_overwritten_once_sent():
    tree, receiver = numbered(1), Receiver()
    with Session(InProcess(receiver)) as session:
        session.send(WeightSource(tree))
        for module in tree.values():
            module["w"][:] = 99
    assert is_whole(receiver.weights)
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(receiver.weights["m0.w"])[:] = 0
