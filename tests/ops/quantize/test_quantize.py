"""quantize and quantize_both: every implementation against an oracle that shares nothing with it, in all formats."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import numpy_oracle
from tests.eager import jlp
from tests.helpers import (
    FLOAT8_TENSORS,
    FLOATS,
    FORMATS,
    NVFP4S,
    ONE_OF_EACH,
    assert_same_bytes,
    assert_same_numbers,
    format_name,
    often,
    random_array,
)
from tests.ops.implementations import ByKernels, ByReference, compiled, with_options
from tests.ops.quantize.every_way import (
    KEY,
    ROUNDINGS,
    assert_all_match,
    assert_gives_the_oracles,
    by_implementation,
    by_oracle,
    ways,
)

pytestmark = pytest.mark.sampled(7)

NVFP4_SHAPES = [
    *((16, 16), (1, 16), (16, 1), (3, 5), (17, 33), (64, 128), (128, 256), (40, 300), (130, 258), (1, 1000), (1000, 1)),
    *((2, 3, 20, 40), (5, 16, 32)),
]
SHAPES = [(1, 1), (31, 33), (129, 40), (66, 130), (3, 300), (2, 3, 33, 40)]  # about blocks, vectors, 16
ONE_OF_EACH_RULE = (
    *NVFP4S,
    jlp.MXFP8("e4m3", (1, 32), "up"),
    jlp.MXFP8("e5m2", (1, 32), "floor"),
    jlp.MXFP4((1, 32), "even"),
    jlp.Float8Block("e4m3", (128, 128), power_of_two=True),
    jlp.Float8Block("e5m2", power_of_two=False),
    jlp.Float8Tensor(),
)
BOTH_ROTATED = ways(axes=(None,), rotations=(jlp.Hadamard(),))
GIVEN = [1e-30, 0.5, 3.0, 300.0, 1e30, 2.0**127, 0.0, 1e-39, np.inf, np.nan]  # amaxes and encode scales


def ldexp(x, exponents, dtype):
    with np.errstate(over="ignore"):
        return np.ldexp(np.asarray(x), exponents).astype(np.float32).astype(jnp.dtype(dtype))


@functools.cache
def arrays_and_oracle(shapes, dtypes, fmt, ways):
    """Once for both implementations."""
    arrays = [random_array(s, d, seed=sum(s)) for s, d in zip(shapes, itertools.cycle(dtypes), strict=False)]
    return arrays, by_oracle(arrays, fmt, ways)


def to_float32(arrays, implementation):
    return [jlp.dequantize(q, dtype=jnp.float32, implementation=implementation) for q in arrays]


@functools.cache
def magnitude(exponent, dtype):
    x = ldexp(random_array((48, 80), "float32", seed=1), exponent, dtype)
    return x, by_oracle([x], jlp.NVFP4(), BOTH_ROTATED)


@functools.cache
def given_tensor_scale(fmt, name, value, ways):
    return by_oracle([TestTensorScales.X], fmt, ways, **{name: value})


class QuantizeCases:
    """What every implementation promises."""

    implementation: str
    DTYPES = ("bfloat16", "float32")
    PATTERNS = st.sampled_from(NVFP4S) | st.sampled_from(FORMATS), st.sampled_from([(1, 128), (19, 160)])

    def shapes_and_ways(self, fmt, turn):
        """All of them. A turn moves the dtypes on by one shape."""
        if isinstance(fmt, jlp.NVFP4):
            return NVFP4_SHAPES, ways(rotations=(None, jlp.Hadamard()))
        return SHAPES, ways()

    @pytest.mark.parametrize("turn", often([0], range(3)))
    @pytest.mark.parametrize("fmt", often(ONE_OF_EACH, FORMATS), ids=format_name)
    def test_all_directions_rotations_and_roundings(self, fmt, turn):
        shapes, ways = self.shapes_and_ways(fmt, turn)
        arrays, expected = arrays_and_oracle(tuple(shapes), FLOATS[turn:] + FLOATS[:turn], fmt, ways)
        assert_all_match(by_implementation(arrays, fmt, ways, self.implementation), expected)

    @pytest.mark.parametrize("exponent", [-126, -110, -100, -60, 0, 60, 100, 120, 126])
    def test_any_magnitude(self, exponent):
        for dtype in self.DTYPES:
            x, expected = magnitude(exponent, dtype)
            found = by_implementation([x], jlp.NVFP4(), BOTH_ROTATED, self.implementation)
            assert_all_match(found, expected)
            decoded = with_options(to_float32, self.implementation)(found[::2])
            for y, wanted in zip(decoded, expected[::2], strict=True):
                assert_same_numbers(y, numpy_oracle.decode(*wanted, jlp.NVFP4()))

    @pytest.mark.parametrize("amax", [0.5, 1e-20, 1e30, 0.0, np.inf, np.nan, -0.5, -1e-40, -np.inf])
    def test_a_given_amax(self, amax):
        x, nearest = random_array((33, 50), "bfloat16"), ways(["nearest"], (-1, -2))
        for fmt in NVFP4S:
            found = by_implementation([x], fmt, nearest, self.implementation, {"amax": jnp.float32(amax)})
            assert_all_match(found, by_oracle([x], fmt, nearest, amax=amax))

    @given(bits=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=64), data=st.data())
    def test_arbitrary_bit_patterns(self, bits, data):
        """NaN, infinity, subnormals, zeros of both signs: whatever 16 bits can hold."""
        fmt, shape = map(data.draw, self.PATTERNS)
        dtype = data.draw(st.sampled_from(["bfloat16", "float16"]))
        x = np.resize(np.array(bits, np.uint16), shape).view(jnp.dtype(dtype))
        hadamard = jlp.Hadamard() if isinstance(fmt, jlp.NVFP4) else None
        assert_gives_the_oracles(self.implementation, [x], fmt, (("nearest", None, hadamard),))

    @given(fmt=st.sampled_from(ONE_OF_EACH_RULE), values=st.lists(st.floats(width=32), min_size=1, max_size=48))
    def test_arbitrary_floats(self, fmt, values):
        x = np.resize(np.array(values, np.float32), (19, 160))
        assert_gives_the_oracles(self.implementation, [x], fmt, ways(["nearest"], (-1,)))

    @pytest.fixture(params=[32, 64, 128, 256])
    def size(self, request):
        """Of a rotation."""
        return request.param

    def test_larger_rotations(self, size):
        x, h = random_array((size + 5, 2 * size), "float32"), jlp.Hadamard(size)
        found = by_implementation([x], jlp.NVFP4(), ways(["nearest"], (-1, -2), (h,)), self.implementation)
        assert_all_match(found, by_oracle([x], jlp.NVFP4(), ways(["nearest"], (-1, -2), (h,))))
        assert {q.hadamard for q in found} == {h}

    def test_what_is_not_finite_never_comes_out_finite(self):
        @self.compiled
        def both_and_with_an_amax(x):
            both = jlp.quantize_both(x, jlp.NVFP4(), hadamard_columnwise=True, implementation=self.implementation)
            q = jlp.quantize(x, jlp.NVFP4(), amax=jnp.float32(4), implementation=self.implementation)
            return both, *(jlp.dequantize(one, implementation=self.implementation) for one in (*both, q))

        x = np.array(random_array((32, 48), "float32"))
        for bad in (np.nan, np.inf, -np.inf):
            x[3, 5] = bad
            both, *decoded, poisoned = both_and_with_an_amax(x)
            for q, y in zip(both, decoded, strict=True):
                assert not np.isfinite(float(q.amax)) and not q.data.any()
                assert np.isnan(np.asarray(y)).all()
            assert np.isnan(np.asarray(poisoned)[3, :16]).all()  # its block, and no other
            assert np.isfinite(np.asarray(poisoned)).sum() == 32 * 48 - 16

    @pytest.mark.parametrize("fmt", [jlp.NVFP4(), jlp.NVFP4((16, 16)), jlp.Float8Tensor()], ids=str)
    def test_a_negative_amax_poisons_its_slice_and_no_other(self, fmt):
        x, amax = random_array((3, 32, 48), "float32"), np.array([3, -3, -1e-40], np.float32)

        @self.compiled
        def there_and_back(x, amax):
            both = jlp.quantize_both(x, fmt, amax=(amax, amax), implementation=self.implementation)
            return [jlp.dequantize(q, implementation=self.implementation) for q in both]

        for values in map(np.asarray, there_and_back(x, amax)):
            assert np.isnan(values[1]).all() and np.isfinite(values[0]).all() and np.isfinite(values[2]).all()

    @pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0, 0), (3, 0, 16), (0, 16, 16), (0,)], ids=str)
    def test_empty_arrays(self, shape):
        x = jnp.zeros(shape, jnp.bfloat16)
        q = jlp.quantize(x, jlp.NVFP4(), implementation=self.implementation)
        assert q.shape == shape and jlp.dequantize(q).shape == shape
        if len(shape) > 1:
            for q in jlp.quantize_both(x, jlp.NVFP4(), hadamard_columnwise=True, implementation=self.implementation):
                assert q.shape == shape and jlp.dequantize(q).shape == shape

    def test_slices_at_their_offset_have_the_bytes_of_the_whole(self):
        @self.compiled
        def wholes_and_parts(x):
            options = {"rounding": "stochastic", "key": KEY, "amax": jnp.float32(40)}
            quantize = functools.partial(jlp.quantize, fmt=jlp.NVFP4(), implementation=self.implementation, **options)
            row, column = quantize(x), quantize(x, axis=-2)
            lower, right = quantize(x[33:60], offset=(33, 0)), quantize(x[:, 32:], offset=(0, 32))
            corner = quantize(x[48:, 7:], axis=-2, offset=(48, 7))
            return [
                (row.data[33:60], lower.data),
                (row.data[:, 16:], right.data),
                (column.data[7:, 24:], corner.data),
            ]

        for whole, part in wholes_and_parts(random_array((96, 80))):
            np.testing.assert_array_equal(np.asarray(whole), np.asarray(part))


class TestByReference(ByReference, QuantizeCases):
    """Each way of each shape takes XLA up to half a second to compile."""

    DTYPES = ("float32",)
    PATTERNS = st.sampled_from(NVFP4S), st.just((19, 37))

    def shapes_and_ways(self, fmt, turn):
        """Columnwise is rowwise of the transposed array. Random bits once for each element and scaling."""
        rotations = (jlp.Hadamard(),) if isinstance(fmt, jlp.NVFP4) else (None,)
        if turn:
            shapes = [[(64, 48)], [(2, 20, 33)]][turn - 1]
            if fmt not in ONE_OF_EACH:  # another rule for scales, which does not know of axes
                return shapes, ways(["nearest"], (-1,))
            return shapes, ways(rotations=(None, *rotations) if isinstance(fmt, jlp.NVFP4) else (None,))
        if isinstance(fmt, jlp.NVFP4):
            return [(37, 53)], (*BOTH_ROTATED, ("nearest", -1, *rotations), ("nearest", -2, None))
        return [(2, 33, 130)], ways(list(ROUNDINGS)[: 1 + (fmt in ONE_OF_EACH)], (-1,))

    @pytest.fixture(params=often([64], [32, 64, 128, 256]))
    def size(self, request):
        """As above."""
        return request.param

    def test_both_directions_draw_their_own_bits(self):
        x = random_array((40, 50), seed=2)
        assert_gives_the_oracles("reference", [x], jlp.MXFP8("e5m2"), ways(["stochastic"], (None,)))


class TestByKernels(ByKernels, QuantizeCases):
    @pytest.mark.parametrize("hadamard", [jlp.Hadamard(), jlp.Hadamard(64, None)], ids=str)
    @pytest.mark.parametrize("fmt", [f for f in ONE_OF_EACH if not isinstance(f, jlp.NVFP4)], ids=format_name)
    def test_rotated(self, fmt, hadamard):
        """Padded to whole transforms first, and rounded to x's dtype in between."""
        x, rotated = random_array((40, 150), "bfloat16", seed=1), ways(["nearest"], (-1, None), (hadamard,))
        found = by_implementation([x], fmt, rotated, self.implementation)
        assert_all_match(found, by_oracle([x], fmt, rotated))
        assert [q.hadamard for q in found] == [hadamard, None, hadamard]


