"""Every op in a program of XLA's gives the bytes that tests/interpreted.py finds by NumPy and the kernels, on which the
other tests of the ops rely."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec.ops.activations.api import activated, activation_gradients
from jaxlowprec.ops.activations.quantized import quantized_activation
from jaxlowprec.ops.amax import Amaxes
from jaxlowprec.ops.grouped_matmul.api import multiply_groups, multiply_within_groups, quantize_groups
from jaxlowprec.ops.grouped_matmul.weight_only import grouped_weight_only
from jaxlowprec.ops.norms.api import NormSpec, normed
from jaxlowprec.ops.norms.quantized import quantized_norm
from jaxlowprec.ops.statistics.op import moments_op, outliers_op, statistics_op, sums_op
from jaxlowprec.ops.sum_over_rows import sum_over_rows_op
from jaxlowprec.ops.weight_only_matmul.api import weight_only_matmuls
from tests import native_calls
from tests.helpers import assert_same_bytes, random_array
from tests.interpreted import interpreted
from tests.products import calls_of

KEY = np.array([3, 5], np.uint32)
SIZES = np.array([5, 0, 30, 13], np.int32)


def there_and_back(x, w):
    q = jlp.quantize(
        x, jlp.NVFP4(), axis=-2, hadamard=jlp.Hadamard(64, "drawn"), rounding="stochastic", key=KEY, sign_key=KEY
    )
    row, column = jlp.quantize_both(x, jlp.MXFP8(), rounding="stochastic", key=KEY)
    rotated = jlp.quantize(x, jlp.NVFP4(), axis=-1, hadamard=True, rounding="eden", key=KEY)
    lines = jlp.quantize(x, jlp.NVFP4(row_scaled=True))
    return q, row, column, rotated, lines, [jlp.dequantize(one) for one in (q, column, rotated, lines)]


def int4(x, w):
    q = jlp.quantize(x, jlp.Int4(32, symmetric=False, pad=True))
    return q, jlp.dequantize(q), jlp.fake_quantize(x, jlp.Int4(32, pad=True), axis=-2)


def products(x, w):
    both = jlp.quantize(x, jlp.NVFP4()), jlp.quantize(w, jlp.NVFP4((16, 16)))
    options = {"bias": w[:, 0], "accumulate": x[:, :40], "activation": "gelu", "return_pre_activation": True}
    weights = [jlp.quantize(v, jlp.Int4(16)) for v in (w, w[:24])]
    return (
        jlp.scaled_matmul(*both, **options),
        jlp.scaled_matmul(x, jlp.quantize(w, jlp.MXFP4()), w[:, 0]),
        weight_only_matmuls("test", x, weights, [None, None], jnp.bfloat16),
    )


def groups(x, w):
    row, column = quantize_groups(x, SIZES, jlp.NVFP4(), rowwise=True, columnwise=True, hadamard=jlp.Hadamard())
    weights = jlp.quantize(jnp.stack([w, -w, w / 2, w]), jlp.NVFP4((16, 16)))
    return (
        (row, column),
        multiply_groups(row, weights, None, jnp.float32),
        multiply_within_groups(column, column, jnp.float32),
        grouped_weight_only(x, weights, SIZES, None, jnp.bfloat16),
    )


def rows_in_groups(x, w):
    options = {"rowwise": True, "columnwise": True, "words": np.arange(8, dtype=np.uint32).reshape(4, 2)}
    row, column = quantize_groups(x, SIZES, jlp.Int8Rows(), **options)
    weights = jlp.quantize(jnp.stack([w, -w, w / 2, w]), jlp.Int8Rows("bfloat16"))
    return (
        (row, column),
        jlp.quantize_both(x, jlp.Float8Rows()),
        multiply_groups(row, weights, None, jnp.float32),
        multiply_within_groups(column, column, jnp.float32),
    )


def producers(x, w):
    spec, wanted = NormSpec("layer", 1e-6, True, True, None, Amaxes()), Amaxes(True, jlp.Hadamard())
    norm = normed(spec, x, w[0], x * 2, w[1])
    plain = NormSpec("rms", 1e-6, False, False)
    return (
        tuple(norm),
        jax.vjp(lambda x, gamma: jlp.rms_norm(x, gamma), x, w[0])[1](x),
        tuple(quantized_norm(plain, jlp.MXFP8(), x, w[0], None, None, rowwise=True, columnwise=True, words=None)),
        activated("swiglu", (x, -x), wanted, None),
        activation_gradients("gelu", x, (x,), wanted, None, row_sums=True),
        quantized_activation("silu", jlp.MXFP4(), [x], words=None, rowwise=True, columnwise=True),
        sum_over_rows_op()(x),
    )


def statistics(x, w):
    q = jlp.quantize(x, jlp.NVFP4())
    sums = sums_op(jlp.NVFP4(), False, (True, False))(x, jnp.float32(0.5), q.data, q.scale, q.amax)[0]
    known = [jnp.full((1,), value) for value in (3.0, 1.0, 0.25)]
    vectors = statistics_op(("two_level",))(sums[None], *known, jnp.ones((1, 8)))
    return moments_op()(x), outliers_op()(x, jnp.float32(1)), sums, vectors


CALLED = {
    there_and_back: {"amax", "quantize", "row_scaled_quantize", "dequantize", "hadamard"},
    int4: {"int4_quantize", "int4_dequantize", "int4_fake_quantize"},
    products: {"scaled_matmul", "weight_only_matmul", "weight_only_matmuls"},
    groups: {"grouped_amax", "grouped_quantize", "grouped_matmul", "grouped_wgrad", "grouped_weight_only"},
    rows_in_groups: {"line_amaxes", "grouped_line_amaxes", "grouped_quantize", "grouped_matmul", "grouped_wgrad"},
    producers: {
        *("norm", "norm_gradient", "norm_quantize", "sum_over_rows"),
        *("activation", "activation_gradient", "activation_quantize"),
    },
    statistics: {"moments", "outliers", "sums", "statistics"},
}


@pytest.mark.parametrize("function", CALLED, ids=lambda function: function.__name__)
def test_a_program_gives_the_same_bytes(isa, function):
    if isa == "cuda":
        pytest.skip("about the CPU's kernels")
    x, w = random_array((48, 80), "bfloat16", 1), random_array((40, 80), "float32", 2)
    program = jax.jit(function).lower(x, w).compile()
    assert_same_bytes(interpreted(function)(x, w), program(x, w))
    assert {f"jaxlowprec_{name}" for name in CALLED[function]} <= set(calls_of(program))


def test_a_handlers_error_is_raised(isa):
    if isa == "cuda":
        pytest.skip("about the CPU's kernels")
    x = np.ones((2, 2), np.float32)
    with pytest.raises(ValueError, match="Wrong number of attributes: expected 3 but got 1 with name.s.: plain"):
        native_calls.call("jaxlowprec_amax", [jax.ShapeDtypeStruct((), jnp.float32)], [x], {"plain": True})
