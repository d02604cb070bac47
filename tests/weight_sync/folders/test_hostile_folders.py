"""Whatever lies in a folder of versions: pull ends, with a whole version or a sentence, and publishing goes on."""

import json
import shutil
import time

import numpy as np
import pytest

from jaxlowprec.checkpoints.files.written_whole import TEMPORARY_PREFIX
from jaxlowprec.weight_sync import DeltaTransport, DirectoryTransport, Receiver, Refused, WeightSource, pull, push
from jaxlowprec.weight_sync.folders import layout as folders
from jaxlowprec.weight_sync.folders import pulling as pulling_module
from jaxlowprec.weight_sync.folders.layout import _checksum
from tests.weight_sync.syncing import is_whole, model, packed, sync


def planted(folder, kind, elsewhere):
    """Puts something of a version's name there that is no version."""
    if kind == "dangling link":
        folder.symlink_to(elsewhere / "nowhere")
    elif kind == "link to a version":
        sync(DirectoryTransport(elsewhere), 9)
        folder.symlink_to(elsewhere / "v000009")
    else:
        folder.write_text("a file")


@pytest.mark.parametrize("kind", ["dangling link", "link to a version", "file"])
def test_what_is_no_folder_is_no_version(tmp_path, kind):
    versions, receiver = tmp_path / "versions", Receiver()
    transport = DirectoryTransport(versions)
    sync(transport, 2)
    planted(versions / "v000009", kind, tmp_path / "elsewhere")
    assert pull(versions, receiver, wait=0) == 2 and is_whole(receiver.weights, 2)
    assert pull(versions, receiver, wait=0) == 2
    with pytest.raises(Refused, match="v000009: is there already, and is not a version; remove it"):
        sync(transport, 9)
    sync(transport, 10)
    assert pull(versions, receiver) == 10


@pytest.mark.parametrize("name", ["v9999999999999999999", "v0000007", "v000000", "v٠٠٠٠٠٧", "v000007-delta-delta"])
def test_only_names_that_a_transport_gives_are_versions(tmp_path, name):
    (tmp_path / name).mkdir()
    assert folders.versions(tmp_path) == {}
    assert DirectoryTransport(tmp_path).version(60) == 0


def gone(monkeypatch, numbers):
    """Some versions are listed, and not there when they are opened."""
    being_read = folders.being_read

    def opened(folder):
        if int(folder.name[1:7]) in numbers:
            raise FileNotFoundError(2, "No such file or directory", str(folder))
        return being_read(folder)

    monkeypatch.setattr(pulling_module.folders, "being_read", opened)


@pytest.mark.parametrize("wait", [0, 0.2])
def test_an_unopenable_version_does_not_hide_an_older_one(tmp_path, monkeypatch, wait):
    transport, receiver = DirectoryTransport(tmp_path, keep=5), Receiver()
    for version in (1, 2, 3):
        sync(transport, version)
    gone(monkeypatch, {3})
    assert pull(tmp_path, receiver, wait=wait) == 2 and is_whole(receiver.weights, 2)
    started = time.monotonic()
    with pytest.raises(Refused, match="version 3 is listed but cannot be opened: .*No such file"):
        pull(tmp_path, receiver, wait=wait)
    assert time.monotonic() - started >= wait
    assert is_whole(receiver.weights, 2) and receiver.state == "serving"


def test_a_version_pruned_while_opened_gives_way(tmp_path, monkeypatch):
    transport, receiver = DirectoryTransport(tmp_path, keep=1), Receiver()
    sync(transport, 1)
    being_read = folders.being_read

    def pruned(folder):
        if folder.name == "v000001":
            sync(transport, 2)
        return being_read(folder)

    monkeypatch.setattr(pulling_module.folders, "being_read", pruned)
    assert pull(tmp_path, receiver) == 2 and is_whole(receiver.weights, 2)


@pytest.mark.parametrize("wait", [float("nan"), float("inf"), -1, "1", None])
def test_a_wait_that_never_ends_is_an_error(tmp_path, wait):
    with pytest.raises(ValueError, match="pull: wait is .*needs seconds, 0 or more and finite"):
        pull(tmp_path, Receiver(), wait=wait)


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), 0, "1"])
def test_a_timeout_that_never_ends_is_an_error(tmp_path, timeout):
    with pytest.raises(ValueError, match="timeout is"):
        pull(tmp_path, Receiver(), timeout=timeout)
    sync(DirectoryTransport(tmp_path), 1)
    with pytest.raises(ValueError, match="timeout is"):
        DirectoryTransport(tmp_path).pause(timeout)


def test_a_path_that_is_a_file_is_refused_on_both_sides(tmp_path):
    path = tmp_path / "file"
    path.write_text("x")
    for call in (lambda: pull(path, Receiver()), lambda: sync(DirectoryTransport(path), 1)):
        with pytest.raises(Refused, match="file: Not a directory; needs the folder of versions"):
            call()


