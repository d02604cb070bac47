"""Index files that are damaged, hostile, or say other things than the files they name."""

import json

import numpy as np
import pytest

from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.folder import INDEX_FILE, SINGLE_FILE, CheckpointFolder, write_index
from jaxlowprec.checkpoints.files.safetensors_file import SafetensorsWriter
from jaxlowprec.checkpoints.files.safetensors_header import TensorSpec

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write_file(path, *names):
    with SafetensorsWriter(path, {name: TensorSpec("F32", (2,)) for name in names}) as writer:
        for name in names:
            writer.write(name, np.float32([1, len(name)]))


@pytest.fixture
def folder(tmp_path):
    """Two files with an index, in a folder beside which there is another file."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    write_file(path / FIRST, "a", "b")
    write_file(path / SECOND, "cc")
    write_file(tmp_path / "outside.safetensors", "a", "b")
    write_index(path, {"a": FIRST, "b": FIRST, "cc": SECOND}, 24)
    return path


def with_map(folder, **changes):
    index = json.loads((folder / INDEX_FILE).read_text())
    index["weight_map"] = {k: v for k, v in {**index["weight_map"], **changes}.items() if v is not KeyError}
    (folder / INDEX_FILE).write_text(json.dumps(index))


def fails(folder, message):
    with pytest.raises(CheckpointError, match=message):
        CheckpointFolder(folder)


def test_an_index_and_its_files(folder):
    assert json.loads((folder / INDEX_FILE).read_text())["metadata"] == {"total_size": 24}
    with CheckpointFolder(folder) as opened:
        assert opened.shard_of == {"a": FIRST, "b": FIRST, "cc": SECOND} and opened.nbytes == 24
        assert opened.read("cc").tolist() == [1, 2]


def test_one_file_without_an_index(tmp_path):
    write_file(tmp_path / SINGLE_FILE, "x")
    with CheckpointFolder(tmp_path) as opened:
        assert opened.shard_of == {"x": SINGLE_FILE} and not opened.indexed


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "..\\outside.safetensors",
        "C:\\x.safetensors",
        "..",
        ".",
        "",
        ".hidden.safetensors",
        "a\0.safetensors",
        "model.bin",
        f"./{FIRST}",
        7,
        None,
        ["x.safetensors"],
    ],
)
def test_names_that_lead_elsewhere_are_refused(folder, name):
    with_map(folder, a=name)
    fails(folder, "needs the plain name of a .safetensors file")


def test_a_missing_file(folder):
    (folder / SECOND).unlink()
    fails(folder, f"{SECOND}: no such file .*index.json names it")


def test_a_name_in_the_wrong_file(folder):
    with_map(folder, a=SECOND)
    fails(folder, f"'a' should be in {SECOND}; it is in {FIRST}")


def test_a_name_in_no_file(folder):
    with_map(folder, d=SECOND)
    fails(folder, "'d' should be in .*; it is in no file")


def test_a_tensor_that_the_index_does_not_list(folder):
    with_map(folder, b=KeyError)
    fails(folder, "does not list 1 tensors of its files, such as 'b'")


def test_a_tensor_in_two_files(folder):
    write_file(folder / SECOND, "cc", "a")
    fails(folder, "tensor 'a' is in .* and in")


def test_a_damaged_file_among_good_ones(folder):
    whole = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(whole[:-1])
    fails(folder, f"{SECOND}: the file is truncated")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map":[]}',
        '{"weight_map":{}}',
        '{"weight_map":null}',
        '{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}',
        '{"weight_map":{"a":"x.safetensors"}',
        '{"weight_map":{"a":NaN}}',
        "\udcff",
    ],
)
def test_what_is_no_index(folder, text):
    (folder / INDEX_FILE).write_bytes(text.encode(errors="surrogateescape"))
    fails(folder, INDEX_FILE)


def test_no_checkpoint_at_all(tmp_path):
    fails(tmp_path / "none", "no such folder")
    fails(tmp_path, "model.safetensors: no such file .*the folder has no index")
    (tmp_path / "file").write_text("x")
    fails(tmp_path / "file", "file: is a file; needs a folder")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("pytorch_model.bin", "only safetensors are read; .*save_pretrained"),
        ("weights.pt", "only safetensors are read"),
        ("model-00001-of-00002.safetensors", "needs model.safetensors.index.json beside several files"),
        ("model.gguf", "give the path of that file"),
    ],
)
def test_weights_that_are_not_read_are_named_with_a_remedy(tmp_path, name, remedy):
    (tmp_path / name).write_text("x")
    fails(tmp_path, f"the folder has no index, but {name}: {remedy}")
