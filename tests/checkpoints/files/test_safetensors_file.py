"""Safetensors files: what is written is what the official library reads, and the other way round."""

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.dtypes import BITS, file_dtype, numpy_dtype
from jaxlowprec.checkpoints.files.safetensors_file import METADATA, SafetensorsFile, SafetensorsWriter
from jaxlowprec.checkpoints.files.safetensors_header import TensorSpec

ARRAYS = [name for name in BITS if numpy_dtype(name) is not None]


def values(dtype, shape):
    """Random bits; booleans are 0 or 1."""
    dtype = numpy_dtype(dtype)
    bits = np.random.default_rng(7).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return (bits[..., 0] & 1).astype(bool) if dtype.kind == "b" else bits.view(dtype).reshape(shape)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def write(path, tensors):
    specs = {name: TensorSpec(file_dtype(a.dtype), a.shape) for name, a in tensors.items()}
    with SafetensorsWriter(path, specs) as writer:
        for name in reversed(tensors):  # any order
            writer.write(name, tensors[name])


@pytest.mark.parametrize("dtype", ARRAYS)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (1,)])
def test_every_dtype_and_shape_comes_back(tmp_path, dtype, shape):
    write(tmp_path / "a.safetensors", {"x": values(dtype, shape)})
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        assert file.specs == {"x": TensorSpec(dtype, shape)} and file.header.metadata == METADATA
        assert same(file.read("x"), values(dtype, shape))


def test_the_official_library_reads_what_is_written(tmp_path):
    known = [d for d in ARRAYS if not d.startswith("F8")]  # of which its numpy side knows too few
    tensors = {f"layer.{d}": values(d, (4, 6)) for d in known} | {"scalar": np.float32(3).reshape(())}
    write(tmp_path / "a.safetensors", tensors)
    found = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    assert set(found) == set(tensors)
    assert all(found[name].tobytes() == tensors[name].tobytes() for name in tensors)


def test_what_the_official_library_writes_is_read(tmp_path):
    tensors = {"a": values("BF16", (3, 7)), "b": values("I64", (2,)), "odd": values("U8", (13,))}
    safetensors.numpy.save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "np"})
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        assert file.header.metadata == {"format": "np"}
        assert all(same(file.read(name), tensors[name]) for name in tensors)


def test_tensors_are_aligned_to_their_elements(tmp_path):
    tensors = {"a": values("U8", (3,)), "b": values("F64", (5,)), "c": values("BF16", (7,))}
    write(tmp_path / "a.safetensors", tensors)
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        for name, entry in file.header.tensors.items():
            assert entry.offset % tensors[name].dtype.itemsize == 0
        assert min(entry.offset for entry in file.header.tensors.values()) % 64 == 0


def test_a_tensor_at_an_odd_address_is_read(tmp_path):
    text = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}'
    b = np.float32([1.5, -2])
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\7" + b.tobytes())
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        assert same(file.read("b"), b) and file.read("b").flags.aligned


def test_packed_elements_are_bytes_and_no_array(tmp_path):
    text = b'{"a":{"dtype":"F4","shape":[2,4],"data_offsets":[0,4]}}'
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\1\2\3\4")
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        assert file.raw("a").tolist() == [1, 2, 3, 4]
        with pytest.raises(CheckpointError, match="F4, packed bits"):
            file.read("a")
        with SafetensorsWriter(tmp_path / "b.safetensors", file.specs) as writer:
            writer.copy("a", file, "a")
    assert (tmp_path / "b.safetensors").read_bytes()[-4:] == b"\1\2\3\4"


def test_arrays_are_read_only_views_that_outlive_the_file(tmp_path):
    write(tmp_path / "a.safetensors", {"x": np.arange(8, dtype=np.float32)})
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        x = file.read("x")
    assert x.tolist() == list(range(8))
    with pytest.raises(ValueError, match="read-only"):
        x[0] = 1


def test_a_part_of_a_tensor_is_read_to_where_it_belongs(tmp_path):
    write(tmp_path / "a.safetensors", {"x": np.arange(9, dtype=np.uint8), "y": np.arange(5, dtype=np.float32)})
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        part, numbers = np.zeros(4, np.uint8), np.zeros((1, 5), np.float32)
        file.read_into("x", part, 5)
        file.read_into("y", numbers)
        assert part.tolist() == [5, 6, 7, 8] and numbers.tolist() == [[0, 1, 2, 3, 4]]
        assert [piece.tolist() for piece in map(np.copy, file.pieces("x", 4))] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
        with pytest.raises(CheckpointError, match="tensor 'x' has 9 bytes; 4 at 6 are asked for"):
            file.read_into("x", part, 6)


