"""Files are read and written as the package gguf does; what is wrong with a file is said before tensors are read."""

import numpy as np
import pytest

from jaxlowprec.checkpoints import CheckpointError
from jaxlowprec.checkpoints.gguf import TYPES, GGUFFile, GGUFWriter, TensorSpec
from jaxlowprec.checkpoints.gguf import header as headers
from jaxlowprec.checkpoints.gguf.header import layout_header

METADATA = {
    "general.architecture": "llama",
    "a.u8": np.uint8(200),
    "a.i8": np.int8(-3),
    "a.u16": np.uint16(60000),
    "a.i16": np.int16(-7),
    "a.u32": np.uint32(2**32 - 1),
    "a.i32": np.int32(-(2**31)),
    "a.f32": np.float32(0.1),
    "a.u64": np.uint64(2**64 - 1),
    "a.i64": np.int64(-(2**63)),
    "a.f64": np.float64(0.1),
    "a.yes": True,
    "a.text": "grüße",
    "a.texts": ["one", "", "three"],
    "a.numbers": np.arange(5, dtype=np.int32),
    "a.floats": np.asarray([0.5, -1], np.float32),
    "a.flags": np.asarray([True, False]),
}


def spec(name, *shape):
    return TensorSpec(TYPES[name], shape)


SPECS = {"f32": spec("F32", 3, 5), "q": spec("Q4_0", 4, 64), "experts": spec("F16", 2, 3, 8), "one": spec("BF16", 7)}


def contents(seed=0):
    random = np.random.default_rng(seed)
    return {name: random.integers(0, 256, s.nbytes, np.uint8) for name, s in SPECS.items()}


def write(path, specs=SPECS, metadata=METADATA, **options):
    with GGUFWriter(path, specs, metadata, **options) as writer:
        for name, data in contents().items():
            if name in specs:
                writer.write(name, data)
    return path


def same(a, b):
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else type(a) is type(b) and a == b


@pytest.mark.parametrize("alignment", [32, 256])
def test_what_is_written_is_read(tmp_path, alignment):
    with GGUFFile(write(tmp_path / "a.gguf", alignment=alignment)) as file:
        assert file.specs == SPECS
        assert all(same(file.metadata[key], value) for key, value in METADATA.items())
        assert all(entry.offset % alignment == 0 for entry in file.header.tensors.values())
        for name, data in contents().items():
            assert file.blocks(name).tobytes() == data.tobytes()
        assert file.blocks("q").shape == (4, 36) and file.read("q").dtype == np.float32
        assert file.read("f32").dtype == np.float32 and file.read("experts", 1).shape == (3, 8)
        assert file.read("experts", 1).tobytes() == file.read("experts")[1].tobytes()


def test_the_package_gguf_reads_it(tmp_path):
    oracle = pytest.importorskip("gguf", reason="gguf is not installed: pip install jaxlowprec[gguf]")
    reader = oracle.GGUFReader(write(tmp_path / "a.gguf"))
    found = {key: field.contents() for key, field in reader.fields.items()}
    for key, value in METADATA.items():
        wanted = value.tolist() if isinstance(value, np.ndarray) else value
        assert found[key] == wanted, key
    held = {tensor.name: tensor for tensor in reader.tensors}
    for name, data in contents().items():
        assert tuple(reversed(held[name].shape.tolist())) == SPECS[name].shape
        assert held[name].tensor_type.name == SPECS[name].type.name and held[name].data.tobytes() == data.tobytes()


