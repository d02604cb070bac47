"""Parts of two processes, made in one: when they are served, and what is refused."""

import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlowprec.weight_sync import (
    FanOut,
    InProcess,
    Manifest,
    Receiver,
    Refused,
    ShardedReceiver,
    SyncError,
    WeightSource,
    push,
)
from jaxlowprec.weight_sync import push_shards as push_all
from jaxlowprec.weight_sync.sharded.part import NOTE, part_of, read_shard_name, shard_name
from tests.weight_sync.syncing import Engine

SHAPE = (8, 4)


def tree(version):
    return {"a": np.arange(32, dtype=np.float32).reshape(SHAPE) + version, "b": np.full(3, version, np.int32)}


def parts(version):
    """The shards of two processes: halves of a's rows; b from the first."""
    whole = tree(version)
    halves = [{shard_name("a", (slice(4 * p, 4 * p + 4), slice(None)), SHAPE): whole["a"][4 * p :][:4]} for p in (0, 1)]
    halves[0]["b[0:3]"] = whole["b"]
    return [dict(half) for half in halves]


def sent(joined, version, shards=None, manifest=None, order=(0, 1), numbers=(0, 1), count=2):
    """Pushes both parts, or those of `order`."""
    manifest = manifest or WeightSource(tree(version)).manifest
    shards = shards or parts(version)
    for process in order:
        push(
            part_of(manifest, shards[process], numbers[process], count),
            InProcess(joined.parts[process]),
            version=version,
        )


@pytest.fixture
def joined():
    return ShardedReceiver(Receiver(), 2, timeout=5)


