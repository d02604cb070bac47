"""The receiver takes what comes in turn and whole, and serves complete versions only."""

import threading

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jaxlowprec.weight_sync import Manifest, PeerTimeout, Receiver, Refused
from jaxlowprec.weight_sync.bucket import Bucket
from tests.weight_sync.trees import parts, relabelled


def receiving(version=1, names="ab"):
    """A receiver that has begun a version, and the version's buckets."""
    receiver = Receiver()
    manifest, buckets = parts(version, names)
    receiver.pause(1)
    receiver.begin(version, manifest)
    return receiver, manifest, buckets


def corrupt(bucket, byte=0):
    payload = bucket.payload.copy()
    payload[byte] ^= 1
    return Bucket(bucket.header, payload)


def test_a_version_is_served_from_its_commit_on():
    receiver, manifest, buckets = receiving()
    for bucket in buckets:
        receiver.receive(bucket)
    assert receiver.version == 0 and not receiver.weights
    receiver.commit(1, manifest.hash)
    assert receiver.version == 1 and list(receiver.weights) == ["a", "b"]
    assert (receiver.weights["b"] == ord("b")).all()
    assert receiver.state == "paused"
    receiver.resume()
    assert receiver.state == "serving"


def other_shape(buckets):
    (placed,) = buckets[0].entries
    entry = type(placed.entry)(placed.entry.name, "I8", placed.entry.shape)
    return relabelled(buckets[0], entries=(type(placed)(entry, 0),))


refusals = {
    "a later version": (lambda b: relabelled(b[0], version=2), "of version 2; version 1 is received"),
    "an earlier bucket": (lambda b: b[0], None),
    "a skipped bucket": (lambda b: b[1], "bucket 1 of version 1 is out of order; 0 comes next"),
    "a tensor that nobody announced": (lambda b: parts(1, "x", last=False)[1][0], "'x', which the manifest does not"),
    "another dtype": (other_shape, r"'a' as I8 \(3,\); the manifest says U8"),
    "a last bucket too early": (lambda b: relabelled(b[0], last=True), "called the last; 1 tensors are missing: 'b'"),
    "no checksum": (lambda b: relabelled(b[0], checksum=""), "has no checksum"),
    "a flipped bit": (lambda b: corrupt(b[0]), "bucket 0 of version 1 is corrupt: checksum"),
    "too few bytes": (lambda b: Bucket(b[0].header, b[0].payload[:2]), "the payload has 2 bytes, not 3"),
}


@pytest.mark.parametrize(("made", "reason"), refusals.values(), ids=refusals)
def test_a_wrong_bucket_is_refused_and_a_right_one_taken(made, reason):
    receiver, manifest, buckets = receiving()
    if reason is not None:
        with pytest.raises(Refused, match=reason):
            receiver.receive(made(buckets))
    receiver.receive(buckets[0])
    with pytest.raises(Refused, match="bucket 0 of version 1 is there already; 1 comes next"):
        receiver.receive(buckets[0])
    receiver.receive(buckets[1])
    with pytest.raises(Refused, match="bucket 2 comes after the last of version 1, 1"):
        receiver.receive(relabelled(buckets[1], index=2))
    receiver.commit(1, manifest.hash)
    assert receiver.version == 1


def test_a_tensor_comes_once():
    receiver, _, buckets = receiving()
    receiver.receive(buckets[0])
    with pytest.raises(Refused, match="holds 'a', which came before"):
        receiver.receive(relabelled(buckets[0], index=1))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda r, m, b: r.begin(1, m), "begin: the receiver is serving; pause it first"),
        (lambda r, m, b: r.receive(b[0]), "receive: no version is being received .the receiver is serving"),
        (lambda r, m, b: r.received(b[0].header), "receive: no version is being received"),
        (lambda r, m, b: r.commit(1, m.hash), "commit: no version is being received"),
        (lambda r, m, b: (r.pause(1), r.pause(1)), "pause: the receiver is paused already"),
        (lambda r, m, b: (r.pause(1), r.begin(1, m), r.begin(1, m)), "begin: version 1 is being received"),
        (lambda r, m, b: (r.pause(1), r.begin(0, m)), "begin: version 0 is stale; 0 is served"),
        (lambda r, m, b: (r.pause(1), r.begin(True, m)), "begin: version True is stale"),
        (lambda r, m, b: (r.pause(1), r.begin(1, m), r.commit(2, m.hash)), "commit: version 2; 1 is being received"),
        (lambda r, m, b: (r.pause(1), r.begin(1, m), r.commit(1, "0")), "commit: manifest '0'"),
        (lambda r, m, b: (r.pause(1), r.begin(1, m), r.commit(1, m.hash)), "incomplete; it lacks 2 tensors: 'a'"),
        (lambda r, m, b: (r.pause(1), r.begin(1, m), r.received(b[0].header)), "was not announced by its header"),
    ],
)
def test_a_call_in_the_wrong_state_is_refused(call, reason):
    with pytest.raises(Refused, match=reason):
        call(Receiver(), *parts())


def test_a_version_that_is_not_newer_is_refused():
    receiver, manifest, buckets = receiving(version=5)
    for bucket in buckets:
        receiver.receive(bucket)
    receiver.commit(5, manifest.hash)
    for stale in (4, 5):
        with pytest.raises(Refused, match=f"version {stale} is stale; 5 is served"):
            receiver.begin(stale, manifest)
    receiver.begin(9, manifest)


def test_a_version_of_too_many_bytes_is_refused():
    receiver = Receiver(max_bytes=5)
    receiver.pause(1)
    with pytest.raises(Refused, match="has 6 bytes; at most 5 are taken"):
        receiver.begin(1, parts()[0])


