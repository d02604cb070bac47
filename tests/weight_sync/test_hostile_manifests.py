"""Manifests and headers made to cost time, memory or patience: each is an error in short time and few words."""

import json
import socket
import time

import numpy as np
import pytest

from jaxlowprec.checkpoints.files.dtypes import MAX_RANK
from jaxlowprec.weight_sync import Entry, Manifest, PeerLost, Receiver, Refused
from jaxlowprec.weight_sync import manifest as manifest_module
from jaxlowprec.weight_sync.bucket import BucketHeader, checksum, pack, place
from jaxlowprec.weight_sync.receiving.staging import Staging
from jaxlowprec.weight_sync.transports.protocol import Channel, Kind, write
from jaxlowprec.weight_sync.transports.sockets import Deadline
from tests.weight_sync.syncing import connected, is_whole, over_tcp, sync

LONGEST = 500  # characters of a message
NAMES = 40_000


def manifest_text(entries, scheme=None):
    return json.dumps({"entries": entries, "format": 1, "scheme": scheme}).encode()


def header_text(entries, nbytes=0):
    return json.dumps(
        {"checksum": "0" * 32, "entries": entries, "index": 0, "last": True, "nbytes": nbytes, "version": 1}
    ).encode()


def names(count):
    return [f"t{i}" for i in range(count)]


def refused_quickly(call, *arguments, match, seconds=20.0):
    """Raises a ValueError or Refused of few words. Before, each took time that grew with the square of the input."""
    started = time.process_time()
    with pytest.raises((ValueError, Refused), match=match) as raised:
        call(*arguments)
    assert time.process_time() - started < seconds
    assert len(str(raised.value)) < LONGEST


TWICE = [*names(NAMES), f"t{NAMES - 1}"]


@pytest.mark.slow
def test_a_repeated_name_is_found_in_linear_time():
    refused_quickly(Manifest.from_json, manifest_text([[n, "U8", []] for n in TWICE]), match=f"'t{NAMES - 1}' is there")
    refused_quickly(Manifest, tuple(Entry(n, "U8", (0,)) for n in TWICE), match=f"'t{NAMES - 1}' is there twice")
    refused_quickly(
        BucketHeader.from_json, header_text([[n, "U8", [0], 0] for n in TWICE]), match=f"twice: 't{NAMES - 1}'"
    )


def test_a_missing_tensor_is_found_in_linear_time():
    entries = tuple(Entry(name, "U8", (0,)) for name in names(20_000))
    staging = Staging(1, Manifest(entries))
    arrays = {name: np.zeros(0, np.uint8) for name in names(19_999)}
    refused_quickly(staging.check, pack(1, 0, True, arrays).header, match="1 tensors are missing: 't19999'")


def test_many_buckets_are_committed_in_linear_time():
    staging = Staging(1, Manifest(()))
    staging.buckets = [{} for _ in range(200_000)]
    started = time.process_time()
    Receiver()._finished(staging)
    assert time.process_time() - started < 20.0


def test_so_many_tensors_are_refused_before_any_is_made(monkeypatch):
    monkeypatch.setattr(manifest_module, "MAX_TENSORS", 3)
    monkeypatch.setattr(manifest_module, "Entry", None)
    refused_quickly(Manifest.from_json, manifest_text([["a", "U8", []]] * 4), match="4 tensors; needs at most 3")
    with pytest.raises(ValueError, match="4 tensors; needs at most 3"):
        Manifest(tuple(Entry(name, "U8", ()) for name in "abcd"))


SHAPES = {
    "one size too many": ([1] * (MAX_RANK + 1), "has 65 dimensions; needs at most 64"),
    "a million sizes": ([1] * 1_000_000, "has 1000001 dimensions|has 1000000 dimensions"),
    "huge sizes": ([2**63 - 1] * 17, "more than 281474976710656 bytes"),
    "sizes of 4000 digits": ([10**4000] * 60, "more than 281474976710656 bytes"),
    "huge sizes of an empty tensor": ([0, 2**40, 2**40], "more than 281474976710656 bytes"),
    "an empty tensor last": ([2**40, 2**40, 0], "more than 281474976710656 bytes"),
    "sizes that are none": (["x" * 100_000], "needs a tuple of whole numbers"),
    "no list": ("x" * 100_000, "needs a tuple of whole numbers"),
    "true": ([True], "needs a tuple of whole numbers"),
}


@pytest.mark.parametrize(("shape", "match"), SHAPES.values(), ids=SHAPES)
def test_a_shape_that_no_array_has_is_refused_in_few_words(shape, match):
    refused_quickly(Manifest.from_json, manifest_text([["a", "U8", shape]]), match=match)
    refused_quickly(BucketHeader.from_json, header_text([["a", "U8", shape, 0]]), match=match)