WRONG = [None, True, -1, 0, 2**70, 1.5, "x", "x" * 5000, [], [[]], [None], {}, {"a": 1}, [{"version": 1}]]


@pytest.mark.parametrize(
    "field", ["format", "version", "base_version", "files", "manifest", "buckets", "before", "after"]
)
@pytest.mark.parametrize("delta", [False, True])
def test_a_record_of_wrong_types_is_refused(tmp_path, field, delta):
    transport, receiver = DeltaTransport(tmp_path), Receiver()
    for version in (1, 2) if delta else (1,):
        sync(transport, version)
    path = tmp_path / ("v000002-delta" if delta else "v000001") / "manifest.json"
    right = json.loads(path.read_text())
    for value in WRONG:
        content = {name: v for name, v in right.items() if name != "checksum"} | {field: value}
        if value == right[field] and type(value) is type(right[field]):
            continue
        path.write_text(json.dumps({**content, "checksum": _checksum(content)}))
        with pytest.raises(Refused, match="publish a"):
            pull(tmp_path, receiver)
        assert receiver.version == 0 and receiver.state == "serving"


def test_a_delta_of_other_tensors_than_its_base_is_refused(tmp_path):
    transport, receiver = DeltaTransport(tmp_path / "a"), Receiver()
    for version in (1, 2):
        sync(transport, version)
    sync(DeltaTransport(tmp_path / "b"), 1, {**model(1), "more": np.zeros(3, np.float32)})
    shutil.rmtree(tmp_path / "a" / "v000001")
    (tmp_path / "b" / "v000001").rename(tmp_path / "a" / "v000001")
    with pytest.raises(Refused, match="has other tensors than version 2"):
        pull(tmp_path / "a", receiver)


@pytest.mark.parametrize("transport", [DirectoryTransport, DeltaTransport])
def test_an_emptied_folder_is_reported_and_counting_goes_on(tmp_path, transport):
    receiver, trainer = Receiver(), transport(tmp_path)
    for _ in range(2):
        push(WeightSource(model(7)), trainer)
    assert pull(tmp_path, receiver) == 2
    shutil.rmtree(tmp_path)
    assert push(WeightSource(model(8)), trainer) == 3
    assert pull(tmp_path, receiver) == 3 and is_whole(receiver.weights, 8)
    shutil.rmtree(tmp_path)
    assert pull(tmp_path, receiver) == 3  # nothing is there yet
    assert push(WeightSource(model(9)), transport(tmp_path)) == 1  # another process, which knows of nothing
    for wait in (0, 0.1):
        with pytest.raises(Refused, match="the newest version is 1, and 3 is served: .* publish version 4"):
            pull(tmp_path, receiver, wait=wait)
    assert is_whole(receiver.weights, 8)


def leftover(path, kind, elsewhere):
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    if kind == "file":
        path.write_text("left")
    elif kind == "dangling link":
        path.symlink_to(elsewhere / "nowhere")
    elif kind == "link to a folder":
        path.symlink_to(elsewhere)
    else:
        path.mkdir()
        (path / "model.safetensors").write_text("left")


@pytest.mark.parametrize("removable", [True, False])
@pytest.mark.parametrize("kind", ["file", "dangling link", "link to a folder", "folder"])
def test_leftovers_neither_block_nor_redirect_publishing(tmp_path, monkeypatch, caplog, kind, removable):
    versions, elsewhere, receiver = tmp_path / "versions", tmp_path / "elsewhere", Receiver()
    transport = DirectoryTransport(versions, keep=1)
    sync(transport, 1)
    left = versions / f"{TEMPORARY_PREFIX}v000002"
    leftover(left, kind, elsewhere)

    def busy(path, *_, **__):
        raise OSError(16, "Device or resource busy", str(path))

    if not removable:
        with monkeypatch.context() as patch:
            patch.setattr(folders.shutil, "rmtree", busy)
            patch.setattr(type(left), "unlink", busy)
            transport.pause(60)
        assert "is left over and cannot be removed: Device or resource busy" in caplog.text
        manifest, buckets = packed(model(2), 2)
        transport.begin(2, manifest, 60)
        for bucket in buckets:
            transport.send(bucket, 60)
        transport.commit(2, manifest.hash, 60)
        transport.resume(60)
    else:
        sync(transport, 2)
    assert pull(versions, receiver) == 2 and is_whole(receiver.weights, 2)
    sync(transport, 3)
    assert sorted(e.name for e in versions.iterdir()) == [".lock", "v000003"]
    assert [e.name for e in elsewhere.iterdir()] == ["mine"] and (elsewhere / "mine").read_text() == "mine"


def test_a_lock_that_is_a_link_is_refused_and_its_target_stays(tmp_path):
    versions, target = tmp_path / "versions", tmp_path / "target"
    versions.mkdir()
    (versions / ".lock").symlink_to(target)
    with pytest.raises(Refused, match=r"\.lock: .*needs a file that trainers can lock, and no link"):
        sync(DirectoryTransport(versions), 1)
    assert not target.exists()
