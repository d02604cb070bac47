"""Every block format is decoded to the bits of the package gguf, from any bytes."""

import numpy as np
import pytest

from jaxlowprec.checkpoints.gguf import DECODED, TYPES
from tests.helpers import assert_same_numbers

oracle = pytest.importorskip("gguf", reason="gguf is not installed: pip install jaxlowprec[oracles]")

BLOCKS = 64


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
