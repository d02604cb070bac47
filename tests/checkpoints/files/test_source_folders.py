"""What else may lie in a source's folder: links out of it, bookkeeping, and names that a result would have."""

import json
import os
import subprocess

import ml_dtypes
import numpy as np
import pytest

from jaxlowprec.checkpoints import schemes
from jaxlowprec.checkpoints.conversion.convert import ConvertOptions, convert, dequantize
from jaxlowprec.checkpoints.conversion.inspect import inspect
from jaxlowprec.checkpoints.conversion.resume import MANIFEST
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.config import with_quantization
from jaxlowprec.checkpoints.files.written_whole import TEMPORARY_PREFIX
from tests.checkpoints.small_models import CONFIG, contents, llama, write_checkpoint

MXFP4 = schemes.by_name("mxfp4")
SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture
def source(tmp_path):
    return write_checkpoint(tmp_path / "source", llama(1), shards=2)


def moved_out(source, name):
    """Puts a file beside the source, and a link in its place."""
    outside = source.parent / "outside"
    outside.mkdir(exist_ok=True)
    (source / name).rename(outside / "secret")
    (source / name).symlink_to(outside / "secret")


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("name", ["tokenizer.json", "extra/notes.txt", "config.json", SHARD])
def test_targets_outside_are_copied_only_when_asked_for(source, tmp_path, name, dry_run):
    moved_out(source, name)
    message = f"{name}: is a link to .*outside/secret, which is outside of the checkpoint.*--follow-links"
    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / "low", MXFP4, options=ConvertOptions(dry_run=dry_run))
    assert not (tmp_path / "low").exists()
    convert(source, tmp_path / "low", MXFP4, options=ConvertOptions(dry_run=dry_run, follow_links=True))
    if not dry_run:
        assert set(contents(tmp_path / "low")) == set(contents(source))


def test_a_link_turned_after_the_check_is_seen(source, tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("secret")

    def turned(*_):
        (source / "tokenizer.json").unlink()
        (source / "tokenizer.json").symlink_to(tmp_path / "secret")

    monkeypatch.setattr("jaxlowprec.checkpoints.conversion.convert.write_index", turned)
    with pytest.raises(CheckpointError, match="tokenizer.json: is a link to .*secret, which is outside"):
        convert(source, tmp_path / "low", MXFP4)
    assert b"secret" not in contents(tmp_path / "low").values()


def test_links_within_the_folder_are_files(source, tmp_path):
    (source / "again.json").symlink_to("extra/notes.txt")
    (source / "extra" / "up.json").symlink_to("../tokenizer.json")
    convert(source, tmp_path / "low", MXFP4)
    made = contents(tmp_path / "low")
    assert (made["again.json"], made["extra/up.json"]) == (b"kept", b"{}")


def test_a_snapshot_of_hugging_faces_cache_is_whole(source, tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    for number, name in enumerate(contents(source)):
        (source / name).rename(blobs / str(number))
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(blobs / str(number), (snapshot / name).parent))
    convert(snapshot, tmp_path / "low", MXFP4)
    assert set(contents(tmp_path / "low")) == set(contents(snapshot))
    (snapshot / "more").symlink_to(tmp_path / "low" / "config.json")
    with pytest.raises(CheckpointError, match="more: is a link"):
        convert(snapshot, tmp_path / "lower", MXFP4)


def test_bookkeeping_of_conversions_is_left_out(source, tmp_path, monkeypatch):
    for name in (MANIFEST, f"{TEMPORARY_PREFIX}tokenizer.json", f"extra/{TEMPORARY_PREFIX}notes.txt"):
        (source / name).write_text("{}")

    def broken(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxlowprec.checkpoints.conversion.convert.check_unchanged", broken)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "low", MXFP4)
    monkeypatch.undo()
    report = convert(source, tmp_path / "low", MXFP4)  # goes on with what it had begun
    assert len(report.kept) == 2 and report.left_out == [
        MANIFEST,
        f"{TEMPORARY_PREFIX}tokenizer.json",
        f"extra/{TEMPORARY_PREFIX}notes.txt",
    ]
    assert not [name for name in contents(tmp_path / "low") if "jaxlowprec" in name]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_that_cannot_be_read_is_named(source, tmp_path):
    (source / "extra").chmod(0)
    try:
        with pytest.raises(PermissionError, match="extra"):
            convert(source, tmp_path / "low", MXFP4)
    finally:
        (source / "extra").chmod(0o700)


@pytest.mark.slow
def test_folders_may_lie_deep_in_each_other(source, tmp_path):
    here = source
    for _ in range(1100):  # more than Python calls functions in each other
        here = here / "a"
        here.mkdir()
    (here / "b").write_text("deep")
    try:
        report = convert(source, tmp_path / "low", MXFP4)
        assert (tmp_path / "low" / report.copied[0]).read_text() == "deep"
    finally:
        subprocess.run(["rm", "-r", source, tmp_path / "low"], check=True)


def test_file_names_may_have_as_many_bytes_as_the_system_allows(source, tmp_path):
    names = ["x" * 255, "y" * 235 + ".txt", "ж" * 127]
    for name in names:
        (source / name).write_text(name)
    convert(source, tmp_path / "low", MXFP4)
    assert all((tmp_path / "low" / name).read_text() == name for name in names)


@pytest.mark.parametrize("name", ["weight_shape", "weight_packed", "weight_scale"])
@pytest.mark.parametrize("dry_run", [True, False])
def test_a_tensor_named_like_codes_or_scales_is_refused(tmp_path, name, dry_run):
    module = "model.layers.0.mlp.up_proj"
    tensors = llama(1) | {f"{module}.{name}": np.zeros(2, np.int64)}
    source = write_checkpoint(tmp_path / "source", tensors)
    with pytest.raises(CheckpointError, match=f"'{module}.{name}'"):
        convert(source, tmp_path / "low", schemes.by_name("w4a16"), options=ConvertOptions(dry_run=dry_run))
    assert not (tmp_path / "low").exists()
    if name == "weight_shape":
        convert(source, tmp_path / "low", MXFP4, options=ConvertOptions(dry_run=dry_run))  # writes no such tensor


def test_codes_of_no_module_are_refused(tmp_path):
    tensors = MXFP4.compress(np.ones((2, 32), ml_dtypes.bfloat16))
    config = with_quantization(CONFIG, MXFP4.quantization_config([]))
    low = write_checkpoint(tmp_path / "low", tensors, shards=1, config=config)
    for read in (lambda: dequantize(low, tmp_path / "high"), lambda: inspect(low)):
        with pytest.raises(CheckpointError, match="'weight_packed', 'weight_scale' belong to a module without a name"):
            read()


def test_a_number_of_workers_is_a_whole_number():
    for workers in (0, -1, 1.5, "2", True, None):
        with pytest.raises(CheckpointError, match="needs 1 or more"):
            ConvertOptions(workers=workers)


def test_a_config_of_another_kind_is_an_error(source, tmp_path):
    for content in ([], "x", None, 7):
        (source / "config.json").write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match="config.json: needs a JSON object"):
            convert(source, tmp_path / "low", MXFP4)
