"""Every block format is decoded to the bits of the package gguf, and to the bits that it always had, from any bytes."""

import hashlib
import sys

import numpy as np
import pytest

from jaxlowprec.checkpoints import CheckpointError, schemes
from jaxlowprec.checkpoints.gguf import DECODED, TYPES, GGUFFile, GGUFWriter, TensorSpec, export_gguf, import_gguf
from tests.checkpoints.gguf.models import folder
from tests.checkpoints.gguf.test_foreign_files import rewritten
from tests.helpers import assert_same_numbers, run_python

oracle = pytest.importorskip("gguf", reason="gguf is not installed: pip install jaxlowprec[gguf]")

BLOCKS = 64
DIGESTS = {
    "Q4_0": "5a8a69754e198e45",
    "Q4_1": "750941e8639be1bc",
    "Q5_0": "ed61956dc62507c6",
    "Q5_1": "2f855b15cd35ed8a",
    "Q8_0": "5ba4fb6ae60c1cac",
    "Q2_K": "83ed131946274c70",
    "Q3_K": "35e347a69bf4f70e",
    "Q4_K": "f03d38e347baa016",
    "Q5_K": "e04919d30f60c8c2",
    "Q6_K": "9b81a38cbec9079a",
    "IQ4_NL": "d13bc907adcc338c",
    "IQ4_XS": "1129f954d39efe64",
    "MXFP4": "84b55c7710890315",
    "NVFP4": "30ed9923b194909c",
}
"""Of `blocks_of` a type: SHA-256 of its numbers, as a decoder of our own once gave them for every type."""


def blocks_of(block_type, seed=0):
    """Random bytes, in which each byte value appears at each place of a small block, and so every scale there is."""
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (4 * BLOCKS, block_type.block_bytes), np.uint8)
    data[:, 0] = np.arange(4 * BLOCKS) % 256
    return data


@pytest.mark.parametrize("name", [name for name in DECODED if not name.startswith(("I8", "I16", "I32", "I64", "F64"))])
def test_numbers_are_those_of_ggml(name):
    block_type = TYPES[name]
    data = blocks_of(block_type)
    with np.errstate(over="ignore", invalid="ignore"):
        ours = block_type.decode(data)
        theirs = oracle.quants.dequantize(data, oracle.GGMLQuantizationType[name])
    assert_same_numbers(ours, theirs.reshape(ours.shape))


@pytest.mark.parametrize("name", DIGESTS)
def test_no_version_of_the_package_changes_a_number(name):
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = TYPES[name].decode(blocks_of(TYPES[name]))
    same_nans = np.where(np.isnan(numbers), np.float32("nan"), numbers).astype("<f4")
    assert hashlib.sha256(same_nans.tobytes()).hexdigest()[:16] == DIGESTS[name]


def test_the_package_is_imported_by_the_first_block_to_need_it():
    code = (
        "import sys, numpy as np; from jaxlowprec.checkpoints.gguf import TYPES;"
        "[TYPES[name].decode(np.zeros((1, TYPES[name].block_bytes), np.uint8)) for name in ('Q4_0', 'Q8_0', 'MXFP4')];"
        "before = 'gguf' in sys.modules; TYPES['Q4_K'].decode(np.zeros((1, 144), np.uint8));"
        "print(before, 'gguf' in sys.modules)"
    )
    assert run_python("-c", code).stdout.split() == ["False", "True"]


def test_without_the_package_its_types_are_refused_before_work(tmp_path, monkeypatch):
    source = folder(tmp_path / "hf")
    export_gguf(source, tmp_path / "a.gguf", schemes.by_name("w4a16", group_size=32, scale_dtype="float16"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    import_gguf(tmp_path / "a.gguf", tmp_path / "ours")
    copy = rewritten(tmp_path / "a.gguf", {"output.weight": "Q4_1"})
    with pytest.raises(CheckpointError, match=r"'output.weight' is Q4_1, which the package gguf .*jaxlowprec\[gguf\]"):
        import_gguf(copy, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_tensor_of_many_blocks_is_decoded_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxlowprec.checkpoints.gguf.gguf_file._DECODED_AT_ONCE", 7)
    data = blocks_of(TYPES["Q4_K"])
    with GGUFWriter(tmp_path / "a.gguf", {"x": TensorSpec(TYPES["Q4_K"], (8, BLOCKS // 2 * 256))}, {}) as writer:
        writer.write("x", data)
    with GGUFFile(tmp_path / "a.gguf") as file, np.errstate(over="ignore", invalid="ignore"):
        assert_same_numbers(file.read("x").reshape(-1, 256), TYPES["Q4_K"].decode(data))


def test_the_table_has_ggmls_numbers_and_sizes():
    for kind, sizes in oracle.constants.GGML_QUANT_SIZES.items():
        ours = TYPES[kind.name]
        assert (ours.number, (ours.elements, ours.block_bytes)) == (kind.value, sizes), kind


def test_a_negative_scale_and_the_code_of_minus_zero():
    q4_0 = np.frombuffer(np.float16(-0.5).tobytes() + bytes([0x0F] * 16), np.uint8)[None]
    assert TYPES["Q4_0"].decode(q4_0)[0, [0, 16]].tolist() == [-3.5, 4.0]
    mxfp4 = np.asarray([[127, *[0x28] * 16]], np.uint8)
    assert TYPES["MXFP4"].decode(mxfp4)[0, [0, 16]].tolist() == [0.0, 1.0]
    assert not np.signbit(TYPES["MXFP4"].decode(mxfp4)[0, 0])
