"""Versions as folders: what has a name is complete, and nobody loses what he reads."""

import json
import os
import pathlib
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from safetensors import safe_open

from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from jaxlowprec.checkpoints.files.written_whole import TEMPORARY_PREFIX
from jaxlowprec.weight_sync.errors import Refused
from jaxlowprec.weight_sync.folders import layout as folders
from jaxlowprec.weight_sync.folders.directory import DirectoryTransport
from jaxlowprec.weight_sync.folders.pulling import pull
from jaxlowprec.weight_sync.receiving.receiver import Receiver
from jaxlowprec.weight_sync.transports.transport import Transport
from tests.helpers import python_environment
from tests.weight_sync.syncing import is_whole, model, packed, sync


def names(path):
    return sorted(entry.name for entry in path.iterdir() if entry.name != folders.LOCK)


def begun(path, version, buckets_sent=1):
    """A transport in the middle of a version."""
    transport = DirectoryTransport(path)
    manifest, buckets = packed(model(version), version)
    transport.pause(60)
    transport.begin(version, manifest, 60)
    for bucket in buckets[:buckets_sent]:
        transport.send(bucket, 60)
    return transport, manifest, buckets


def test_versions_go_from_folder_to_receiver(tmp_path):
    transport, receiver = DirectoryTransport(tmp_path), Receiver()
    assert isinstance(transport, Transport)
    assert transport.version(60) == 0
    for version in (1, 2, 9):
        sync(transport, version)
        assert transport.version(60) == version
        assert pull(tmp_path, receiver) == version
        assert is_whole(receiver.weights, version)
    assert receiver.state == "serving"