def test_what_the_package_gguf_writes_is_read(tmp_path):
    oracle = pytest.importorskip("gguf", reason="gguf is not installed: pip install jaxlowprec[gguf]")
    writer = oracle.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_uint32("a.number", 7)
    writer.add_array("a.texts", ["x", "yz"])
    random = np.random.default_rng(0)
    weight = random.standard_normal((6, 64)).astype(np.float32)
    for kind in ("F32", "F16", "Q4_0", "Q8_0", "MXFP4"):
        number = oracle.GGMLQuantizationType[kind]
        writer.add_tensor(kind.lower(), oracle.quants.quantize(weight, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = oracle.GGUFReader(tmp_path / "a.gguf")
    with GGUFFile(tmp_path / "a.gguf") as file:
        assert file.metadata["a.number"] == 7 and file.metadata["a.texts"] == ["x", "yz"]
        for tensor in reader.tensors:
            assert file.blocks(tensor.name).tobytes() == tensor.data.tobytes()
            theirs = oracle.quants.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(file.read(tensor.name).astype(np.float32), theirs)


def test_parts_are_written_in_any_order_and_each_once(tmp_path):
    data = contents()["experts"].reshape(2, -1)
    with GGUFWriter(tmp_path / "a.gguf", {"experts": SPECS["experts"]}, {}) as writer:
        writer.write("experts", data[1], 1)
        with pytest.raises(CheckpointError, match="written before"):
            writer.write("experts", data[1], 1)
        with pytest.raises(CheckpointError, match="was announced as"):
            writer.write("experts", data[1], 2)
        writer.write("experts", data[0], 0)
    assert GGUFFile(tmp_path / "a.gguf").blocks("experts").tobytes() == data.tobytes()


def test_a_file_that_is_not_whole_does_not_appear(tmp_path):
    with (
        pytest.raises(CheckpointError, match="not written: experts"),
        GGUFWriter(tmp_path / "a.gguf", {"experts": SPECS["experts"]}, {}) as writer,
    ):
        writer.write("experts", contents()["experts"].reshape(2, -1)[0], 0)
    with pytest.raises(CheckpointError, match="not announced"), GGUFWriter(tmp_path / "b.gguf", {}, {}) as writer:
        writer.write("x", np.zeros(1, np.uint8))
    assert not list(tmp_path.iterdir())


def test_names_and_shapes_that_llama_cpp_refuses_are_not_written(tmp_path):
    for specs, fault in (
        ({"x" * 64: spec("F32", 1)}, "64 bytes; llama.cpp reads 63"),
        ({"x": spec("F32", 1, 1, 1, 1, 1)}, "5 axes"),
        ({"x": spec("Q4_0", 2, 33)}, "rows of 33 elements; Q4_0 has blocks of 32"),
    ):
        with pytest.raises(CheckpointError, match=fault):
            GGUFWriter(tmp_path / "a.gguf", specs, {})
    with pytest.raises(CheckpointError, match="metadata cannot hold"):
        GGUFWriter(tmp_path / "a.gguf", {}, {"x": np.complex64(1)})


def u32(n):
    return int(n).to_bytes(4, "little")


def u64(n):
    return int(n).to_bytes(8, "little")


def text(t):
    return u64(len(t)) + t


def header(tensors=0, keys=0, version=3, magic=b"GGUF", rest=b""):
    return magic + u32(version) + u64(tensors) + u64(keys) + rest


def tensor(name=b"w", shape=(4,), number=0, offset=0):
    return text(name) + u32(len(shape)) + b"".join(map(u64, shape)) + u32(number) + u64(offset)


def entry(key=b"k", number=4, value=None):
    return text(key) + u32(number) + (u32(1) if value is None else value)


def with_data(head, count=64):
    return head + bytes(-len(head) % 32 + count)


HOSTILE = {
    "empty": (b"", "truncated"),
    "another format": (header(magic=b"PK\3\4"), "begins with b'PK"),
    "version 1": (header(version=1), "version 1; versions 2 and 3"),
    "big-endian": (header(version=3 << 24), "big-endian"),
    "no counts": (b"GGUF" + u32(3), "the number of tensors takes 8 bytes"),
    "tensors without end": (header(tensors=2**60), "1152921504606846976 tensors in a file of 24 bytes"),
    "metadata without end": (header(keys=2**63), "metadata entries in a file"),
    "a key that is too long": (header(keys=1, rest=u64(2**40) + bytes(64)), "has 1099511627776 bytes; at most 65535"),
    "no text": (header(keys=1, rest=entry(b"\xff\xfe")), "not text in UTF-8"),
    "an unknown type": (header(keys=1, rest=entry(number=13)), "has type 13"),
    "a nested array": (header(keys=1, rest=entry(number=9, value=u32(9) + u64(1))), "array of type 9"),
    "an endless array": (
        header(keys=1, rest=entry(number=9, value=u32(4) + u64(2**61))),
        "takes 9223372036854775808 bytes",
    ),
    "endless texts": (header(keys=1, rest=entry(number=9, value=u32(8) + u64(2**50))), "takes 9007199254740992 bytes"),
    "a bool of 2": (header(keys=1, rest=entry(number=7, value=b"\2")), "a bool of 2"),
    "a key twice": (header(keys=2, rest=2 * entry()), "the key 'k' twice"),
    "an empty key": (header(keys=1, rest=entry(b"")), "the key ''"),
    "alignment 24": (header(keys=1, rest=entry(b"general.alignment", value=u32(24))), "needs a power of two"),
    "alignment 0": (header(keys=1, rest=entry(b"general.alignment", value=u32(0))), "needs a power of two"),
    "alignment as text": (header(keys=1, rest=entry(b"general.alignment", 8, text(b"32"))), "needs a power of two"),
    "five axes": (header(1, rest=tensor(shape=(1, 1, 1, 1, 1))), "'w' has 5 axes"),
    "axes without end": (header(1, rest=tensor()[:9] + u32(2**31) + bytes(99)), "has 2147483648 axes"),
    "a huge shape": (header(1, rest=tensor(shape=(2**40, 2**40))), "no array can have"),
    "half a block": (header(1, rest=tensor(shape=(16, 2), number=2)), "rows of 16 elements; Q4_0 has blocks of 32"),
    "an unknown block": (
        header(1, rest=tensor(number=99)),
        "type 99, whose blocks are not known here; known are F32, F16",
    ),
    "a name twice": (with_data(header(2, rest=2 * tensor())), "'w' is in the table twice"),
    "a crooked offset": (with_data(header(1, rest=tensor(offset=8))), "begins at 8, which is not a multiple"),
    "an overlap": (
        with_data(header(2, rest=tensor(b"a", (16,)) + tensor(b"b", (4,), offset=32))),
        "'a' and 'b' overlap",
    ),
    "an offset beyond": (with_data(header(1, rest=tensor(offset=2**62))), "truncated: tensor 'w' ends"),
    "a truncated tensor": (with_data(header(1, rest=tensor(shape=(17,))), 64), "truncated: tensor 'w' ends"),
    "a part of a model": (header(keys=1, rest=entry(b"split.count", 2, b"\3\0")), "one of 3 parts"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_errors_name_the_file_and_the_fault(tmp_path, case):
    data, fault = HOSTILE[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="bad.gguf") as raised:
        GGUFFile(path)
    assert fault in str(raised.value)


def test_every_truncation_is_an_error(tmp_path):
    whole = write(tmp_path / "a.gguf").read_bytes()
    prefix, made = layout_header("x", SPECS, METADATA)
    last = max(entry.offset + entry.spec.nbytes for entry in made.tensors.values())
    for length in (*range(0, len(prefix), 7), *range(len(prefix), last, 29)):
        (tmp_path / "b.gguf").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="b.gguf"):
            GGUFFile(tmp_path / "b.gguf")


def test_a_header_that_is_too_long_is_not_read(tmp_path, monkeypatch):
    write(tmp_path / "a.gguf")
    monkeypatch.setattr(headers, "MAX_HEADER_BYTES", 100)
    with pytest.raises(CheckpointError, match="a header of at most 100 is read"):
        GGUFFile(tmp_path / "a.gguf")


def test_types_that_are_not_decoded_are_listed_and_not_read(tmp_path):
    with GGUFWriter(tmp_path / "a.gguf", {"x": spec("IQ2_XS", 2, 256)}, {}) as writer:
        writer.write("x", np.zeros(148, np.uint8))
    with GGUFFile(tmp_path / "a.gguf") as file:
        assert file.specs["x"].type.name == "IQ2_XS" and file.blocks("x").shape == (2, 74)
        with pytest.raises(CheckpointError, match="'x' is IQ2_XS, whose numbers are not decoded.*Q4_0"):
            file.read("x")
        with pytest.raises(CheckpointError, match="no tensor 'y'"):
            file.read("y")


def test_a_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        GGUFFile(tmp_path / "a.gguf")
