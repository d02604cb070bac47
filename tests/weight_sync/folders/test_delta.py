"""Deltas: what they give is the version itself, to the byte, or nothing."""

import os

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from jaxlowprec.weight_sync.bucket import checksum
from jaxlowprec.weight_sync.errors import Refused
from jaxlowprec.weight_sync.folders import delta
from jaxlowprec.weight_sync.folders import layout as folders
from jaxlowprec.weight_sync.folders.delta import Changes, DeltaTransport, apply_delta, apply_runs, changed_runs
from jaxlowprec.weight_sync.folders.layout import read_record
from jaxlowprec.weight_sync.folders.pulling import pull
from jaxlowprec.weight_sync.receiving.receiver import Receiver
from tests.weight_sync.syncing import is_whole, model, sync


def trained(steps, size=40000):
    """Weights after each of some steps: most bytes stay, some tensors stay whole."""
    random = np.random.default_rng(0)
    weights = {
        "dense": random.standard_normal(size).astype(np.float32),
        "sparse": random.standard_normal((size // 8, 8)).astype(ml_dtypes.bfloat16),
        "frozen": random.standard_normal(size).astype(np.float16),
        "step": np.int64(0).reshape(()),
        "none": np.zeros((0, 4), np.float32),
    }
    for step in range(steps):
        weights = dict(weights)
        weights["dense"] = weights["dense"] * np.float32(0.999)
        sparse = weights["sparse"].copy().reshape(-1)
        at = random.integers(0, size, size // 100)
        sparse[at] = sparse[at] * ml_dtypes.bfloat16(1.01)
        weights["sparse"] = sparse.reshape(-1, 8)
        weights["step"] = np.asarray(step + 1)
        yield weights


def same(weights, expected):
    return set(weights) == set(expected) and all(
        np.asarray(weights[name]).tobytes() == np.asarray(expected[name]).tobytes() for name in expected
    )


def published(path, steps, **options):
    """A transport that published some steps as versions 1, 2, ..., and the weights of each."""
    transport = DeltaTransport(path, **options)
    made = list(trained(steps))
    for version, weights in enumerate(made, 1):
        sync(transport, version, weights)
    return transport, made


def kinds(path):
    return [folder.name for folder in folders.versions(path).values()]


def test_each_version_is_the_trainers_to_the_byte(tmp_path):
    transport, receiver = DeltaTransport(tmp_path, full_every=4, keep=10), Receiver()
    for version, weights in enumerate(trained(9), 1):
        sync(transport, version, weights)
        assert pull(tmp_path, receiver) == version
        assert same(receiver.weights, weights)
    assert [folders.is_delta(folder) for folder in folders.versions(tmp_path).values()] == [
        *(False, True, True, True),
        *(False, True, True, True),
        False,
    ]


@pytest.mark.parametrize("behind", range(6))
def test_a_receiver_catches_up_over_several_deltas(tmp_path, behind):
    receiver = Receiver()
    transport, made = DeltaTransport(tmp_path, full_every=10), list(trained(6))
    for version, weights in enumerate(made, 1):
        sync(transport, version, weights)
        if version == behind:
            pull(tmp_path, receiver)
    assert pull(tmp_path, receiver) == 6
    assert same(receiver.weights, made[-1])


def test_a_delta_has_the_bytes_that_changed_and_no_more(tmp_path):
    published(tmp_path, 2)
    with Changes(tmp_path / "v000002-delta", len(list((tmp_path / "v000002-delta").glob("delta-*")))) as opened:
        found = set(opened._file_of)
    assert found == {"whole:dense", "runs:sparse", "bytes:sparse", "runs:step", "bytes:step"}
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "v000002-delta").iterdir()}
    dense, sparse = 4 * 40000, 2 * 40000
    assert sum(sizes.values()) < dense + 0.1 * sparse + 8000


def test_an_unchanged_version_is_a_delta_without_files(tmp_path):
    transport, receiver = DeltaTransport(tmp_path), Receiver()
    for version in (1, 2):
        sync(transport, version, model(1))
    assert [file.name for file in (tmp_path / "v000002-delta").iterdir()] == ["manifest.json"]
    assert pull(tmp_path, receiver) == 2 and is_whole(receiver.weights, 1)


def test_the_receivers_old_version_stays_as_it_was(tmp_path):
    transport, receiver = DeltaTransport(tmp_path), Receiver()
    first, second = trained(2)
    sync(transport, 1, first)
    pull(tmp_path, receiver)
    old = receiver.weights
    sync(transport, 2, second)
    pull(tmp_path, receiver)
    assert same(old, first) and same(receiver.weights, second)


def test_from_a_receivers_own_version_only_the_delta_is_read(tmp_path):
    receiver = Receiver()
    transport = DeltaTransport(tmp_path)
    first, second = trained(2)
    sync(transport, 1, first)
    pull(tmp_path, receiver)
    sync(transport, 2, second)
    (tmp_path / "v000001" / "model.safetensors").unlink()
    assert pull(tmp_path, receiver) == 2
    assert same(receiver.weights, second)


def test_other_bytes_of_a_version_start_from_the_complete_one(tmp_path):
    receiver, other = Receiver(), tmp_path / "other"
    transport, made = published(tmp_path / "ours", 1)
    wrong = {**made[0], "frozen": made[0]["frozen"] + 1}
    sync(DeltaTransport(other), 1, wrong)
    pull(other, receiver)
    second = list(trained(2))[1]
    sync(transport, 2, second)
    assert pull(tmp_path / "ours", receiver) == 2
    assert same(receiver.weights, second)


def test_a_chain_that_is_broken_is_refused_with_what_to_do(tmp_path):
    published(tmp_path, 4)
    (tmp_path / "v000003-delta").rename(tmp_path / "elsewhere")
    receiver = Receiver()
    with pytest.raises(Refused, match="version 4 is a change of 3, which is not there; publish a complete version"):
        pull(tmp_path, receiver)
    assert receiver.version == 0 and receiver.state == "serving"


def test_applying_twice_is_applying_once(tmp_path):
    published(tmp_path, 2)
    first, second = trained(2)
    folder = tmp_path / "v000002-delta"
    record = read_record(folder)
    with Changes(folder, record.files) as opened:
        for name in first:
            tensor = np.frombuffer(bytearray(np.asarray(first[name]).tobytes()), np.uint8)
            wanted = np.asarray(second[name]).tobytes()
            digest = apply_delta(name, tensor, checksum(tensor), opened, record)
            assert tensor.tobytes() == wanted and digest == checksum(wanted)
            assert apply_delta(name, tensor, digest, opened, record) == digest
            assert tensor.tobytes() == wanted


def test_a_wrong_base_is_refused(tmp_path):
    published(tmp_path, 2)
    folder = tmp_path / "v000002-delta"
    record = read_record(folder)
    tensor = np.zeros(80000, np.uint8)
    with (
        Changes(folder, record.files) as opened,
        pytest.raises(Refused, match="applies to version 1's.*publish a complete version"),
    ):
        apply_delta("sparse", tensor, checksum(tensor), opened, record)
    assert not tensor.any()


@pytest.mark.parametrize("file", ["delta-00000.safetensors", "manifest.json"])
@pytest.mark.parametrize("place", [0.2, 0.5, 0.8, 0.999])
@pytest.mark.parametrize("served", [True, False])
def test_a_damaged_delta_is_refused_and_the_old_version_stays(tmp_path, file, place, served):
    receiver = Receiver()
    transport = DeltaTransport(tmp_path, full_every=2)
    first, second, third = trained(3)
    sync(transport, 1, first)
    if served:
        pull(tmp_path, receiver)
    sync(transport, 2, second)
    path = tmp_path / "v000002-delta" / file
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 16
    path.write_bytes(data)
    with pytest.raises(Refused, match="publish a"):
        pull(tmp_path, receiver)
    assert receiver.version == served and receiver.state == "serving"
    assert not served or same(receiver.weights, first)
    sync(transport, 3, third)  # complete
    assert pull(tmp_path, receiver) == 3 and same(receiver.weights, third)


def test_a_restarted_trainer_begins_with_a_complete_version(tmp_path):
    published(tmp_path, 2)
    sync(DeltaTransport(tmp_path), 3, list(trained(3))[-1])
    assert kinds(tmp_path) == ["v000001", "v000002-delta", "v000003"]


def test_other_tensors_than_before_make_a_complete_version(tmp_path):
    transport, receiver = DeltaTransport(tmp_path), Receiver()
    sync(transport, 1)
    sync(transport, 2, {**model(2), "new": np.ones(3, np.float32)})
    sync(transport, 3, {**model(3), "new": np.ones(3, np.float32)})
    assert kinds(tmp_path) == ["v000001", "v000002", "v000003-delta"]
    assert pull(tmp_path, receiver) == 3


def test_an_aborted_version_does_not_count_as_the_one_before(tmp_path):
    transport, receiver = DeltaTransport(tmp_path), Receiver()
    made = list(trained(3))
    sync(transport, 1, made[0])
    with pytest.raises(Refused):
        sync(transport, 1, made[1])
    with pytest.raises(KeyboardInterrupt):
        interrupted(transport, 2, made[1])
    sync(transport, 2, made[2])
    assert kinds(tmp_path) == ["v000001", "v000002-delta"]
    assert pull(tmp_path, receiver) == 2 and same(receiver.weights, made[2])


def interrupted(transport, version, weights):
    class Cut(type(transport)):
        def commit(self, *_):
            raise KeyboardInterrupt

    kind, transport.__class__ = transport.__class__, Cut
    try:
        sync(transport, version, weights)
    finally:
        transport.__class__ = kind


def test_deltas_stay_as_long_as_their_complete_version(tmp_path):
    published(tmp_path, 10, full_every=3, keep=2)
    assert kinds(tmp_path) == ["v000007", "v000008-delta", "v000009-delta", "v000010"]


def test_a_lost_base_costs_one_complete_version(tmp_path, monkeypatch, caplog):
    transport, receiver = DeltaTransport(tmp_path), Receiver()
    made = list(trained(3))
    sync(transport, 1, made[0])
    with monkeypatch.context() as patch:
        patch.setattr(Changes, "apply", lambda *_: (_ for _ in ()).throw(OSError("no more memory maps")))
        sync(transport, 2, made[1])
    assert "the next version will be complete" in caplog.text
    sync(transport, 3, made[2])
    assert kinds(tmp_path) == ["v000001", "v000002-delta", "v000003"]
    assert pull(tmp_path, receiver) == 3 and same(receiver.weights, made[2])


@pytest.mark.parametrize("full_every", [0, -1, 2.0])
def test_full_every_needs_a_number(tmp_path, full_every):
    with pytest.raises(ValueError, match="full_every"):
        DeltaTransport(tmp_path, full_every=full_every)


pairs = st.integers(0, 300).flatmap(
    lambda n: st.tuples(*(arrays_of.arrays(np.uint8, n, elements=st.integers(0, 2)) for _ in range(2)))
)


@given(pairs, st.sampled_from([7, 64, 1 << 24]), st.sampled_from([3, 50, 65535]), st.sampled_from([1, 5, 1 << 16]))
def test_runs_turn_the_old_bytes_into_the_new_ones(pair, chunk, most, runs_at_once):
    """With small limits, so that every border between chunks and runs is met."""
    old, new = pair
    before = delta._CHUNK, delta._MOST, delta._RUNS
    delta._CHUNK, delta._MOST, delta._RUNS = chunk, most, runs_at_once
    try:
        runs, values = changed_runs(old, new)
        assert (runs <= most).all()
        tensor = old.copy()
        apply_runs(tensor, runs, values)
        assert (tensor == new).all()
        apply_runs(tensor, runs, values)
        assert (tensor == new).all()
        changed = np.count_nonzero(old != new)
        assert changed <= values.size <= changed + delta._MERGE * max(0, changed - 1)
    finally:
        delta._CHUNK, delta._MOST, delta._RUNS = before


def test_gaps_and_runs_longer_than_16_bits_survive():
    old = np.zeros(1_000_000, np.uint8)
    new = old.copy()
    new[[0, 200_000, 999_999]] = 1
    new[300_000:500_000] = 2
    runs, values = changed_runs(old, new)
    assert values.size == 3 + 200_000 and len(runs) < 30
    apply_runs(old, runs, values)
    assert (old == new).all()


@given(
    arrays_of.arrays(np.uint16, st.tuples(st.integers(0, 5), st.just(2))), st.binary(max_size=20), st.integers(0, 99)
)
def test_runs_that_do_not_fit_write_nothing(runs, values, size):
    tensor = np.zeros(size, np.uint8)
    values = np.frombuffer(values, np.uint8)
    fits = runs.sum(dtype=np.int64) <= size and runs[:, 1].sum(dtype=np.int64) == values.size
    if fits:
        apply_runs(tensor, runs, values)
    else:
        with pytest.raises(ValueError, match="runs that end at"):
            apply_runs(tensor, runs, values)
        assert not tensor.any()


def test_a_file_that_was_truncated_is_refused(tmp_path):
    published(tmp_path, 2)
    path = tmp_path / "v000002-delta" / "delta-00000.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(Refused, match="truncated"):
        pull(tmp_path, Receiver())