def assert_served(joined, version, of=None):
    assert joined.receiver.version == version and joined.receiver.state == "serving"
    wanted = tree(of or version)
    assert all(np.array_equal(joined.receiver.weights[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_version_is_served_when_both_parts_are_there(joined, order):
    sent(joined, 1)
    sent(joined, 2, order=order[:1])
    assert_served(joined, 1)  # half of version 2 is there
    sent(joined, 2, order=order[1:])
    assert_served(joined, 2)
    assert all(len(part.weights) == 0 and part.version == 2 for part in joined.parts)


def test_a_version_that_lost_a_part_is_skipped(joined):
    sent(joined, 1)
    sent(joined, 2, order=(0,))  # process 1 was killed; both start again
    sent(joined, 3, order=(1,))
    assert_served(joined, 1)  # parts of different versions are not joined
    sent(joined, 3, order=(0,))
    assert_served(joined, 3)


def test_the_engine_pauses_only_for_joining(joined):
    engine = Engine()
    joined = ShardedReceiver(Receiver(on_pause=engine.pause, on_resume=engine.resume), 2)
    sent(joined, 1, order=(0,))
    assert not engine.resumed.is_set()
    sent(joined, 1, order=(1,))
    assert engine.resumed.is_set() and engine.paused == 0


def without(name):
    return lambda shards: [half.pop(name, None) for half in shards]


def moved(shards):
    shards[1]["a[3:7,0:4]"] = shards[1].pop("a[4:8,0:4]")


def twice(shards):
    shards[1]["b[0:3]"] = shards[0]["b[0:3]"]


def narrower(shards):
    shards[0]["b[0:2]"] = shards[0].pop("b[0:3]")[:2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without("a[4:8,0:4]"), r"shards of 'a' cover \[\(0, 4\)\] of axis 0; need all 8"),
        (without("b[0:3]"), "shards of 'b' cover"),
        (moved, "shards of 'a' cover"),
        (twice, "came from two processes"),
        (narrower, r"shards of 'b' cover \[\(0, 2\)\]"),
        (lambda shards: shards[0].update({"c[0:1]": np.ones(1)}), "is no shard of None"),
        (lambda shards: shards[0].update({"b[0:1]": np.ones(1, np.float32)}), "is no shard of Entry"),
        (lambda shards: shards[0].update({"b[0:9]": np.ones(3, np.int32)}), "is no shard of Entry"),
        (lambda shards: shards[0].update({"b": np.ones(3, np.int32)}), "is no name of a shard"),
        (lambda shards: shards[0].update({"b[0:1,0:3]": np.ones((1, 3), np.int32)}), "shards of 'b'"),
    ],
)
def test_parts_that_do_not_fit_are_refused(joined, change, said):
    sent(joined, 1)
    shards = parts(2)
    change(shards)
    with pytest.raises(Refused, match=said):
        sent(joined, 2, shards)
    assert_served(joined, 1)
    sent(joined, 3)
    assert_served(joined, 3)


def test_a_missing_cell_of_a_grid_is_refused(joined):
    """Each axis is covered, and a quarter is missing."""
    quarters = {f"a[{i}:{i + 4},{j}:{j + 2}]": np.zeros((4, 2), np.float32) for i in (0, 4) for j in (0, 2)}
    del quarters["a[4:8,2:4]"]
    with pytest.raises(Refused, match="3 of 4 shards of 'a' came"):
        sent(joined, 1, [quarters, {"b[0:3]": np.zeros(3, np.int32)}])
    assert joined.receiver.version == 0


def test_processes_that_are_others_are_refused(joined):
    for numbers, count in (((1, 0), 2), ((0, 1), 3)):
        with pytest.raises(Refused, match=r"connect each process to parts\[jax.process_index\(\)\]"):
            sent(joined, 1 + max(part.version for part in joined.parts), numbers=numbers, count=count)


def test_different_trees_are_refused(joined):
    sent(joined, 1, order=(0,))
    with pytest.raises(Refused, match="processes 0 and 1 send different trees"):
        sent(joined, 1, order=(1,), manifest=Manifest(()))


@pytest.mark.parametrize("note", [b"", b"{}", b'{"process":"0","processes":2,"manifest":"{}"}', None])
def test_a_part_without_its_note_is_refused(joined, note):
    """Anything else that is sent to a part, such as a whole version."""
    other = WeightSource({"a": np.ones(2)} if note is None else {NOTE: np.frombuffer(note, np.uint8)})
    push(other, InProcess(joined.parts[0]), version=1)
    with pytest.raises(Refused, match="do not fit together"):
        sent(joined, 1, order=(1,))


def test_one_process_with_many_devices_sends_whole_arrays():
    joined, mesh = ShardedReceiver(Receiver(), 1), jax.make_mesh((jax.device_count(),), ("d",))
    array = jax.device_put(np.arange(64.0, dtype=np.float32), NamedSharding(mesh, P("d")))
    assert push_all({"a": array, "n": np.int32(3)}, InProcess(joined.parts[0]), version=7) == 7
    assert np.array_equal(joined.receiver.weights["a"], array) and joined.receiver.weights["n"] == 3


def test_mistakes_are_raised_before_anything_is_sent():
    joined = ShardedReceiver(Receiver(), 1)
    with pytest.raises(ValueError, match="version is 1.5; needs a whole number"):
        push_all({"a": np.ones(1)}, InProcess(joined.parts[0]), version=1.5)
    with pytest.raises(TypeError, match="needs arrays"):
        push_all({"a": 1.0}, InProcess(joined.parts[0]))
    with pytest.raises(ValueError, match="processes=0; needs the number"):
        ShardedReceiver(Receiver(), 0)
    assert joined.parts[0].version == 0


def test_many_receivers_of_one_process():
    receivers = {name: ShardedReceiver(Receiver(), 1) for name in ("a", "b", "c")}
    fan_out = FanOut({name: InProcess(joined.parts[0]) for name, joined in receivers.items()})
    assert push_all(tree(1), fan_out).served == ("a", "b", "c")
    fan_out.remove("c")
    receivers["b"].receiver.pause(0.0)  # somebody else sends to it: the commit of the part is refused
    found = push_all(tree(2), fan_out, version=5)
    assert (found.version, found.served, list(found.failed)) == (5, ("a",), ["b"])
    assert fan_out.receivers == ("a", "b")  # who refused stays
    assert [joined.receiver.version for joined in receivers.values()] == [5, 1, 1]
    assert_served(receivers["a"], 5, of=2)


def test_nobody_to_send_to():
    with pytest.raises(ValueError, match="no receivers are left; add one"):
        push_all(tree(1), FanOut())
    joined = ShardedReceiver(Receiver(), 1)
    joined.receiver.pause(0.0)
    with pytest.raises(SyncError, match="no receiver got version 1: a: .*pause"):
        push_all(tree(1), FanOut({"a": InProcess(joined.parts[0])}))


@pytest.mark.parametrize("begin", ["a[", "a[1:", "[" * 1000, ""])
@pytest.mark.parametrize("group", ["111111111111:", "1:1,", "1:1", "1,", "[1:1"])
def test_no_name_of_a_shard_takes_long_to_read(begin, group):
    """Whoever sends a part chooses the names, and an engine that reads them stands still."""
    began = time.process_time()
    with pytest.raises(ValueError, match="is no name of a shard"):
        read_shard_name(begin + group * 20_000 + "1x")
    assert time.process_time() - began < 5
