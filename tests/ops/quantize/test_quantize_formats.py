"""quantize and quantize_both to every format: the bytes of an implementation that shares nothing with the library."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxlowprec as jlp
from tests.against_oracle import assert_matches_quantized, quantized
from tests.helpers import (
    FLOAT8_TENSORS,
    FLOATS,
    FORMATS,
    ONE_OF_EACH,
    assert_same_bytes,
    format_name,
    often,
    random_array,
)

NEW = tuple(
    fmt for fmt in FORMATS if not isinstance(fmt, jlp.NVFP4)
)  # tests/ops/quantize/test_quantize.py has the others
ONE_OF_EACH_RULE = (
    jlp.MXFP8("e4m3", (1, 32), "up"),
    jlp.MXFP8("e5m2", (1, 32), "floor"),
    jlp.MXFP4((1, 32), "even"),
    jlp.Float8Block("e4m3", (128, 128), power_of_two=True),
    jlp.Float8Block("e5m2", power_of_two=False),
    jlp.Float8Tensor(),
)
SHAPES = [(1, 1), (31, 33), (129, 40), (66, 130), (3, 300), (2, 3, 33, 40)]  # about blocks, vectors, 16
KEY = jax.random.key(7)
ROUNDINGS = (("nearest", None), ("stochastic", KEY))


def inputs(shapes):
    """An array of each shape, their dtypes in turn."""
    return [
        random_array(shape, dtype, seed=sum(shape))
        for shape, dtype in zip(shapes, itertools.cycle(FLOATS), strict=False)
    ]


@functools.partial(jax.jit, static_argnames=("fmt",))
def all_ways(arrays, fmt):
    """Each array by each rounding, rowwise and columnwise: from one pass, and nearest from one each. Compiled once."""
    out = []
    for x, (rounding, key) in itertools.product(arrays, ROUNDINGS):
        options = {"rounding": rounding, "key": key, "implementation": "ffi"}
        ways = [jlp.quantize_both(x, fmt, **options)]
        if key is None:
            ways.append(tuple(jlp.quantize(x, fmt, axis, **options) for axis in (-1, -2)))
        out.append(ways)
    return out


@functools.cache
def expected(fmt):
    return [
        [quantized(x, fmt, axis, None, rounding, key) for axis in (-1, -2)]
        for x, (rounding, key) in itertools.product(inputs(SHAPES), ROUNDINGS)
    ]


class TestBytes:
    @pytest.mark.parametrize("fmt", often(ONE_OF_EACH, NEW), ids=format_name)
    def test_native_in_all_directions_and_roundings(self, isa, fmt):
        cases = itertools.product(inputs(SHAPES), ROUNDINGS)
        for (x, (rounding, _)), ways, wanted in zip(cases, all_ways(inputs(SHAPES), fmt), expected(fmt), strict=True):
            for way, one in itertools.product(ways, (0, 1)):
                name = f"{x.shape} {x.dtype} {rounding} {('rowwise', 'columnwise')[one]}"
                assert_matches_quantized(way[one], wanted[one], name)

    @pytest.mark.parametrize("fmt", often(ONE_OF_EACH, NEW), ids=format_name)
    def test_reference(self, fmt):
        """Rowwise: columnwise is the same of the transposed array. Stochastic once for each element and scaling."""
        x = random_array((2, 33, 130), FLOATS[NEW.index(fmt) % 3], seed=1)
        for rounding, key in ROUNDINGS[: 1 + (fmt in ONE_OF_EACH)]:
            q = jlp.quantize(x, fmt, rounding=rounding, key=key, implementation="reference")
            assert_matches_quantized(q, quantized(x, fmt, -1, None, rounding, key), rounding)

    def test_reference_columnwise(self):
        x, fmt = random_array((40, 50), seed=2), jlp.MXFP8("e5m2")
        for q, axis in zip(
            jlp.quantize_both(x, fmt, rounding="stochastic", key=KEY, implementation="reference"), (-1, -2), strict=True
        ):
            assert_matches_quantized(q, quantized(x, fmt, axis, None, "stochastic", KEY))

    @given(
        fmt=st.sampled_from(NEW),
        shape=st.tuples(st.integers(1, 150), st.integers(1, 280)),
        exponent=st.integers(-126, 120),
        spread=st.integers(0, 20),
        seed=st.integers(0, 2**32 - 1),
        dtype=st.sampled_from(FLOATS),
        stochastic=st.booleans(),
    )
    def test_native_of_any_shape_and_spread_of_magnitudes(self, fmt, shape, exponent, spread, seed, dtype, stochastic):
        rng = np.random.default_rng(seed)
        exponents = exponent + rng.integers(-spread, spread + 1, shape)
        with np.errstate(over="ignore"):
            x = jnp.asarray(np.ldexp(rng.standard_normal(shape), exponents).astype(np.float32)).astype(dtype)
        rounding, key = ROUNDINGS[stochastic]
        both = jlp.quantize_both(x, fmt, rounding=rounding, key=key, implementation="ffi")
        for q, axis in zip(both, (-1, -2), strict=True):
            assert_matches_quantized(q, quantized(x, fmt, axis, None, rounding, key))

    @given(
        fmt=st.sampled_from(NEW),
        bits=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=64),
        dtype=st.sampled_from(["bfloat16", "float16"]),
    )
    def test_arbitrary_bit_patterns(self, fmt, bits, dtype):
        """NaN, infinity, subnormals, zeros of both signs: whatever 16 bits can hold."""
        pattern = np.resize(np.array(bits, np.uint16), (19, 160))
        x = jax.lax.bitcast_convert_type(jnp.asarray(pattern), jnp.dtype(dtype))
        for q, axis in zip(jlp.quantize_both(x, fmt, implementation="ffi"), (-1, -2), strict=True):
            assert_matches_quantized(q, quantized(x, fmt, axis))

    @pytest.mark.parametrize("implementation", ["ffi", "reference"])
    @given(fmt=st.sampled_from(ONE_OF_EACH_RULE), values=st.lists(st.floats(width=32), min_size=1, max_size=48))
    def test_arbitrary_floats(self, implementation, fmt, values):
        x = jnp.asarray(np.resize(np.array(values, np.float32), (19, 160)))
        assert_matches_quantized(jlp.quantize(x, fmt, implementation=implementation), quantized(x, fmt))

    @pytest.mark.parametrize("hadamard", [jlp.Hadamard(), jlp.Hadamard(64, None)], ids=str)
    @pytest.mark.parametrize("fmt", [f for f in ONE_OF_EACH if not isinstance(f, jlp.NVFP4)], ids=format_name)
    def test_rotated(self, isa, fmt, hadamard):
        """Padded to whole transforms first, and rounded to x's dtype in between."""
        x = random_array((40, 150), "bfloat16", seed=1)
        row, column = jlp.quantize(x, fmt, -1, hadamard), jlp.quantize_both(x, fmt, hadamard)[1]
        for q, axis in ((row, -1), (column, -2)):
            assert q.hadamard == hadamard
            assert_matches_quantized(q, quantized(x, fmt, axis, hadamard))


