"""Eight bits with one scale per row: weights load as Float8Rows and Int8Rows, with the scales of the file."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxlowprec.checkpoints import schemes
from jaxlowprec.checkpoints.schemes.mixed import ConfigGroup, Mixed
from tests.checkpoints.weights import FLOATS, assert_same_tensors, weight
from tests.eager import jlp
from tests.helpers import as_bytes

FLOAT8, INT8 = schemes.by_name("fp8_channel"), schemes.by_name("int8_channel")
SHAPES = ((16, 256), (9, 200), (8, 40))
over_activations = pytest.mark.parametrize("activations", ["dynamic", "static"])


every_scheme = pytest.mark.parametrize("scheme", [FLOAT8, INT8], ids=["fp8_channel", "int8_channel"])


@over_activations
@every_scheme
@pytest.mark.parametrize("dtype", FLOATS)
def test_store_is_the_inverse_of_load(dtype, scheme, activations):
    scheme = dataclasses.replace(scheme, activations=activations, input_scale=0.25)
    fmt = (
        jlp.Float8Rows(scale_dtype=dtype) if scheme.name == "fp8_channel" else jlp.Int8Rows(dtype, "compressed-tensors")
    )
    for shape in SHAPES:
        tensors = scheme.compress(weight(shape, dtype))
        loaded = scheme.load(tensors, dtype)
        assert (loaded.shape, loaded.axis) == (shape, -1)
        assert loaded.format == fmt
        assert_same_tensors(scheme.store(loaded), tensors)
        in_float32 = scheme.load(tensors, "float32")  # as a model with float32 parameters loads it
        assert_same_tensors(dataclasses.replace(scheme, scale_dtype=dtype).store(in_float32), tensors)


@every_scheme
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_array_is_the_weight_and_so_are_its_products(dtype, scheme):
    for shape in SHAPES:
        tensors = scheme.compress(weight(shape, dtype))
        loaded, decoded = scheme.load(tensors, dtype), scheme.decompress(tensors, dtype)
        np.testing.assert_array_equal(as_bytes(loaded.dequantize()), as_bytes(decoded))
        x = jax.device_put(weight((5, shape[1]), "float32", seed=1))
        whole = scheme.decompress(tensors, "float32").astype(np.float64)
        product = jlp.scaled_matmul(x, loaded, preferred_element_type=jnp.float32)
        np.testing.assert_allclose(product, np.asarray(x, np.float64) @ whole.T, rtol=1e-5, atol=1e-5)


def test_scales_of_a_given_dtype():
    w = weight((16, 256))
    scheme = schemes.by_name("fp8_channel", scale_dtype="float32")
    tensors = scheme.compress(w)
    assert (
        scheme.output_specs(w.shape)["weight_scale"]
        == ("float32", (16, 1))
        == (
            tensors["weight_scale"].dtype.name,
            tensors["weight_scale"].shape,
        )
    )
    assert FLOAT8.as_stored({"weight": "float8_e4m3fn", "weight_scale": "float32"}) == scheme
    with pytest.raises(ValueError, match="scales of q are not bfloat16 numbers; give the scheme scale_dtype='float32'"):
        FLOAT8.store(scheme.load(tensors, "bfloat16"))
    with pytest.raises(ValueError, match="fp8_channel: scale_dtype='int8'; needs bfloat16 or float16 or float32, or"):
        schemes.by_name("fp8_channel", scale_dtype="int8")


@every_scheme
def test_a_trained_weight_is_stored_with_its_codes(scheme):
    """Int8Rows() and the "deploy" rule, too: files hold scales, so any engine serves either."""
    fmt = jlp.Float8Rows(scale_dtype="bfloat16") if scheme is FLOAT8 else jlp.Int8Rows("bfloat16")
    q = jlp.quantize(jax.device_put(weight((16, 256))), fmt)
    stored = scheme.store(q)
    np.testing.assert_array_equal(as_bytes(stored["weight"]), as_bytes(q.data))
    loaded = scheme.load(stored)
    np.testing.assert_array_equal(as_bytes(loaded.dequantize()), as_bytes(q.dequantize()))
    assert scheme.holds(q)


@every_scheme
def test_blocks_are_not_rows(scheme):
    q = jlp.quantize(jax.device_put(weight((16, 256), "float32")), jlp.Float8Block(power_of_two=False))
    with pytest.raises(ValueError, match="q has format Float8Block.*needs (Float8Rows|Int8Rows)"):
        scheme.store(q)


def test_among_several_formats():
    mixed = Mixed((ConfigGroup(("a",), schemes.by_name("fp8_block")), ConfigGroup(("b",), FLOAT8)))
    tensors = FLOAT8.compress(weight((16, 256)))
    assert_same_tensors(mixed.store(mixed.load(tensors)), tensors)


def test_codes_are_the_rounded_quotients():
    """Rows of numbers of every exponent whose scale is 1: numpy's cast, with the sign of each zero."""
    x = np.arange(0, 2**32, 4099 * 7, dtype=np.uint32).view(np.float32)
    x = x[np.abs(x) <= 448]
    rows = np.column_stack([np.full(16, 448, np.float32), x[: x.size // 16 * 16].reshape(16, -1)])
    made = FLOAT8.compress(rows)
    assert (made["weight_scale"] == 1).all()
    assert_same_tensors({"weight": made["weight"]}, {"weight": rows.astype(ml_dtypes.float8_e4m3fn)})