@given(
    fmt=st.sampled_from(NVFP4S) | st.sampled_from(FORMATS),
    shape=st.tuples(st.integers(1, 150), st.integers(1, 300)),
    exponent=st.integers(-126, 120),
    spread=st.integers(0, 20),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(FLOATS),
    rounding=st.sampled_from(ROUNDINGS),
)
def test_kernels_of_any_shape_and_spread_of_magnitudes(fmt, shape, exponent, spread, seed, dtype, rounding):
    rng = np.random.default_rng(seed)
    exponents = exponent + rng.integers(-spread, spread + 1, shape)
    x = ldexp(rng.standard_normal(shape), exponents, dtype)
    hadamard = jlp.Hadamard() if isinstance(fmt, jlp.NVFP4) else None
    assert_gives_the_oracles("ffi", [x], fmt, ((rounding, None, hadamard),))


@pytest.mark.slow
@pytest.mark.parametrize(
    "hadamard", [None, jlp.Hadamard(), jlp.Hadamard(signs=None)], ids=["unrotated", "rht", "plain-h"]
)
@pytest.mark.parametrize(
    "shape", [(256, 1024), (1024, 256), (256, 272), (304, 304), (320, 256), (8192, 2560), (10240, 2560)], ids=str
)
def test_the_larger_shapes_of_the_exact_quantisation_matrix(shape, hadamard):
    """With the 16 shapes of tests/golden these make the 23 of the matrix, shapes x rotation x signs."""
    x = random_array(shape, "bfloat16", seed=shape[0])
    native, reference = (
        jlp.quantize_both(x, jlp.NVFP4(), hadamard_columnwise=hadamard or False, implementation=i)
        for i in ("ffi", "reference")
    )
    assert_same_bytes(native, reference)


