"""A conversion that is killed goes on where it stopped, and ends with the bytes of one that was not."""

import fcntl
import os
import signal
import subprocess
import sys
import time

import pytest

from jaxlowprec.checkpoints import schemes
from jaxlowprec.checkpoints.conversion.convert import ConvertOptions, convert
from jaxlowprec.checkpoints.conversion.resume import MANIFEST
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.written_whole import TEMPORARY_PREFIX, publish
from tests.checkpoints.small_models import contents, llama, write_checkpoint
from tests.helpers import often

NVFP4 = schemes.by_name("nvfp4")
SHARDS = [f"model-{i + 1:05}-of-00003.safetensors" for i in range(3)]

KILLED = """
import os, pathlib, signal, sys
import jax
jax.config.update("jax_platforms", "cpu")
from jaxlowprec.checkpoints import schemes
from jaxlowprec.checkpoints.conversion.convert import ConvertOptions, convert

source, destination, where, count = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])

def countdown(function):
    def counted(*arguments, **options):
        global count
        count -= 1
        if count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return counted

if where == "replace":
    pathlib.Path.replace = countdown(pathlib.Path.replace)
elif where == "fsync":
    os.fsync = countdown(os.fsync)
elif where == "pwrite":
    os.pwrite = countdown(os.pwrite)
convert(source, destination, schemes.by_name("nvfp4"), options=ConvertOptions(workers=1))
print("not killed")
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("models") / "source", llama())


@pytest.fixture(scope="module")
def uninterrupted(source):
    convert(source, source.parent / "uninterrupted", NVFP4)
    return contents(source.parent / "uninterrupted")


def killed(source, destination, where, count):
    """Runs a conversion in a process that is killed at the count-th call of something."""
    arguments = [sys.executable, "-c", KILLED, str(source), str(destination), where, str(count)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr


KILLS = [
    ("fsync", 1, {0}),  # in the manifest
    ("pwrite", 9, {0}),  # in the first file
    ("pwrite", 30, {0, 1}),  # in the second; the disk takes a file while the next is computed
    ("pwrite", 45, {1, 2}),  # in the third
    ("replace", 2, {0}),  # the first is on the disk, without its name (the manifest was the first of all)
    ("replace", 4, {2}),
    ("replace", 5, {3}),  # all weights, no index
    ("replace", 8, {3}),  # all but the config
]


@pytest.mark.parametrize(("where", "count", "finished"), often([KILLS[0], KILLS[2]], KILLS, 3))
def test_killed_and_resumed(source, uninterrupted, tmp_path, where, count, finished):
    destination = tmp_path / "low"
    killed(source, destination, where, count)
    left = contents(destination)
    assert left and "config.json" not in left  # nothing that could be taken for a checkpoint
    done = [shard for shard in SHARDS if shard in left]
    assert len(done) in finished
    assert all(left[shard] == uninterrupted[shard] for shard in done)
    inodes = {shard: (destination / shard).stat().st_ino for shard in done}
    report = convert(source, destination, NVFP4, options=ConvertOptions(verify=True))
    assert report.kept == done and report.written == [shard for shard in SHARDS if shard not in done]
    assert {shard: (destination / shard).stat().st_ino for shard in done} == inodes
    assert contents(destination) == uninterrupted


@pytest.mark.slow
def test_killed_by_somebody_else(source, uninterrupted, tmp_path):
    destination = tmp_path / "low"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(source), str(destination), "never", "0"], stdout=subprocess.PIPE
    )
    while process.poll() is None and not any(TEMPORARY_PREFIX + "model" in name for name in contents_now(destination)):
        time.sleep(0.001)
    process.kill()
    process.communicate()
    if (destination / MANIFEST).exists():  # it may have ended before the signal came
        convert(source, destination, NVFP4)
    assert contents(destination) == uninterrupted


def contents_now(folder):
    try:
        return [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []


@pytest.fixture
def unfinished(source, tmp_path, monkeypatch):
    """A destination whose conversion broke off after two files."""
    destination = tmp_path / "low"

    def broken(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxlowprec.checkpoints.conversion.convert.write_index", broken)
    with pytest.raises(KeyboardInterrupt):
        convert(source, destination, NVFP4)
    monkeypatch.undo()
    (destination / SHARDS[2]).unlink()
    return destination


@pytest.mark.parametrize("shard", SHARDS)
def test_a_disk_that_fails_leaves_what_was_finished(source, uninterrupted, tmp_path, monkeypatch, shard):
    def failing(path):
        if path.name == shard:
            raise OSError("no space left")
        publish(path)

    monkeypatch.setattr("jaxlowprec.checkpoints.files.written_whole.publish", failing)
    with pytest.raises(OSError, match="no space left"):
        convert(source, tmp_path / "low", NVFP4)
    left = contents(tmp_path / "low")
    assert MANIFEST in left and shard not in left and not [name for name in left if TEMPORARY_PREFIX in name]
    monkeypatch.undo()
    convert(source, tmp_path / "low", NVFP4)
    assert contents(tmp_path / "low") == uninterrupted


@pytest.mark.parametrize("made_before", [False, True])
def test_what_is_refused_before_it_writes_leaves_nothing(source, tmp_path, monkeypatch, made_before):
    destination = tmp_path / "low"
    if made_before:
        destination.mkdir()

    def refuse(*_):
        raise CheckpointError("only 5 are free")

    monkeypatch.setattr("jaxlowprec.checkpoints.conversion.jobs._require_space", refuse)
    with pytest.raises(CheckpointError, match="only 5 are free"):
        convert(source, destination, NVFP4)
    assert destination.exists() == made_before and not contents_now(destination)
    monkeypatch.undo()
    convert(source, destination, schemes.by_name("mxfp4"))  # another conversion may have the folder


def test_what_was_finished_stays_when_it_is_refused(source, unfinished, monkeypatch):
    def refuse(*_):
        raise CheckpointError("only 5 are free")

    before = contents(unfinished)
    monkeypatch.setattr("jaxlowprec.checkpoints.conversion.jobs._require_space", refuse)
    with pytest.raises(CheckpointError, match="only 5 are free"):
        convert(source, unfinished, NVFP4)
    assert contents(unfinished) == before


def test_leftovers_are_removed(source, unfinished, uninterrupted):
    (unfinished / (TEMPORARY_PREFIX + SHARDS[2])).write_bytes(b"half")
    (unfinished / (TEMPORARY_PREFIX + "what-nobody-writes-again")).write_bytes(b"half")
    (unfinished / "extra").mkdir()
    (unfinished / "extra" / (TEMPORARY_PREFIX + "notes.txt")).write_bytes(b"ha")
    assert convert(source, unfinished, NVFP4).kept == SHARDS[:2]
    assert contents(unfinished) == uninterrupted


def test_another_conversion_does_not_go_on_there(source, unfinished):
    for scheme, options, message in [
        (schemes.by_name("mxfp4"), {}, "scheme: .PackedNVFP4.*there, .PackedMXFP4.*now"),
        (NVFP4, {"ignore": ["re:.*o_proj"]}, r"ignore: \[\] there, \['re:.\*o_proj'\] now"),
        (NVFP4, {"leave_unfit": True}, "leave_unfit: False there, True now"),
        (NVFP4, {"ignore": ["re:.*o_proj"], "options": ConvertOptions(dry_run=True)}, "ignore"),
    ]:
        before = contents(unfinished)
        with pytest.raises(CheckpointError, match=f"holds another unfinished conversion .*{message}"):
            convert(source, unfinished, scheme, **options)
        assert contents(unfinished) == before


def test_a_source_that_changed_is_seen(source, unfinished):
    path = source / SHARDS[1]
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(CheckpointError, match=f"{SHARDS[1]}: it changed since"):
        convert(source, unfinished, NVFP4)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    convert(source, unfinished, NVFP4)


@pytest.mark.parametrize("name", [SHARDS[0], "config.json"])
def test_a_source_that_changes_during_the_conversion_is_seen(tmp_path, monkeypatch, name):
    source = write_checkpoint(tmp_path / "source", llama(1), shards=2)
    name = name.replace("00003", "00002")

    def written_meanwhile(folder, content):
        (source / name).write_bytes((source / name).read_bytes() + b" " * name.endswith("json"))

    monkeypatch.setattr("jaxlowprec.checkpoints.conversion.convert.write_json", written_meanwhile)
    with pytest.raises(CheckpointError, match=f"changed while it was converted .{name}"):
        convert(source, tmp_path / "low", NVFP4)
    assert MANIFEST in contents(tmp_path / "low")


def test_a_finished_file_that_is_another_is_made_again(source, unfinished, uninterrupted):
    (unfinished / SHARDS[0]).write_bytes((source / SHARDS[0]).read_bytes())
    assert convert(source, unfinished, NVFP4).kept == [SHARDS[1]]
    assert contents(unfinished) == uninterrupted


def test_a_damaged_manifest_is_no_licence(source, unfinished):
    (unfinished / MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match=MANIFEST):
        convert(source, unfinished, NVFP4)


def test_a_finished_conversion_is_not_begun_again(source, tmp_path):
    convert(source, tmp_path / "low", NVFP4)
    before = contents(tmp_path / "low")
    with pytest.raises(CheckpointError, match="is not empty, and holds no unfinished conversion"):
        convert(source, tmp_path / "low", NVFP4)
    assert contents(tmp_path / "low") == before


def test_two_at_once_are_refused(source, unfinished):
    descriptor = os.open(unfinished, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(CheckpointError, match="another conversion is at work"):
            convert(source, unfinished, NVFP4)
    finally:
        os.close(descriptor)
    convert(source, unfinished, NVFP4)