GIVEN = [1e-30, 0.5, 3.0, 300.0, 1e30, 2.0**127, 0.0, 1e-39, np.inf, np.nan]


class TestGivenTensorScales:
    """Float8Tensor with the amax or the scale of another step: delayed scaling."""

    X = random_array((33, 50), "float32", seed=2).at[4:7, 7].set(jnp.asarray([jnp.inf, jnp.nan, -jnp.inf]))

    @pytest.mark.parametrize("name", ["amax", "encode_scale"])
    @pytest.mark.parametrize("fmt", FLOAT8_TENSORS, ids=format_name)
    def test_native_bytes(self, isa, fmt, name):
        """What is larger than the scale foresees saturates; what is not finite stays so."""
        for value, (rounding, key) in itertools.product(GIVEN, ROUNDINGS):
            tensor = jnp.float32(value)
            options = {"rounding": rounding, "key": key, "implementation": "ffi"}
            pair = (tensor, tensor) if name == "amax" else tensor
            both = jlp.quantize_both(self.X, fmt, **{name: pair}, **options)
            alone = [jlp.quantize(self.X, fmt, axis, **{name: tensor}, **options) for axis in (-1, -2)]
            for axis, ways in zip((-1, -2), zip(both, alone, strict=True), strict=True):
                wanted = quantized(self.X, fmt, axis, None, rounding, key, **{name: value})
                for q in ways:
                    assert_matches_quantized(q, wanted, str(value))

    @pytest.mark.parametrize("name", ["amax", "encode_scale"])
    @pytest.mark.parametrize("fmt", [FLOAT8_TENSORS[0], FLOAT8_TENSORS[-2]], ids=format_name)
    def test_reference_bytes(self, fmt, name):
        for value in GIVEN:
            q = jlp.quantize(self.X, fmt, **{name: jnp.float32(value)}, implementation="reference")
            assert_matches_quantized(q, quantized(self.X, fmt, **{name: value}), str(value))

    @pytest.mark.parametrize("fmt", FLOAT8_TENSORS, ids=format_name)
    def test_one_for_each_slice(self, fmt):
        x, scales = random_array((3, 20, 40)), jnp.asarray([0.5, 2.0, 300.0])
        for name in ("amax", "encode_scale"):
            q = jlp.quantize(x, fmt, **{name: scales})
            for i in range(3):
                one = jlp.quantize(x[i], fmt, **{name: scales[i]})
                assert_same_bytes(jax.tree.map(lambda leaf: leaf[i], q), one)

    def test_its_own_amax_is_what_current_scaling_uses(self):
        x = random_array((20, 40), "float32")
        for fmt in FLOAT8_TENSORS:
            assert_same_bytes(jlp.quantize(x, fmt), jlp.quantize(x, fmt, amax=jnp.abs(x).max()))

    @pytest.mark.parametrize("implementation", ["ffi", "reference"])
    def test_an_encode_scale_that_is_not_positive_poisons(self, implementation):
        for value in (0.0, -0.0, -2.0):
            q = jlp.quantize(self.X, jlp.Float8Tensor(), encode_scale=jnp.float32(value), implementation=implementation)
            assert_matches_quantized(q, quantized(self.X, q.format, encode_scale=value))
            assert jnp.isnan(q.dequantize()).all()

    def test_a_nan_that_a_rotation_made_has_no_sign(self, isa):
        x = random_array((16, 3), jnp.bfloat16, seed=5)
        x = x.at[3, 0].set(jnp.inf).at[7, 0].set(-jnp.inf).at[2, 1].set(-jnp.nan).at[5, 1].set(jnp.nan)
        options = {"axis": -2, "hadamard": True, "encode_scale": jnp.float32(2)}
        native, reference = (
            jlp.quantize(x, jlp.Float8Tensor(), **options, implementation=i) for i in ("ffi", "reference")
        )
        assert_same_bytes(native, reference)
        codes = np.asarray(native.data).view(np.uint8)
        assert (codes[1] == 0x7F).all() and set(codes[0] & 0x7F) == {0x7F} and (codes[2] != 0x7F).all()

    def test_an_encode_scale_is_stored_as_its_reciprocal(self):
        q = jlp.quantize(jnp.asarray([[1.0, -3.0, 1000.0]]), jlp.Float8Tensor(), encode_scale=jnp.float32(4))
        assert float(q.scale) == 0.25
        np.testing.assert_array_equal(q.dequantize(), [[1.0, -3.0, 112.0]])  # 448 / 4
