"""dequantize: any codes and scales, every implementation against an oracle."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.against_oracle import assert_dequantizes, dequantized
from tests.eager import jlp
from tests.helpers import (
    FLOATS,
    FORMATS,
    NVFP4S,
    ONE_OF_EACH,
    assert_same_numbers,
    format_name,
    often,
    quantized_from_bytes,
    random_array,
)
from tests.ops.implementations import ByKernels, ByReference, with_options

pytestmark = pytest.mark.sampled(7)

BY_THE_DEFAULT_RULE = [fmt for fmt in FORMATS if "=" not in format_name(fmt)]
ROTATIONS = (None, jlp.Hadamard(), jlp.Hadamard(signs=None), jlp.Hadamard(64))


def decoded(arrays, dtypes, implementation):
    """Each array to its dtype, in one program."""
    return with_options(_decoded, implementation, dtypes=tuple(dtypes))(arrays)


def _decoded(arrays, *, dtypes, implementation):
    return [jlp.dequantize(q, dtype=d, implementation=implementation) for q, d in zip(arrays, dtypes, strict=True)]


@functools.cache
def any_bytes(shapes, ways, fmt, turn, turns):
    """A part of all shapes in all ways (axis, rotation) and dtypes, and the oracle's numbers: once for all instruction
    sets."""
    cases = list(itertools.product(shapes, ways, FLOATS))
    if turns < 3:  # each shape in each way once, by turns to each dtype
        cases = [cases[3 * i + (i + i // len(ways)) % 3] for i in range(len(cases) // 3)]
    cases = cases[turn::turns]
    arrays = [quantized_from_bytes(s, fmt, seed=sum(s), axis=axis, hadamard=h) for s, (axis, h), _ in cases]
    dtypes = tuple(dtype for *_, dtype in cases)
    return arrays, dtypes, [dequantized(q, jnp.dtype(d)) for q, d in zip(arrays, dtypes, strict=True)]


@functools.cache
def of_scales(fmt, scales):
    """Every code with the scales, and the oracle's numbers in each dtype."""
    values = np.frombuffer(scales, np.uint8 if fmt.scaling == "e8m0" else np.float32)
    q = quantized_from_bytes((256, 256 + 128), fmt, codes=np.arange(256), scales=values)
    return q, [dequantized(q, jnp.dtype(d)) for d in FLOATS]


@functools.cache
def of_amax(amax):
    q = quantized_from_bytes((32, 48), jlp.NVFP4(), seed=4, amax=amax)
    return q, [dequantized(q, jnp.dtype(d)) for d in FLOATS]


class DequantizeCases:
    """What every implementation promises."""

    implementation: str
    SHAPES = ((1, 1), (16, 16), (1, 16), (5, 1), (17, 33), (33, 130), (40, 300), (2, 20, 40), (2, 3, 20, 40))
    WAYS = tuple(itertools.product((-1, -2), ROTATIONS))

    def assert_decodes(self, arrays, dtypes, expected):
        for y, wanted in zip(decoded(arrays, dtypes, self.implementation), expected, strict=True):
            assert_same_numbers(y, wanted)

    @pytest.fixture(params=often(ONE_OF_EACH, BY_THE_DEFAULT_RULE), ids=format_name)
    def fmt(self, request):
        return request.param

    @pytest.fixture(params=often([0], range(13)))
    def turn(self, request):
        """(turn, turns) in which all cases are run; the first has all shapes, ways and dtypes."""
        return request.param, 13

    def test_any_codes_and_scales(self, fmt, turn):
        self.assert_decodes(*any_bytes(self.SHAPES, self.WAYS, fmt, *turn))

    @pytest.mark.parametrize("amax", [0.0, 1e-38, 3e-36, 1e-20, 1e20, 3e38, np.inf, np.nan])
    def test_any_amax(self, amax):
        """Small results are flushed, large ones overflow, in the order of numerics.md 2."""
        q, expected = of_amax(amax)
        self.assert_decodes([q] * 3, FLOATS, expected)

    @given(
        codes=st.binary(min_size=1, max_size=64),
        scales=st.lists(st.integers(0, 0x7F), min_size=1, max_size=16),
        amax=st.floats(0, width=32),
        fmt=st.sampled_from(NVFP4S),
    )
    def test_arbitrary_bytes(self, codes, scales, amax, fmt):
        q = quantized_from_bytes((17, 32), fmt, amax=amax, codes=list(codes), scales=scales)
        assert_dequantizes(q, "float32", self.implementation)

    @pytest.mark.parametrize("fmt", [f for f in ONE_OF_EACH if not isinstance(f, jlp.NVFP4)], ids=format_name)
    def test_every_code_with_scales_of_every_magnitude(self, fmt):
        """NaN and infinite codes and scales too; small results are flushed, large ones overflow."""
        if fmt.scaling == "e8m0":
            scales = [np.arange(256, dtype=np.uint8)]
        else:
            scales = [np.float32([2.0**e]) for e in (-126, -110, -20, 0.5, 20, 110, 127)] + [np.float32([np.nan, 0])]
        for some in scales:
            q, expected = of_scales(fmt, some.tobytes())
            self.assert_decodes([q] * 3, FLOATS, expected)

    def test_what_fits_the_grid_comes_back_exactly(self):
        row = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0])
        x = jnp.asarray(row * 2.0 ** np.arange(-4, 4)[:, None], jnp.float32) * 1.75
        for axis, m in ((-1, x), (-2, x.T)):
            q = jlp.quantize(m, jlp.NVFP4(), axis=axis, implementation=self.implementation)
            np.testing.assert_allclose(jlp.dequantize(q, implementation=self.implementation), m, rtol=2.0**-22)

    def test_a_poisoned_block_decodes_to_nan_and_no_other(self):
        x = random_array((4, 64), "float32").at[2, 20].set(jnp.nan)
        q = jlp.quantize(x, jlp.NVFP4(), amax=jnp.float32(8), implementation=self.implementation)
        for y in decoded([q] * 3, FLOATS, self.implementation):
            nan = np.isnan(np.asarray(y).astype(np.float32))
            assert nan[2, 16:32].all() and nan.sum() == 16


