"""Links that somebody planted in a destination: nothing is written through them, and none is left in a result."""

import os
import stat

import numpy as np
import pytest

from jaxlowprec.checkpoints import schemes
from jaxlowprec.checkpoints.conversion.convert import convert
from jaxlowprec.checkpoints.conversion.resume import MANIFEST
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.folder import INDEX_FILE
from jaxlowprec.checkpoints.files.safetensors_file import SafetensorsWriter
from jaxlowprec.checkpoints.files.safetensors_header import TensorSpec
from jaxlowprec.checkpoints.files.written_whole import TEMPORARY_PREFIX, copy_whole, temporary_path, write_json
from tests.checkpoints.small_models import contents, llama, write_checkpoint

MXFP4 = schemes.by_name("mxfp4")
SHARD = "model-00001-of-00002.safetensors"
NAMES = (SHARD, INDEX_FILE, "config.json", "tokenizer.json", MANIFEST)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("models") / "source", llama(1), shards=2)


@pytest.fixture
def outside(tmp_path):
    """A file that nobody may write to, and a folder."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").write_text("mine")
    return tmp_path / "elsewhere" / "mine"


def links(folder):
    return [p for p in folder.rglob("*") if p.is_symlink() or not (p.is_file() or p.is_dir())]


PLANTED = {
    "symbolic link": lambda place, outside: place.symlink_to(outside),
    "hard link": lambda place, outside: place.hardlink_to(outside),
    "dangling link": lambda place, outside: place.symlink_to(outside.with_name("new")),
    "link to a folder": lambda place, outside: place.symlink_to(outside.parent),
    "link to itself": lambda place, outside: place.symlink_to(place),
    "pipe": lambda place, outside: os.mkfifo(place),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_what_lies_under_the_temporary_names_is_not_written_to(source, outside, tmp_path, planted):
    low = tmp_path / "low"
    low.mkdir()
    for name in NAMES:
        PLANTED[planted](low / f"{TEMPORARY_PREFIX}{name}", outside)
    convert(source, low, MXFP4)
    assert outside.read_text() == "mine" and [p.name for p in outside.parent.iterdir()] == ["mine"]
    assert not links(low) and set(contents(low)) == set(contents(source))


@pytest.fixture
def unfinished(source, tmp_path, monkeypatch):
    """A destination whose conversion broke off before the index."""

    def broken(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxlowprec.checkpoints.conversion.convert.write_index", broken)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "low", MXFP4)
    monkeypatch.undo()
    return tmp_path / "low"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "extra", "extra/notes.txt", "unknown"])
@pytest.mark.parametrize("kind", ["symbolic link", "link to a folder", "dangling link"])
def test_links_in_an_unfinished_folder_are_refused(source, unfinished, outside, name, kind):
    (unfinished / name).parent.mkdir(exist_ok=True)
    PLANTED[kind](unfinished / name, outside)
    with pytest.raises(CheckpointError, match=f"{name}: is a link, which no conversion makes"):
        convert(source, unfinished, MXFP4)
    assert outside.read_text() == "mine" and [p.name for p in outside.parent.iterdir()] == ["mine"]
    (unfinished / name).unlink()
    convert(source, unfinished, MXFP4)


def test_a_link_planted_during_conversion_is_named(source, outside, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "jaxlowprec.checkpoints.conversion.convert.check_unchanged",
        lambda *_: (tmp_path / "low" / "late").symlink_to(outside),
    )
    with pytest.raises(CheckpointError, match="late: is a link"):
        convert(source, tmp_path / "low", MXFP4)
    assert MANIFEST in contents(tmp_path / "low")  # it does not pass for a finished one


def test_a_file_exchanged_before_its_rename_is_an_error(tmp_path):
    path = tmp_path / "x.safetensors"
    specs = {"a": TensorSpec("U8", (1,))}
    message = "is not the file that was written"
    with pytest.raises(CheckpointError, match=message), SafetensorsWriter(path, specs) as writer:
        writer.write("a", np.zeros(1, np.uint8))
        temporary_path(path).unlink()
        temporary_path(path).symlink_to(tmp_path / "elsewhere")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("planted", [kind for kind in PLANTED if kind != "pipe"])
def test_every_writer_of_files_makes_its_own(outside, tmp_path, planted):
    writers = {
        "a.json": lambda path: write_json(path, {}),
        "b.txt": lambda path: copy_whole(outside, path),
    }
    for name, write in writers.items():
        PLANTED[planted](temporary_path(tmp_path / name), outside)
        write(tmp_path / name)
        assert (tmp_path / name).is_file() and not (tmp_path / name).is_symlink()
    assert outside.read_text() == (tmp_path / "b.txt").read_text() == "mine" and len(list(tmp_path.iterdir())) == 3


def test_a_copy_keeps_only_time_and_permissions(tmp_path):
    (tmp_path / "a").write_text("x")
    (tmp_path / "a").chmod(0o4750)
    os.utime(tmp_path / "a", ns=(10**18, 10**18))
    copy_whole(tmp_path / "a", tmp_path / "b")
    status = (tmp_path / "b").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns) == (0o750, 10**18)


def test_what_is_no_file_is_not_copied_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(CheckpointError, match="is not a regular file, and only those are copied"):
            copy_whole(tmp_path / name, tmp_path / "b")
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]