LONG = "n" * 100_000


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (manifest_text([[LONG, "U9", [1]]]), "has dtype 'U9'"),
        (manifest_text([[LONG, "U8", [-1]]]), "has shape"),
        (manifest_text([[LONG, "U8", [1]], [LONG, "U8", [1]]]), "is there twice"),
        (manifest_text([["a", LONG, [1]]]), "has dtype"),
        (manifest_text([[[LONG], "U8", [1]]]), "name is"),
        (manifest_text([], {"group_size": LONG}), "needs a 'name'"),
        (manifest_text([], LONG), "needs an object or null"),
        (json.dumps({"entries": [], "format": LONG, "scheme": None}).encode(), "format"),
    ],
)
def test_long_names_are_cut_short_in_messages(text, match):
    refused_quickly(Manifest.from_json, text, match=match)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (header_text([[LONG, "U8", [1], 8]]), "lies at 8"),
        (header_text([[LONG, "U8", [1], LONG]]), "lies at"),
        (header_text([["a", "U8", [17], 0], [LONG, "U8", [1], 16]]), "within the one before it"),
        (header_text([["a", "U8", [1], 0], [LONG, "U8", [1], 160]]), "after a gap"),
        (header_text([[LONG, "U8", [0], 0], [LONG, "U8", [0], 0]]), "there twice"),
        (header_text([], LONG), "nbytes is"),
    ],
)
def test_long_names_are_cut_short_in_messages_about_headers(text, match):
    refused_quickly(BucketHeader.from_json, text, match=match)


def test_long_names_are_cut_short_in_refusals_of_buckets():
    staging = Staging(1, Manifest((Entry(LONG, "U8", (3,)), Entry("a", "U8", (3,)))))
    array = np.zeros(3, np.uint8)
    for arrays, last, match in (
        ({LONG + "!": array}, False, "does not name"),
        ({LONG: array.view(np.int8)}, False, "the manifest says U8"),
        ({"a": array}, True, "tensors are missing"),
    ):
        refused_quickly(staging.check, pack(1, 0, last, arrays).header, match=match)
    refused_quickly(staging.complete, match="lacks 2 tensors")


def test_an_array_of_the_most_dimensions_is_synced():
    array = np.arange(3, dtype=np.int32).reshape((3,) + (1,) * (MAX_RANK - 1))
    with over_tcp() as (receiver, _, transport, _):
        sync(transport, 1, {"a": array})
        assert receiver.weights["a"].shape == array.shape and (receiver.weights["a"] == array).all()


@pytest.mark.parametrize("kind", [Kind.BEGIN, Kind.BUCKET])
def test_no_manifest_keeps_an_engine_paused(kind):
    text = manifest_text([[n, "U8", []] for n in TWICE])
    text = (2).to_bytes(8, "big") + text if kind is Kind.BEGIN else header_text([[n, "U8", [0], 0] for n in TWICE])
    with over_tcp() as (receiver, listening, transport, engine):
        sync(transport, 1)
        channel = connected(listening)
        channel.send(Kind.PAUSE, write(timeout=1), deadline=Deadline(60, "room"))
        assert channel.receive(Deadline(60, "answer")).kind is Kind.DONE
        channel.send(kind, text, deadline=Deadline(60, "room"))
        channel.close()
        assert engine.resumed.wait(60)
        assert receiver.state == "serving" and is_whole(receiver.weights, 1)
        sync(transport, 2)
        assert is_whole(receiver.weights, 2)


@pytest.mark.parametrize("read", [Manifest.from_json, BucketHeader.from_json])
def test_reading_a_manifest_checks_that_the_trainer_lives(read, monkeypatch):
    monkeypatch.setattr(manifest_module, "_CHECKED_AT_ONCE", 10)
    entries = [[name, "U8", [0]] for name in names(100)]
    text = manifest_text(entries) if read == Manifest.from_json else header_text([[*e, 0] for e in entries])
    looked = []

    def check():
        looked.append(0)
        if len(looked) == 4:
            raise PeerLost("the trainer has gone")

    with pytest.raises(PeerLost, match="the trainer has gone"):
        read(text, check)
    assert len(read(text, lambda: None).entries) == 100


def test_a_channel_knows_whether_its_peer_is_there():
    a, b = socket.socketpair()
    channel = Channel(b)
    channel.check_peer()
    a.sendall(b"x")
    channel.check_peer()
    assert b.recv(1) == b"x"
    a.close()
    with pytest.raises(PeerLost, match="the connection was closed"):
        channel.check_peer()
    channel.close()
    with pytest.raises(PeerLost, match="the peer went away"):
        channel.check_peer()


@pytest.mark.parametrize("tensors", [16, 2**14])
def test_a_bucket_of_a_size_that_no_memory_has_is_refused(tensors):
    entries = [Entry(f"t{i}", "U8", (2**48,)) for i in range(tensors)]
    header = BucketHeader(1, 0, True, place(entries), tensors * 2**48, checksum(b""))
    receiver = Receiver()
    receiver.pause(1)
    receiver.begin(1, Manifest(tuple(entries)))
    with pytest.raises(Refused, match=f"bucket 0 of version 1 has {tensors * 2**48} bytes"):
        receiver.destination(header)
    assert receiver.state == "receiving"
    receiver.resume()