def refused(*_):
    raise OSError("not on this file system")


@pytest.mark.parametrize("in_kernel", [True, False])
def test_copies_are_byte_for_byte(tmp_path, monkeypatch, in_kernel):
    if not in_kernel:
        monkeypatch.setattr("os.copy_file_range", refused)
    tensors = {"a": values("BF16", (300, 70)), "empty": values("F32", (0,))}
    write(tmp_path / "a.safetensors", tensors)
    source = SafetensorsFile(tmp_path / "a.safetensors")
    with source, SafetensorsWriter(tmp_path / "b.safetensors", source.specs) as writer:
        for name in tensors:
            writer.copy(name, source, name)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


SPECS = {"a": TensorSpec("F32", (2,)), "b": TensorSpec("BF16", (2, 2))}
A, B = np.float32([1, 2]), np.zeros((2, 2), ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("a", A)], "1 tensors were not written: b"),
        ([("a", A), ("a", A)], "'a' was written before"),
        ([("c", A)], "'c' was not announced"),
        ([("a", A[:1])], "announced as .*given as"),
        ([("b", B.astype(np.float16))], "announced as .*given as"),
    ],
)
def test_what_was_not_announced_is_refused_and_nothing_is_left(tmp_path, tensors, message):
    with pytest.raises(CheckpointError, match=message), SafetensorsWriter(tmp_path / "x.safetensors", SPECS) as writer:
        for name, array in tensors:
            writer.write(name, array)
    assert not list(tmp_path.iterdir())


def test_the_file_has_no_name_until_it_is_whole(tmp_path):
    with SafetensorsWriter(tmp_path / "x.safetensors", SPECS) as writer:
        writer.write("a", A)
        assert [p.name for p in tmp_path.iterdir()] == [".jaxlowprec-writing-x.safetensors"]
        writer.write("b", B)
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_an_error_leaves_the_older_file(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"older")
    with pytest.raises(KeyError), SafetensorsWriter(tmp_path / "x.safetensors", SPECS):
        raise KeyError
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"older"]


def test_a_dtype_that_no_file_holds_is_named(tmp_path):
    with pytest.raises(ValueError, match="no file holds elements of complex128"):
        file_dtype(np.complex128)


def test_tensors_come_piece_by_piece(tmp_path):
    tensors = {"a": values("BF16", (5, 3)), "b": values("U8", (5, 2, 2)), "c": values("F32", (2,))}
    specs = {name: TensorSpec(file_dtype(a.dtype), a.shape) for name, a in tensors.items()}
    with SafetensorsWriter(tmp_path / "a.safetensors", specs) as writer:
        parts = ((0, 1), (1, 4), (4, 5))
        writer.write_parts("ab", ({name: tensors[name][begin:end] for name in "ab"} for begin, end in parts))
        writer.write("c", tensors["c"])
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        assert all(same(file.read(name), tensors[name]) for name in tensors)
        assert all(same(file.read_at(name, 4), tensors[name][4]) for name in "ab")
        with pytest.raises(CheckpointError, match="tensor 'c' has 8 bytes; 4 at 8 are asked for"):
            file.read_at("c", 2)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([values("U8", (2, 3))], "6 bytes of tensor 'a' came"),
        ([values("U8", (2, 3)), values("U8", (3, 3))], r"tensor 'a' was announced as .* a part is .*\(3, 3\)"),
        ([values("U8", (4, 2))], "tensor 'a' was announced as .* a part is"),
        ([values("I8", (4, 3))], "tensor 'a' was announced as .* a part is .*I8"),
    ],
)
def test_pieces_that_are_not_the_tensor(tmp_path, parts, message):
    with (
        pytest.raises(CheckpointError, match=message),
        SafetensorsWriter(tmp_path / "a.safetensors", {"a": TensorSpec("U8", (4, 3))}) as writer,
    ):
        writer.write_parts("a", ({"a": part} for part in parts))
    assert not list(tmp_path.iterdir())