@pytest.mark.parametrize("end", [lambda r: (r.abort("no more"), r.resume()), lambda r: r.resume()])
def test_what_was_received_is_forgotten_by_abort_and_resume(end):
    receiver, manifest, buckets = receiving()
    receiver.receive(buckets[0])
    end(receiver)
    assert (receiver.state, receiver.version) == ("serving", 0)
    receiver.pause(1)
    receiver.begin(1, manifest)
    for bucket in buckets:
        receiver.receive(bucket)
    receiver.commit(1, manifest.hash)
    assert receiver.version == 1


def test_bytes_are_received_in_place_without_a_copy():
    receiver, manifest, buckets = receiving(names="a")
    view = receiver.destination(buckets[0].header)
    address = np.frombuffer(view, np.uint8).ctypes.data
    view[:] = buckets[0].payload
    receiver.received(buckets[0].header)
    receiver.commit(1, manifest.hash)
    assert receiver.weights["a"].ctypes.data == address and address % 64 == 0
    assert not receiver.weights["a"].flags.writeable


def test_a_transfer_that_failed_is_repeated_into_the_same_memory():
    receiver, manifest, buckets = receiving(names="a")
    first = receiver.destination(buckets[0].header)
    first[:1] = b"x"
    with pytest.raises(Refused, match="corrupt"):
        receiver.received(buckets[0].header)
    again = receiver.destination(buckets[0].header)
    again[:] = buckets[0].payload
    receiver.received(buckets[0].header)
    assert first.obj is not None and bytes(first) == bytes(again)
    receiver.commit(1, manifest.hash)


def test_a_digest_that_the_transport_computed_is_compared():
    receiver, _, buckets = receiving(names="a")
    receiver.destination(buckets[0].header)[:] = buckets[0].payload
    with pytest.raises(Refused, match="corrupt"):
        receiver.received(buckets[0].header, digest="0" * 32)
    receiver.received(buckets[0].header, digest=buckets[0].checksum)


def test_the_engine_is_stopped_and_let_go_on():
    calls = []
    receiver = Receiver(on_pause=lambda s: calls.append(s), on_resume=lambda: calls.append("on"))
    receiver.pause(2.5)
    receiver.resume()
    receiver.resume()
    assert calls == [2.5, "on"]


@pytest.mark.parametrize(("error", "becomes"), [(TimeoutError, PeerTimeout), (KeyError, KeyError)])
def test_an_engine_that_does_not_stop_goes_on(error, becomes):
    calls = []

    def stop(timeout):
        raise error("busy")

    receiver = Receiver(on_pause=stop, on_resume=lambda: calls.append("on"))
    with pytest.raises(becomes):
        receiver.pause(1)
    assert receiver.state == "serving" and calls == ["on"]


def test_a_call_waits_for_another_threads_only_so_long():
    entered, release = threading.Event(), threading.Event()
    receiver = Receiver(on_pause=lambda _: (entered.set(), release.wait(10)), timeout=0.05)
    thread = threading.Thread(target=receiver.pause, args=(10,))
    thread.start()
    assert entered.wait(60)
    with pytest.raises(PeerTimeout, match="abort: another call has been running for 0.05 s"):
        receiver.abort("")
    release.set()
    thread.join(60)


class AgainstModel(RuleBasedStateMachine):
    """Any calls in any order: the receiver agrees with a few lines of arithmetic."""

    def __init__(self):
        super().__init__()
        self.receiver = Receiver()
        self.served, self.paused, self.version, self.count = 0, False, None, 0

    def attempt(self, allowed, call):
        if allowed:
            call()
        else:
            with pytest.raises(Refused):
                call()
        return allowed

    @rule()
    def pause(self):
        self.attempt(not self.paused, lambda: self.receiver.pause(1))
        self.paused = True

    @rule(version=st.integers(0, 4))
    def begin(self, version):
        allowed = self.paused and self.version is None and version > self.served
        if self.attempt(allowed, lambda: self.receiver.begin(version, parts(max(version, 1), "abc")[0])):
            self.version, self.count = version, 0

    @rule(index=st.integers(0, 2), version=st.integers(1, 4), damage=st.booleans())
    def receive(self, index, version, damage):
        bucket = parts(version, "abc")[1][index]
        allowed = version == self.version and index == self.count and not damage
        if self.attempt(allowed, lambda: self.receiver.receive(corrupt(bucket) if damage else bucket)):
            self.count += 1

    @rule(version=st.integers(1, 4), good=st.booleans())
    def commit(self, version, good):
        allowed = version == self.version and self.count == 3 and good
        manifest = parts(version, "abc" if good else "ab")[0]
        if self.attempt(allowed, lambda: self.receiver.commit(version, manifest.hash)):
            self.served, self.version = version, None

    @rule()
    def send_all_that_is_missing(self):
        while self.version is not None and self.count < 3:
            self.receive(self.count, self.version, False)

    @rule()
    def abort(self):
        self.receiver.abort("")
        self.version = None

    @rule()
    def resume(self):
        self.receiver.resume()
        self.paused, self.version = False, None

    @invariant()
    def a_complete_version_is_served(self):
        assert self.receiver.version == self.served
        assert list(self.receiver.weights) == (list("abc") if self.served else [])
        expected = "receiving" if self.version is not None else "paused" if self.paused else "serving"
        assert self.receiver.state == expected


AgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAgainstModel = AgainstModel.TestCase


def test_an_empty_version_is_a_version():
    receiver = Receiver()
    receiver.pause(1)
    receiver.begin(1, Manifest(()))
    receiver.commit(1, Manifest(()).hash)
    assert receiver.version == 1 and len(receiver.weights) == 0
