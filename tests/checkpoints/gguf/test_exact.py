"""Q4_0 and MXFP4 become arrays and tensors of schemes, and back, with every bit of codes and scales."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxlowprec.checkpoints import CheckpointError, schemes
from jaxlowprec.checkpoints.gguf import TYPES, array_of_blocks, blocks_of_array
from jaxlowprec.checkpoints.gguf.exact import blocks_of_tensors, scheme_of_type, tensors_of_blocks
from tests.checkpoints.weights import assert_same_tensors, weight
from tests.eager import jlp
from tests.helpers import assert_same_bytes

Q4_0, MXFP4 = TYPES["Q4_0"], TYPES["MXFP4"]


def any_blocks(block_type, rows=8, groups=6, seed=0):
    """Random codes under scales of both signs and every exponent that is a number."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, groups, block_type.block_bytes), np.uint8)
    if block_type is Q4_0:
        scales = (random.standard_normal((rows, groups)) * 2.0 ** random.integers(-20, 8, (rows, groups))).astype("<f2")
        blocks[..., :2] = scales[..., None].view(np.uint8)
    else:
        blocks[..., 0] = random.integers(64, 190, (rows, groups))
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("block_type", [Q4_0, MXFP4], ids=lambda t: t.name)
def test_blocks_come_back_byte_for_byte(block_type):
    blocks = any_blocks(block_type)
    q = array_of_blocks(block_type, blocks)
    assert q.shape == (8, 192)
    kind, again = blocks_of_array(q)
    assert kind is block_type and again.tobytes() == blocks.tobytes()
    tensors = tensors_of_blocks(block_type, blocks)
    assert blocks_of_tensors(scheme_of_type(block_type), tensors).tobytes() == blocks.tobytes()


@pytest.mark.parametrize("block_type", [Q4_0, MXFP4], ids=lambda t: t.name)
def test_arrays_and_tensors_of_the_scheme_are_the_same(block_type):
    blocks, scheme = any_blocks(block_type), scheme_of_type(block_type)
    tensors = tensors_of_blocks(block_type, blocks)
    loaded = scheme.load(tensors, "float16")
    made = array_of_blocks(block_type, blocks)
    assert_same_bytes((loaded.data, loaded.scale), (made.data, made.scale))
    assert_same_tensors(scheme.store(made), tensors)


def test_q4_0_decodes_to_ggmls_numbers_rounded_to_float16():
    blocks = any_blocks(Q4_0)
    numbers = Q4_0.decode(blocks.reshape(-1, 18)).reshape(8, 192)
    assert (numbers < 0).any() and (np.frombuffer(blocks.tobytes(), np.int8).reshape(-1, 18)[:, 1] < 0).any()
    decoded = np.asarray(jlp.dequantize(array_of_blocks(Q4_0, blocks), dtype=jnp.float32))
    np.testing.assert_array_equal(decoded, numbers.astype(np.float16).astype(np.float32))


def test_mxfp4_decodes_to_ggmls_numbers():
    blocks = any_blocks(MXFP4)
    decoded = np.asarray(jlp.dequantize(array_of_blocks(MXFP4, blocks), dtype=jnp.float32))
    np.testing.assert_array_equal(decoded, MXFP4.decode(blocks.reshape(-1, 17)).reshape(8, 192))  # 0 equals -0


def test_products_with_negative_scales_are_right():
    blocks = any_blocks(Q4_0, rows=16, groups=2)
    w = array_of_blocks(Q4_0, blocks)
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float16)
    expected = x.astype(np.float64) @ np.asarray(w.dequantize(jnp.float32), np.float64).T
    y = jlp.scaled_matmul(jax.device_put(x), w, preferred_element_type=jnp.float32)
    np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


def test_the_package_gguf_reads_the_same_numbers():
    oracle = pytest.importorskip("gguf", reason="gguf is not installed: pip install jaxlowprec[gguf]")
    for name, scheme in (("Q4_0", "w4a16"), ("MXFP4", "mxfp4")):
        options = {"group_size": 32, "scale_dtype": "float16"} if scheme == "w4a16" else {}
        chosen = schemes.by_name(scheme, **options)
        made = chosen.compress(weight((16, 128), "float16"))
        numbers = oracle.quants.dequantize(blocks_of_tensors(chosen, made), oracle.GGMLQuantizationType[name])
        np.testing.assert_array_equal(numbers.astype(np.float16), chosen.decompress(made, "float16"))


def test_bfloat16_scales_go_where_float16_has_them():
    fmt = jlp.Int4(32, scale_dtype="bfloat16")
    q = jlp.quantize(jax.device_put(weight((8, 64))), fmt)
    scale = np.maximum(np.asarray(q.scale), ml_dtypes.bfloat16(2.0**-14))
    _, blocks = blocks_of_array(dataclasses.replace(q, scale=jax.device_put(scale)))
    found = array_of_blocks(Q4_0, blocks)
    np.testing.assert_array_equal(np.asarray(found.scale, np.float32), scale.astype(np.float32))
    for lost in (2.0**-30, 2.0**17):
        with pytest.raises(CheckpointError, match="are no numbers of float16"):
            blocks_of_array(dataclasses.replace(q, scale=jnp.full_like(q.scale, lost)))


def test_what_has_no_exact_form_is_refused():
    x = jnp.ones((4, 64), jnp.float16)
    half = {"scale_dtype": "float16"}
    for q, reason in (
        (jlp.quantize(x, jlp.Int4(64, **half)), "groups of 64 has no exact form"),
        (jlp.quantize(x, jlp.Int4(32, symmetric=False, **half)), "needs Int4"),
        (jlp.quantize(x, jlp.NVFP4()), "needs MXFP4"),
        (jlp.quantize(x, jlp.MXFP4((32, 32))), "needs MXFP4"),
        (jlp.quantize(x.T, jlp.MXFP4(), axis=-2), "pass q.mT"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            blocks_of_array(q)
    with pytest.raises(CheckpointError, match="Q8_0 has no exact form"):
        array_of_blocks(TYPES["Q8_0"], np.zeros((1, 34), np.uint8))


def test_scales_that_are_no_numbers_are_refused():
    q4_0, mxfp4 = any_blocks(Q4_0), any_blocks(MXFP4)
    q4_0[0, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    mxfp4[0, 0] = 255
    for block_type, blocks, reason in ((Q4_0, q4_0, "NaN or infinity"), (MXFP4, mxfp4, "scale of MXFP4 is 255")):
        with pytest.raises(CheckpointError, match=reason):
            array_of_blocks(block_type, blocks)
        with pytest.raises(CheckpointError, match=reason):
            tensors_of_blocks(block_type, blocks)
