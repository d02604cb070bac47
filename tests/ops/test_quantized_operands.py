"""A QuantizedArray where an array belongs, and one whose arrays are not those of its format."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from tests.eager import jlp
from tests.helpers import ONE_OF_EACH, format_name

X = jnp.ones((16, 32))
Q = jlp.quantize(X, jlp.NVFP4())
LOADED = jlp.quantize(X.T, jlp.Int4(16), axis=-2)

TAKES_AN_ARRAY = {
    "quantize": lambda q: jlp.quantize(q, jlp.NVFP4()),
    "quantize_both": lambda q: jlp.quantize_both(q, jlp.NVFP4()),
    "fake_quantize": lambda q: jlp.fake_quantize(q, jlp.NVFP4()),
    "hadamard_transform": jlp.hadamard_transform,
    "linear": lambda q: jlp.linear(q, X.T, recipe=jlp.NVFP4BlockScaling()),
    "dot_general": lambda q: jlp.dot_general(q, X.T, (((1,), (0,)), ((), ())), recipe=None),
    "einsum": lambda q: jlp.einsum("ab,bc->ac", q, X.T, recipe=None),
    "grouped_matmul": lambda q: jlp.grouped_matmul(q, X.T[None], jnp.asarray([16]), recipe=None),
    "quantize_kernel": lambda q: jlp.quantize_kernel(q, jlp.NVFP4BlockScaling()),
}


@pytest.mark.parametrize("function", TAKES_AN_ARRAY)
def test_a_quantised_input_is_named_with_the_remedy(function):
    with pytest.raises(
        TypeError, match=rf"^{function}: [a-z0 ]+ is quantised, QuantizedArray\(.*: pass its .dequantize\(\)"
    ):
        jax.eval_shape(lambda: TAKES_AN_ARRAY[function](Q))


TAKES_A_QUANTIZED_ARRAY = {
    "dequantize": jlp.dequantize,
    "scaled_matmul": lambda q: jlp.scaled_matmul(X, q),
    "gemm_scales": jlp.layouts.gemm_scales,
    "all_gather_quantized": lambda q: jlp.all_gather_quantized(q, "x"),
    "all_to_all_quantized": lambda q: jlp.all_to_all_quantized(q, "x"),
}


@pytest.mark.parametrize("function", TAKES_A_QUANTIZED_ARRAY)
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("data", Q.data[:, 1:], r"data is uint8\[16, 15\]; NVFP4 1x16 of 16x32 along axis -1 needs uint8\[16, 16\]"),
        ("data", Q.data.astype(jnp.int8), r"data is int8\[16, 16\]; .* needs uint8\[16, 16\]"),
        ("scale", Q.scale[:3], r"scale is float8_e4m3fn\[3, 2\]; .* needs float8_e4m3fn\[16, 2\]"),
        ("scale", None, "scale is None; .* needs float8_e4m3fn"),
        ("amax", None, r"amax is None; .* needs float32\[\]"),
        ("amax", jnp.ones(16), r"amax is float32\[16\]; .* needs float32\[\]"),
        ("zero_point", Q.data, r"zero_point is uint8\[16, 16\]; .* needs None"),
        ("format", jlp.MXFP8(), r"data is uint8\[16, 16\]; MXFP8 E4M3 1x32 of 16x32 along axis -1 needs float8_e4m3fn"),
        ("matrix_shape", (16, 99), "data is .* of 16x99 along axis -1 needs"),
        ("axis", -2, "data is .* of 16x32 along axis -2 needs"),
    ],
)
def test_arrays_that_do_not_belong_together_are_named(function, field, value, message):
    wrong = dataclasses.replace(Q, **{field: value})
    with pytest.raises(ValueError, match=f"^{function}: [a-z]+[.]{message}"):
        jax.eval_shape(lambda: TAKES_A_QUANTIZED_ARRAY[function](wrong))


def test_a_kernel_along_another_axis_names_the_caller():
    calls = {"linear": jlp.linear, "einsum": lambda x, q: jlp.einsum("ab,bc->ac", x, q)}
    for who, call in calls.items():
        with pytest.raises(ValueError, match=f"^{who}: .* needs .K, N. quantised along K"):
            jax.eval_shape(lambda call=call: call(X, jlp.quantize(X.T, jlp.Int4(16))))


def test_a_loaded_kernel_of_other_arrays_is_named():
    wrong = dataclasses.replace(LOADED, scale=LOADED.scale[:1])
    with pytest.raises(ValueError, match=r"linear: kernel[.]scale is bfloat16\[1, 2\]"):
        jax.eval_shape(lambda: jlp.linear(X, wrong))


@pytest.mark.parametrize("fmt", [*ONE_OF_EACH, jlp.Int4(16), jlp.Int4(16, False)], ids=format_name)
@pytest.mark.parametrize("shape", [(16, 32), (3, 20, 48), (2, 1, 16, 0), (48,)], ids=str)
def test_what_quantize_makes_belongs_together(fmt, shape):
    for axis in (-1, -2)[: len(shape)]:
        if len(shape) > 1 or not fmt.tiles:
            x = jnp.ones((*shape[:-2], *(shape[:-3:-1] if axis == -2 else shape[-2:])))
            assert jax.eval_shape(lambda: jlp.quantize(x, fmt, axis=axis).dequantize()).shape == x.shape  # noqa: B023


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "NVFP4"}, "format='NVFP4'; needs a format such as NVFP4()"),
        ({"matrix_shape": [16, 32]}, r"matrix_shape=\[16, 32\]; needs a tuple of one or two sizes"),
        ({"matrix_shape": (1, 16, 32)}, r"matrix_shape=\(1, 16, 32\); needs a tuple"),
        ({"matrix_shape": ("a", "b")}, r"matrix_shape=\('a', 'b'\); needs a tuple"),
        ({"axis": 0}, "axis=0; needs -1 or -2"),
        ({"hadamard": True}, "hadamard=True; needs a jaxlowprec.Hadamard or None"),
    ],
)
def test_static_fields_are_checked_when_one_is_made(fields, message):
    with pytest.raises((TypeError, ValueError), match=f"^QuantizedArray: {message}"):
        dataclasses.replace(Q, **fields)
