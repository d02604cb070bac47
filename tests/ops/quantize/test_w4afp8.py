"""Float8Rows(rule="w4afp8"): 4-bit weights as vLLM's kernel for Hopper decodes them (numerics.md 18)."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxlowprec.diagnostics import support
from tests.eager import jlp
from tests.helpers import BY_WEIGHTS_RULE as FMT
from tests.helpers import assert_same_bytes, random_array
from tests.sharding.meshes import mesh_of, on_mesh

E4M3, F = ml_dtypes.float8_e4m3fn, np.float32


def weight(shape=(40, 512), dtype="bfloat16", seed=0):
    """Rows and groups of very different sizes; zeros, what is not finite, and numbers near the least scale."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-9, 9, (*shape[:-1], shape[-1] // 128))).repeat(128, -1)
    x = (x * np.exp2(rng.integers(-60, 60, shape[0]))[:, None]).astype(F)
    x[0], x[1, 5], x[2, 6], x[3, :128], x[4, ::2] = 0, np.nan, -np.inf, 0, -0.0
    x[5] *= 2.0**-5 / np.abs(x[5]).max()
    x[6, 128:] *= 2.0**-20
    x[7] *= 2.0**-120
    return x.astype(jnp.dtype(dtype))


def expected(x):
    """Codes as bytes and scales, by comparing |x| / scale with each of the numbers of its group."""
    x = x.astype(F)
    codes, scales = np.zeros(x.shape, np.uint8), np.zeros((len(x), 1), F)
    for row, values in enumerate(x):
        amax = np.abs(values).max()
        scales[row] = max(F(ml_dtypes.bfloat16(amax / F(7))) / F(56), F(8) * F(1 / (448 * 512)))
        if not np.isfinite(amax):
            scales[row] = np.nan
            continue
        for group in range(0, x.shape[1], 128):
            v = np.abs(values[group : group + 128]) / scales[row]
            h = max(F(E4M3(v.max() / F(7))), F(2.0**-9))
            numbers = (np.arange(8, dtype=F) * h).astype(E4M3)
            distance = np.abs(v.astype(np.float64)[:, None] - numbers.astype(np.float64))
            k = (distance + 1e-300 * (np.arange(8) % 2)).argmin(1)  # ties to the even one
            tied = (distance == distance.min(1, keepdims=True)).sum(1) > 1
            first = (distance == distance.min(1, keepdims=True)).argmax(1)
            k = np.where(tied, first + first % 2, k)
            code = numbers.view(np.uint8)[k]
            sign = np.signbit(values[group : group + 128]) * np.uint8(0x80)
            codes[row, group : group + 128] = np.where(code == 0, 0, code | sign)
    return codes, scales


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bytes_are_those_of_the_rule(dtype):
    with np.errstate(all="ignore"):
        x = weight(dtype=dtype)
        codes, scales = expected(x)
    q = jlp.quantize(x, FMT)
    np.testing.assert_array_equal(np.asarray(q.data).view(np.uint8), codes)
    np.testing.assert_array_equal(np.asarray(q.scale), scales)
    numbers = np.arange(256, dtype=np.uint8).view(E4M3).astype(F)
    for implementation in ("ffi", "reference"):
        values = np.asarray(jlp.dequantize(q, dtype="float32", implementation=implementation))
        np.testing.assert_array_equal(values, numbers[codes] * scales)
    column = jlp.quantize(np.ascontiguousarray(np.swapaxes(x, 0, 1)), FMT, axis=-2)
    assert_same_bytes((column.data, column.scale), (q.data, q.scale))


def test_ties_go_to_the_even_number():
    """The numbers are 0, 56, 112, 160, 224, 288, 320 and 384."""
    x = jnp.zeros((1, 128)).at[0, :8].set(jnp.asarray([392.0, 28, 84, 136, -192, 256, 304, 352]))
    q = jlp.quantize(x, FMT)
    assert q.scale.tolist() == [[1.0]]
    assert np.asarray(q.data)[0, :8].astype(float).tolist() == [384, 0, 112, 112, -224, 224, 320, 320]