class TensorScaleCases:
    """Float8Tensor with the amax or the scale of another step: delayed scaling."""

    implementation: str
    WAYS = ways()

    @pytest.mark.parametrize("name", ["amax", "encode_scale"])
    def test_bytes(self, fmt, name):
        """What is larger than the scale foresees saturates; what is not finite stays so."""
        for value in GIVEN:
            found = by_implementation(
                [TestTensorScales.X], fmt, self.WAYS, self.implementation, {name: jnp.float32(value)}
            )
            assert_all_match(found, given_tensor_scale(fmt, name, value, self.WAYS), str(value))

    def test_an_encode_scale_that_is_not_positive_poisons(self):
        x = TestTensorScales.X
        for value in (0.0, -0.0, -2.0):
            nearest = ways(["nearest"], (-1,))
            (q,) = by_implementation(
                [x], jlp.Float8Tensor(), nearest, self.implementation, {"encode_scale": jnp.float32(value)}
            )
            assert_all_match([q], by_oracle([x], q.format, nearest, encode_scale=value))
            assert np.isnan(np.asarray(jlp.dequantize(q))).all()


class TestTensorScalesByReference(ByReference, TensorScaleCases):
    WAYS = ways(["nearest"], (-1,))

    @pytest.fixture(params=[FLOAT8_TENSORS[0], FLOAT8_TENSORS[-2]], ids=format_name)
    def fmt(self, request):
        return request.param