class TestByReference(ByReference, DequantizeCases):
    SHAPES = ((2, 20, 37), (3, 20, 33), (5, 1))
    WAYS = ((-1, None), (-2, jlp.Hadamard()), (-1, jlp.Hadamard(64)), (-1, jlp.Hadamard(signs=None)))

    @pytest.fixture(params=ONE_OF_EACH, ids=format_name)
    def fmt(self, request):
        """Each takes XLA a while to compile."""
        return request.param

    @pytest.fixture(params=often([0], range(2)))
    def turn(self, request):
        return request.param, 2


class TestByKernels(ByKernels, DequantizeCases):
    pass


@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 300)),
    fmt=st.sampled_from(NVFP4S),
    axis=st.sampled_from([-1, -2]),
    seed=st.integers(0, 999),
)
@settings(max_examples=20)  # each is traced
def test_kernels_of_arbitrary_shapes(shape, fmt, axis, seed):
    assert_dequantizes(quantized_from_bytes(shape, fmt, seed, axis=axis), "bfloat16", "ffi")


class TestMeaning:
    def test_a_number_is_code_times_block_scale_times_amax_over_2688(self):
        q = quantized_from_bytes(
            (3, 32), jlp.NVFP4(), amax=2688, codes=[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
        )
        grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        scales = np.repeat(np.asarray(q.scale, np.float64), 16, axis=-1)
        np.testing.assert_array_equal(
            np.asarray(jlp.dequantize(q, dtype=jnp.float32)), np.tile([*grid, *-grid], (3, 2)) * scales
        )

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_the_default_dtype_is_the_quantised_arrays(self, dtype):
        q = jlp.quantize(random_array((16, 32), dtype), jlp.NVFP4())
        assert q.dequantize().dtype == jlp.dequantize(q).dtype == jnp.dtype(dtype)
        assert jlp.dequantize(q, dtype="float32").dtype == jnp.float32

    @pytest.mark.parametrize("size", [16, 64, 256])
    @pytest.mark.parametrize("shape", [(40, 50), (3, 100, 7)], ids=str)
    def test_a_rotation_is_undone(self, shape, size):
        """Padding to whole transforms included: the error stays that of rounding to four bits."""
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)

        @jax.jit
        def there_and_back(x):
            return [
                jlp.quantize(x, jlp.NVFP4(), axis=axis, hadamard=jlp.Hadamard(size)).dequantize() for axis in (-1, -2)
            ]

        for y in there_and_back(x):
            assert y.shape == shape
            assert np.linalg.norm(y - x) < 0.13 * np.linalg.norm(x)

    @pytest.mark.parametrize("axis", [-1, -2])
    def test_a_rotated_poisoned_block_stays_within_its_transform(self, axis):
        x = random_array((64, 64), "float32").at[40, 20].set(jnp.inf)
        q = jlp.quantize(x, jlp.NVFP4(), axis=axis, hadamard=True, amax=jnp.float32(8))
        nan = np.isnan(np.asarray(jlp.dequantize(q)))
        expected = np.zeros((64, 64), bool)
        expected[(40, slice(16, 32)) if axis == -1 else (slice(32, 48), 20)] = True
        np.testing.assert_array_equal(nan, expected)

    @pytest.mark.parametrize("fmt", NVFP4S, ids=format_name)
    def test_vmap_adds_batch_axes(self, fmt):
        q = quantized_from_bytes((3, 20, 40), fmt, seed=5)
        assert_same_numbers(jax.vmap(jlp.dequantize)(q), jlp.dequantize(q))

    def test_its_derivative_is_zero(self):
        """Quantisation is a step function; nothing differentiates through the codes by accident."""
        x = random_array((16, 32), "float32")
        gradient = jax.grad(lambda x: jlp.quantize(x, jlp.NVFP4()).dequantize().sum())(x)
        assert not gradient.any()