def test_errors_are_those_of_4_bits():
    x = random_array((256, 1024), seed=3).astype(jnp.float32)

    def error(fmt):
        return jnp.linalg.norm(jlp.quantize(x, fmt).dequantize(jnp.float32) - x) / jnp.linalg.norm(x)

    assert error(FMT) < 1.02 * error(jlp.Int4(128))


def test_experts_and_meshes_have_the_bytes_of_matrices():
    x = random_array((4, 64, 512), seed=4)
    each = [jlp.quantize(one, FMT) for one in x]
    for many in (jlp.quantize(x, FMT), jax.vmap(lambda one: jlp.quantize(one, FMT))(x)):
        assert_same_bytes(many.data, jnp.stack([q.data for q in each]))
        assert_same_bytes(many.scale, jnp.stack([q.scale for q in each]))
    for spec in (P("a", "b"), P(None, "b"), P(None, ("a", "b"))):
        result, found = on_mesh(lambda x: jlp.quantize(x, FMT), [x[0]], [spec], mesh_of((2, 2)))
        assert_same_bytes((result.data, result.scale), (each[0].data, each[0].scale))
        assert {kind for kind, _ in found} <= {"all-reduce"}


def test_a_product_is_that_of_the_codes():
    x, w = random_array((8, 256), seed=5), random_array((128, 256), seed=6)
    a, b = jlp.quantize(x, jlp.Float8Rows()), jlp.quantize(w, FMT)
    plain = jlp.QuantizedArray(b.data, b.scale, None, None, jlp.Float8Rows(), b.shape, b.dtype, -1, None)
    assert_same_bytes(jlp.scaled_matmul(a, b), jlp.scaled_matmul(a, plain))
    assert_same_bytes(jlp.scaled_matmul(x, b), jlp.scaled_matmul(x, plain))


class TestBadInput:
    @pytest.mark.parametrize("columns", [1, 127, 192])
    def test_parts_of_groups(self, columns):
        with pytest.raises(
            ValueError, match=rf"x has {columns} elements along axis -1; Float8Rows w4afp8 rule needs a"
        ):
            jlp.quantize(jnp.ones((4, columns)), FMT)
        with pytest.raises(ValueError, match="quantize: x has 4 elements along axis -2"):
            jlp.quantize_both(jnp.ones((4, 128)), FMT)

    def test_options_that_the_rule_does_not_have(self):
        x, key = jnp.ones((128, 128)), jax.random.key(0)
        with pytest.raises(ValueError, match="only rounds to nearest"):
            jlp.quantize(x, FMT, rounding="stochastic", key=key)
        with pytest.raises(ValueError, match="weights are not rotated"):
            jlp.quantize(x, FMT, hadamard=jlp.Hadamard())

    def test_an_operand_that_is_no_weight(self):
        with pytest.raises(NotImplementedError, match="the rule of weights that are served in 4 bits; quantise lhs by"):
            jlp.WeightQAT(jlp.Float8Rows(), activation_format=FMT)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"element": "e5m2"}, "it is a rule of E4M3 with its own least scale"),
            ({"least_scale": 1e-3}, "least_scale=0.001.*leave both out"),
            ({"scale_dtype": "bfloat16"}, "the rule of 4-bit weights has float32 scales"),
        ],
    )
    def test_fields_that_the_rule_fixes(self, options, message):
        with pytest.raises(ValueError, match=message):
            jlp.Float8Rows(rule="w4afp8", **options)

    def test_there_is_no_kernel(self):
        with pytest.raises(NotImplementedError, match="the rule of 4-bit weights: there is no kernel yet"):
            jlp.quantize(jnp.ones((1, 128)), FMT, implementation="ffi")
        how, why = support.runs("quantize", "cpu", (FMT,))
        assert how == "reference" and "the rule of 4-bit weights has no kernel" in why