def test_a_version_is_a_checkpoint_that_others_read(tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    sync(DirectoryTransport(tmp_path / "weights", files=[config], shard_bytes=5000), 3)
    folder = tmp_path / "weights" / "v000003"
    with CheckpointFolder(folder) as opened:
        assert opened.config() == {"model_type": "llama"}
        assert len(opened.shards) > 1
        assert is_whole({name: opened.read(name) for name in opened.shard_of}, 3)
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert is_whole(found, 3)


@pytest.mark.parametrize("stage", range(5))
def test_nobody_sees_a_version_before_its_commit(tmp_path, stage):
    sync(DirectoryTransport(tmp_path), 1)
    transport, _, _ = begun(tmp_path, 2, buckets_sent=min(stage, 3))
    receiver = Receiver()
    assert pull(tmp_path, receiver) == 1 and is_whole(receiver.weights, 1)
    if stage < 4:
        transport.abort("changed its mind", 60)
    transport.resume(60)
    assert names(tmp_path) == ["v000001"]
    sync(DirectoryTransport(tmp_path), 2)
    assert pull(tmp_path, receiver) == 2 and is_whole(receiver.weights, 2)


def test_stale_incomplete_and_damaged_versions_are_refused(tmp_path):
    sync(DirectoryTransport(tmp_path), 4)
    transport = DirectoryTransport(tmp_path)
    manifest, buckets = packed(model(5), 5)
    with pytest.raises(Refused, match="pause first"):
        transport.begin(5, manifest, 60)
    transport.pause(60)
    with pytest.raises(Refused, match="version 4 is stale; 4 is published"):
        transport.begin(4, manifest, 60)
    with pytest.raises(Refused, match="begin one first"):
        transport.send(buckets[0], 60)
    transport.begin(5, manifest, 60)
    with pytest.raises(Refused, match="version 5 is being written"):
        transport.begin(6, manifest, 60)
    with pytest.raises(Refused, match="out of order"):
        transport.send(buckets[2], 60)
    buckets[0].payload[0] ^= 1
    with pytest.raises(Refused, match="is corrupt"):
        transport.send(buckets[0], 60)
    buckets[0].payload[0] ^= 1
    transport.send(buckets[0], 60)
    with pytest.raises(Refused, match="is there already"):
        transport.send(buckets[0], 60)
    with pytest.raises(Refused, match="incomplete"):
        transport.commit(5, manifest.hash, 60)
    with pytest.raises(Refused, match="commit: version 6"):
        transport.commit(6, manifest.hash, 60)
    for bucket in buckets[1:]:
        transport.send(bucket, 60)
    transport.commit(5, manifest.hash, 60)
    transport.resume(60)
    receiver = Receiver()
    assert pull(tmp_path, receiver) == 5 and is_whole(receiver.weights, 5)


def test_a_second_trainer_is_refused_and_then_gets_its_turn(tmp_path):
    first, _, _ = begun(tmp_path, 1)
    second = DirectoryTransport(tmp_path)
    started = time.monotonic()
    with pytest.raises(Refused, match="another trainer has been writing for 0.2 s"):
        second.pause(0.2)
    assert time.monotonic() - started >= 0.2
    with pytest.raises(Refused, match="open already"):
        first.pause(0.2)
    threading.Timer(0.2, first.close).start()
    second.pause(60)
    second.resume(60)


@pytest.mark.slow
def test_what_a_killed_trainer_left_is_removed_by_the_next(tmp_path):
    begin = "from tests.weight_sync.folders.test_directory import begun; begun(sys.argv[1], 1)"
    code = f"import os, sys; {begin}; os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], env=python_environment(), timeout=600, check=False)
    assert done.returncode == -9
    assert names(tmp_path) == [TEMPORARY_PREFIX + "v000001"]
    sync(DirectoryTransport(tmp_path), 1)
    assert names(tmp_path) == ["v000001"]


def test_old_versions_go_but_none_that_is_read(tmp_path):
    transport = DirectoryTransport(tmp_path, keep=2)
    sync(transport, 1)
    with folders.being_read(tmp_path / "v000001"):
        for version in (2, 3, 4):
            sync(transport, version)
        assert names(tmp_path) == ["v000001", "v000003", "v000004"]
    sync(transport, 5)
    assert names(tmp_path) == ["v000004", "v000005"]


def test_weights_that_were_pulled_outlive_their_folder(tmp_path):
    transport, receiver = DirectoryTransport(tmp_path, keep=1), Receiver()
    sync(transport, 1)
    pull(tmp_path, receiver)
    old = receiver.weights
    sync(transport, 2)
    assert names(tmp_path) == ["v000002"]
    assert is_whole(old, 1)


def test_pull_gives_what_is_there_and_waits_only_if_told(tmp_path):
    receiver = Receiver()
    assert pull(tmp_path / "not yet", receiver) == 0
    started = time.monotonic()
    assert pull(tmp_path, receiver, wait=0.2) == 0
    assert time.monotonic() - started >= 0.2
    threading.Timer(0.2, sync, (DirectoryTransport(tmp_path), 3)).start()
    assert pull(tmp_path, receiver, wait=60) == 3
    paused = []
    receiver = Receiver(on_pause=paused.append)
    pull(tmp_path, receiver)
    assert pull(tmp_path, receiver) == 3 and len(paused) == 1  # nothing new: nobody is disturbed


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("place", [0.1, 0.5, 0.99])
@pytest.mark.parametrize("file", ["model.safetensors", "manifest.json"])
def test_damage_on_the_disk_is_refused_and_the_old_version_stays(tmp_path, file, place):
    transport, receiver = DirectoryTransport(tmp_path), Receiver()
    sync(transport, 1)
    pull(tmp_path, receiver)
    sync(transport, 2)
    path = tmp_path / "v000002" / file
    flip(path, int(place * path.stat().st_size))
    with pytest.raises(Refused, match="v000002.*publish another complete version"):
        pull(tmp_path, receiver)
    assert is_whole(receiver.weights, 1) and receiver.state == "serving"
    sync(transport, 3)
    assert pull(tmp_path, receiver) == 3 and is_whole(receiver.weights, 3)


@pytest.mark.parametrize("file", ["model.safetensors", "manifest.json"])
@pytest.mark.parametrize("fault", ["missing", "truncated", "empty"])
def test_missing_and_truncated_files_are_refused(tmp_path, file, fault):
    sync(DirectoryTransport(tmp_path), 1)
    path = tmp_path / "v000001" / file
    if fault == "missing":
        path.unlink()
    else:
        os.truncate(path, 0 if fault == "empty" else path.stat().st_size // 2)
    receiver = Receiver()
    with pytest.raises(Refused, match="publish another complete version"):
        pull(tmp_path, receiver)
    assert receiver.version == 0 and receiver.state == "serving"


def test_a_version_under_another_number_is_refused(tmp_path):
    sync(DirectoryTransport(tmp_path), 1)
    (tmp_path / "v000001").rename(tmp_path / "v000007")
    with pytest.raises(Refused, match="it is version 1's"):
        pull(tmp_path, Receiver())


def test_other_files_beside_the_versions_are_no_versions(tmp_path):
    for name in ("v1", "v000002.bak", "notes", ".jaxlowprec-writing-v000009"):
        (tmp_path / name).mkdir()
    assert folders.versions(tmp_path) == {}


def test_a_full_disk_leaves_the_old_version(tmp_path, monkeypatch):
    transport, receiver = DirectoryTransport(tmp_path), Receiver()
    sync(transport, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            sync(transport, 2)
    assert names(tmp_path) == ["v000001"]
    assert pull(tmp_path, receiver) == 1
    sync(transport, 2)
    assert pull(tmp_path, receiver) == 2 and is_whole(receiver.weights, 2)


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": 1.5}, {"files": ["/nowhere/config.json"]}])
def test_options_that_make_no_sense_are_errors(tmp_path, options):
    with pytest.raises(ValueError, match="DirectoryTransport: (keep|files)"):
        DirectoryTransport(tmp_path, **options)


def test_the_manifest_says_what_the_version_is(tmp_path):
    sync(DirectoryTransport(tmp_path), 6)
    content = json.loads((tmp_path / "v000006" / "manifest.json").read_text())
    assert content["version"] == 6 and content["base_version"] is None
    assert [entry[0] for entry in content["manifest"]["entries"]] == list(model(6))


def test_many_versions_leave_no_descriptors_behind(tmp_path):
    transport, receiver = DirectoryTransport(tmp_path), Receiver()
    small = {"a": np.zeros(3, np.uint8)}
    for version in range(1, 4):
        sync(transport, version, small, buckets=1)
        pull(tmp_path, receiver)
    before = len(list(pathlib.Path("/proc/self/fd").iterdir()))
    for version in range(4, 24):
        sync(transport, version, small, buckets=1)
        pull(tmp_path, receiver)
    assert len(list(pathlib.Path("/proc/self/fd").iterdir())) <= before