class TestTensorScalesByKernels(ByKernels, TensorScaleCases):
    @pytest.fixture(params=FLOAT8_TENSORS, ids=format_name)
    def fmt(self, request):
        return request.param


class TestTensorScales:
    X = np.array(random_array((33, 50), "float32", seed=2))
    X[4:7, 7] = [np.inf, np.nan, -np.inf]

    @pytest.mark.parametrize("fmt", FLOAT8_TENSORS, ids=format_name)
    def test_one_for_each_slice(self, fmt):
        x, scales = np.asarray(random_array((3, 20, 40))), np.array([0.5, 2.0, 300.0], np.float32)
        for name in ("amax", "encode_scale"):
            quantize = compiled("ffi")(lambda x, scale, name=name: jlp.quantize(x, fmt, **{name: scale}))
            q = quantize(x, scales)
            for i in range(3):
                assert_same_bytes(jax.tree.map(lambda leaf: leaf[i], q), quantize(x[i], scales[i]))

    def test_its_own_amax_is_what_current_scaling_uses(self):
        x = random_array((20, 40), "float32")
        for fmt in FLOAT8_TENSORS:
            assert_same_bytes(jlp.quantize(x, fmt), jlp.quantize(x, fmt, amax=jnp.abs(x).max()))

    def test_a_nan_that_a_rotation_made_has_no_sign(self, isa):
        x = np.array(random_array((16, 3), "bfloat16", seed=5))
        x[3, 0], x[7, 0], x[2, 1], x[5, 1] = np.inf, -np.inf, -np.nan, np.nan
        options = {"axis": -2, "hadamard": True, "encode_scale": jnp.float32(2)}
        native, reference = (
            jlp.quantize(jnp.asarray(x), jlp.Float8Tensor(), **options, implementation=i) for i in ("ffi", "reference")
        )
        assert_same_bytes(native, reference)
        codes = np.asarray(native.data).view(np.uint8)
        assert (codes[1] == 0x7F).all() and set(codes[0] & 0x7F) == {0x7F} and (codes[2] != 0x7F).all()

    def test_an_encode_scale_is_stored_as_its_reciprocal(self):
        q = jlp.quantize(jnp.asarray([[1.0, -3.0, 1000.0]]), jlp.Float8Tensor(), encode_scale=jnp.float32(4))
        assert float(q.scale) == 0.25
        np.testing.assert_array_equal(jlp.dequantize(q), [[1.0, -3.0, 112.0]])  # 448 / 4
