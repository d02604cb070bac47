"""Float8Rows and Int8Rows: a scale for each line, by the rules that servers compute (numerics.md 18)."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlowprec.diagnostics import support
from tests.eager import jlp
from tests.helpers import OF_CACHES, as_bytes, assert_same_bytes, assert_same_numbers, format_name
from tests.numpy_oracle import rows as oracle
from tests.ops.quantize.hostile_arrays import any_floats

LEAST = 1 / (448 * 512)
FORMATS = (
    jlp.Float8Rows(),
    jlp.Float8Rows("e5m2"),
    jlp.Float8Rows(scale_dtype="bfloat16"),
    jlp.Float8Rows(scale_dtype="float16"),
    jlp.Float8Rows(least_scale=LEAST),
    jlp.Int8Rows(),
    jlp.Int8Rows("bfloat16"),
    jlp.Int8Rows("float16"),
    jlp.Int8Rows("bfloat16", "compressed-tensors"),
    jlp.Int8Rows(rule="compressed-tensors"),
    *OF_CACHES,
)
SHAPES = [(1, 16), (5, 1), (7, 40), (33, 200), (130, 300), (0, 32), (4, 0)]
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=format_name)


def array(shape, dtype="float32", seed=0):
    """Lines of very different sizes; of zeros, with what is not finite, and near the least and largest numbers."""
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        x = (
            rng.standard_normal(shape)
            * np.exp2(rng.integers(-40, 40, shape))
            * np.exp2(rng.integers(-30, 30, shape[:1]))[:, None]
        )
        x = x.astype(np.float32)
        if x.size and shape[0] > 6:
            x[0], x[1, 0], x[2, -1] = 0, np.nan, np.inf
            x[3] *= np.float32(1e-38)
            x[4] = 3e38
            x[5] = np.copysign(3e-38, rng.standard_normal(shape[1]))
            x[6, ::2] = -0.0
        return x.astype(jnp.dtype(dtype))


def implementations(fmt):
    """Those that quantise by a rule."""
    return ("reference", None) if fmt.caches else ("ffi", "reference")


def found(q):
    """Codes and float32 scales, as the oracle has them."""
    data = np.asarray(q.data)
    return data if data.dtype == np.int8 else data.view(np.uint8), np.asarray(q.scale).astype(np.float32)


def same(actual, expected):
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_array_equal(actual[1], expected[1])


@every_format
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_those_of_the_rule(fmt, dtype, shape, isa):
    x = array(shape, dtype)
    expected = oracle.quantize(x, fmt)
    for implementation in implementations(fmt):
        q = jlp.quantize(x, fmt, implementation=implementation)
        same(found(q), expected)
        for decoding in ("ffi", "reference"):
            values = np.asarray(jlp.dequantize(q, dtype="float32", implementation=decoding))
            np.testing.assert_array_equal(values, oracle.decode(*expected, fmt))


@pytest.mark.parametrize("fmt", [f for f in FORMATS if isinstance(f, jlp.Float8Rows) and not f.caches], ids=format_name)
def test_all_mantissas_over_all_largest_ones(fmt, isa):
    """Every bfloat16 mantissa of 25 binades in rows with every mantissa of an amax, and zeros of both signs."""
    mantissas = 1 + np.arange(128) / 128
    row = np.concatenate([np.exp2(-binade) * mantissas for binade in range(25)] + [np.zeros(130)])
    x = np.minimum(row, mantissas[:, None]) * np.where(np.arange(row.size) % 3, 1, -1)
    for shift in (-126, -100, -80, 0, 100):
        shifted = jnp.asarray(np.ldexp(x, shift).astype(np.float32)).astype(jnp.bfloat16)
        expected = oracle.quantize(shifted, fmt)
        same(found(jlp.quantize(shifted, fmt, implementation="ffi")), expected)
        same(found(jlp.quantize_both(shifted, fmt, implementation="ffi")[0]), expected)


@pytest.mark.parametrize("fmt", [jlp.Float8Rows(), jlp.Int8Rows()], ids=format_name)
@pytest.mark.parametrize("columns", [8192, 8200], ids=str)
def test_large_matrices_have_the_bytes_of_parts(fmt, columns, isa):
    x = jax.random.normal(jax.random.key(0), (1032, columns), jnp.bfloat16)
    whole = jlp.quantize(x, fmt, implementation="ffi")
    parts = [jlp.quantize(part, fmt, implementation="ffi") for part in jnp.split(x, 3)]
    assert_same_bytes(whole.data, jnp.concatenate([part.data for part in parts]))
    assert_same_bytes(whole.scale, jnp.concatenate([part.scale for part in parts]))


@every_format
@given(x=any_floats())
def test_any_floats(fmt, x):
    expected = oracle.quantize(x, fmt)
    for implementation in implementations(fmt):
        same(found(jlp.quantize(x, fmt, implementation=implementation)), expected)


@every_format
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(7, 40), (130, 300), (300, 600), (5, 1), (16, 64)], ids=str)
def test_random_bits_round_alike(fmt, dtype, shape, isa):
    x, key = array(shape, dtype), np.array([3, 5], np.uint32)
    options = {"rounding": "stochastic", "key": jnp.asarray(key)}
    ways = [(x, 0), (np.ascontiguousarray(x.T), 1)]
    expected = [oracle.quantize(lines, fmt, (key, stream, 0, 0)) for lines, stream in ways]
    for implementation in implementations(fmt):
        both = jlp.quantize_both(x, fmt, implementation=implementation, **options)
        for q, lines in zip(both, expected, strict=True):
            same(found(q), lines)
        same(found(jlp.quantize(x, fmt, implementation=implementation, **options)), expected[0])
        same(found(jlp.quantize(x, fmt, axis=-2, implementation=implementation, **options)), expected[1])


@every_format
@pytest.mark.parametrize("shape", [*SHAPES, (257, 1100)], ids=str)
def test_columns_are_rows_of_the_transposed(fmt, shape, isa):
    x = array(shape, "bfloat16")
    row, column = jlp.quantize(x, fmt), jlp.quantize(np.ascontiguousarray(x.T), fmt)
    for q in (jlp.quantize(x, fmt, axis=-2), jlp.quantize(x, fmt, axis=-2, implementation="reference")):
        assert_same_bytes((q.data, q.scale), (column.data, column.scale))
        assert_same_numbers(jlp.dequantize(q), jnp.swapaxes(jlp.dequantize(column), 0, 1))
    both = jlp.quantize_both(x, fmt)
    assert_same_bytes([(q.data, q.scale) for q in both], [(q.data, q.scale) for q in (row, column)])


@pytest.mark.parametrize("fmt", [jlp.Float8Rows(), jlp.Int8Rows()], ids=format_name)
def test_random_codes_are_unbiased(fmt):
    x = np.linspace(-1, 1, 64, dtype=np.float32)[None] * np.ones((4096, 1), np.float32)
    q = jlp.quantize(x, fmt, rounding="stochastic", key=jax.random.key(0))
    mean = np.asarray(jlp.dequantize(q)).mean(axis=0)
    step = np.maximum(np.abs(x[0]) / 8, 2.0**-6 / 448) if fmt.element == "e4m3" else np.full(64, 1 / 127)
    assert (np.abs(mean - x[0]) < step * 4 / np.sqrt(4096)).all()


class TestServers:
    """The formulas of vLLM 0.32's CUDA kernels, for activations, in NumPy."""

    X = array((64, 256), "bfloat16", seed=3)[7:]

    def test_float8_per_token(self):
        x = self.X.astype(np.float32)
        scale = np.maximum(np.abs(x).max(1, keepdims=True) / np.float32(448), np.float32(LEAST))
        codes = np.clip(x / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        q = jlp.quantize(self.X, jlp.Float8Rows(least_scale=LEAST))
        np.testing.assert_array_equal(np.asarray(q.scale), scale)
        np.testing.assert_array_equal(np.asarray(q.data).astype(np.float32), codes.astype(np.float32))

    def test_int8_per_token(self):
        x = self.X.astype(np.float32)
        amax = np.abs(x).max(1, keepdims=True)
        q = jlp.quantize(self.X, jlp.Int8Rows())
        np.testing.assert_array_equal(np.asarray(q.scale), amax / np.float32(127))
        np.testing.assert_array_equal(np.asarray(q.data), np.rint(x * (np.float32(127) / amax)).astype(np.int8))


@every_format
@given(power=st.integers(-60, 60), seed=st.integers(0, 99))
def test_a_power_of_two_changes_only_scales(fmt, power, seed):
    if fmt.least or fmt.scale_dtype == "float16":
        return
    x = np.random.default_rng(seed).standard_normal((3, 50)).astype(np.float32)
    q, scaled = jlp.quantize(x, fmt), jlp.quantize(np.ldexp(x, power), fmt)
    np.testing.assert_array_equal(as_bytes(q.data), as_bytes(scaled.data))
    expected = np.ldexp(np.asarray(q.scale).astype(np.float32), power)
    np.testing.assert_array_equal(np.asarray(scaled.scale).astype(np.float32), expected)


@every_format
def test_a_line_does_not_depend_on_others(fmt):
    x = array((33, 200), "bfloat16", seed=2)
    q = jlp.quantize(x, fmt)
    for i in (0, 1, 7, 32):
        alone = jlp.quantize(x[i], fmt)
        assert_same_bytes((q.data[i], q.scale[i]), (alone.data, alone.scale))
    each = jax.vmap(lambda row: jlp.quantize(row, fmt))(jnp.asarray(x))
    assert_same_bytes((q.data, q.scale), (each.data, each.scale))


@every_format
@pytest.mark.parametrize("implementation", [None, "reference"])
def test_split_rows_are_those_of_one_matrix(fmt, implementation):
    x = array((64, 48), "bfloat16").reshape(4, 16, 48)
    options = {"rounding": "stochastic", "key": jnp.array([1, 2], jnp.uint32), "implementation": implementation}
    row, column = jlp.quantize_both(x, fmt, rows_split=True, **options)
    whole_row, whole_column = jlp.quantize_both(x.reshape(64, 48), fmt, **options)
    assert_same_bytes((row.data.reshape(64, 48), row.scale.reshape(64, 1)), (whole_row.data, whole_row.scale))
    assert_same_bytes(jnp.moveaxis(column.data, 0, 1).reshape(48, 64), whole_column.data)
    assert_same_bytes(column.scale, jnp.broadcast_to(whole_column.scale, (4, 48, 1)))


class TestCaches:
    """vLLM 0.32's `fp8_per_token_head` and `int8_per_token_head`, for keys and values, in NumPy."""

    X = np.concatenate([array((64, 256), "bfloat16", seed=3)[7:], np.zeros((1, 256), "bfloat16")])

    def quantised(self, largest):
        x = self.X.astype(np.float32)
        scale = np.maximum(np.abs(x).max(1, keepdims=True) / np.float32(largest), np.float32(1e-6))
        return x * (np.float32(1) / scale), scale

    @pytest.mark.parametrize(("fmt", "largest"), [(OF_CACHES[0], 448), (OF_CACHES[1], 127)], ids=str)
    def test_key_or_value_of_a_token_and_head(self, fmt, largest):
        values, scale = self.quantised(largest)
        if largest == 448:
            codes = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        else:
            codes = np.trunc(
                np.clip(np.where(values >= 0, values + np.float32(0.5), values - np.float32(0.5)), -128, 127)
            )
        q = jlp.quantize(self.X, fmt)
        np.testing.assert_array_equal(np.asarray(q.scale), scale)
        np.testing.assert_array_equal(np.asarray(q.data).astype(np.float32), codes.astype(np.float32))

    def test_halves_round_away_from_zero(self):
        x = jnp.asarray([127.0, 0.5, 1.5, 2.5, -2.5, 126.5, -0.49999997])
        rows = jax.jit(lambda x: jlp.quantize(x, OF_CACHES[1]))(x)
        assert rows.data.tolist() == [127, 1, 2, 3, -3, 127, -1] and rows.scale.tolist() == [1.0]

    def test_there_is_no_kernel(self):
        with pytest.raises(NotImplementedError, match="the rule of caches: there is no kernel yet"):
            jlp.quantize(self.X, OF_CACHES[0], implementation="ffi")
        how, why = support.runs("quantize", "cpu", OF_CACHES[:1])
        assert how == "reference" and "the rule of caches has no kernel" in why

    @pytest.mark.parametrize(
        ("make", "options", "message"),
        [
            (
                jlp.Float8Rows,
                {"element": "e5m2"},
                "it is a rule of E4M3 with its own least scale, 1e-06: leave both out",
            ),
            (jlp.Float8Rows, {"least_scale": 1e-3}, "least_scale=0.001; it is a rule"),
            (jlp.Float8Rows, {"scale_dtype": "bfloat16"}, "the rule of caches has float32 scales"),
            (jlp.Int8Rows, {"scale_dtype": "float16"}, "the rule of caches has float32 scales"),
        ],
    )
    def test_what_the_rule_fixes(self, make, options, message):
        with pytest.raises(ValueError, match=message):
            make(rule="cache", **options)


class TestBadInput:
    @pytest.mark.parametrize("make", [jlp.Float8Rows, jlp.Int8Rows])
    @pytest.mark.parametrize("dtype", ["float64", "int8", None, 3])
    def test_scale_dtype(self, make, dtype):
        with pytest.raises(ValueError, match='scale_dtype=.*needs "float32", "bfloat16" or "float16"'):
            make(scale_dtype=dtype)

    @pytest.mark.parametrize("least", [-1.0, float("nan"), float("inf"), 1e-39, "0", True])
    def test_least_scale(self, least):
        with pytest.raises(ValueError, match="Float8Rows: least_scale=.*needs a finite number"):
            jlp.Float8Rows(least_scale=least)

    def test_rule(self):
        with pytest.raises(ValueError, match="Int8Rows: rule='slime'"):
            jlp.Int8Rows(rule="slime")
        with pytest.raises(ValueError, match="Float8Rows: rule='compressed-tensors'"):
            jlp.Float8Rows(rule="compressed-tensors")

    def test_an_amax(self):
        with pytest.raises(ValueError, match="amax= was given, but Int8Rows scales each"):
            jlp.quantize(jnp.ones((4, 8)), jlp.Int8Rows(), amax=jnp.float32(1))
