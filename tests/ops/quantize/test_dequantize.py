"""dequantize: any codes and scales, native and reference against an oracle."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxlowprec as jlp
from tests.against_oracle import assert_dequantizes, dequantized
from tests.helpers import (
    FLOATS,
    FORMATS,
    ONE_OF_EACH,
    assert_same_numbers,
    format_name,
    quantized_from_bytes,
    random_array,
)

BLOCKS = [(1, 16), (16, 16)]
NEW = [fmt for fmt in FORMATS if not isinstance(fmt, jlp.NVFP4) and "=" not in format_name(fmt)]  # by the default rule
ONE_OF_EACH_NEW = [fmt for fmt in ONE_OF_EACH if not isinstance(fmt, jlp.NVFP4)]
ROTATIONS = [None, jlp.Hadamard(), jlp.Hadamard(signs=None), jlp.Hadamard(64)]


class TestBytes:
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("block", BLOCKS, ids=str)
    @pytest.mark.parametrize("shape", [(16, 16), (1, 16), (5, 1), (17, 33), (40, 300), (2, 3, 20, 40)], ids=str)
    def test_native_decodes_any_codes_and_scales(self, isa, shape, block, dtype):
        for axis, hadamard in itertools.product((-1, -2), ROTATIONS):
            q = quantized_from_bytes(shape, jlp.NVFP4(block), seed=sum(shape), axis=axis, hadamard=hadamard)
            assert_dequantizes(q, dtype, "ffi")

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("block", BLOCKS, ids=str)
    def test_reference_decodes_any_codes_and_scales(self, block, dtype):
        for axis, hadamard in ((-1, None), (-2, jlp.Hadamard()), (-1, jlp.Hadamard(64))):
            q = quantized_from_bytes((2, 20, 37), jlp.NVFP4(block), seed=3, axis=axis, hadamard=hadamard)
            assert_dequantizes(q, dtype, "reference")

    @pytest.mark.parametrize("amax", [0.0, 1e-38, 3e-36, 1e-20, 1e20, 3e38, np.inf, np.nan])
    def test_any_amax(self, isa, amax):
        """Small results are flushed, large ones overflow, in the order of numerics.md 2."""
        q = quantized_from_bytes((32, 48), jlp.NVFP4(), seed=4, amax=amax)
        assert_dequantizes(q, "float32", "ffi", "reference")
        assert_dequantizes(q, "bfloat16", "ffi", "reference")
        assert_dequantizes(q, "float16", "ffi", "reference")

    @given(
        codes=st.binary(min_size=1, max_size=64),
        scales=st.lists(st.integers(0, 0x7F), min_size=1, max_size=16),
        amax=st.floats(0, width=32),
        block=st.sampled_from(BLOCKS),
    )
    def test_arbitrary_bytes(self, codes, scales, amax, block):
        fmt = jlp.NVFP4(block)
        q = quantized_from_bytes((17, 32), fmt, amax=amax, codes=list(codes), scales=scales)
        assert_dequantizes(q, "float32", "ffi", "reference")

    @given(
        shape=st.tuples(st.integers(1, 70), st.integers(1, 300)),
        block=st.sampled_from(BLOCKS),
        axis=st.sampled_from([-1, -2]),
        seed=st.integers(0, 999),
    )
    @settings(max_examples=20)  # each compiles
    def test_arbitrary_shapes(self, shape, block, axis, seed):
        assert_dequantizes(quantized_from_bytes(shape, jlp.NVFP4(block), seed, axis=axis), "bfloat16", "ffi")


@jax.jit
def decode_all(arrays):
    """In one compilation, dtypes in turn."""
    return [jlp.dequantize(q, FLOATS[i % 4 % 3], implementation="ffi") for i, q in enumerate(arrays)]


class TestFormats:
    """The same of every other format."""

    @staticmethod
    @functools.cache
    def cases(fmt):
        kinds = itertools.product(
            ((1, 1), (33, 130), (2, 20, 40)), ((-1, None), (-1, jlp.Hadamard(64)), (-2, jlp.Hadamard()))
        )
        arrays = [quantized_from_bytes(s, fmt, seed=sum(s), axis=axis, hadamard=h) for s, (axis, h) in kinds]
        return arrays, [dequantized(q, jnp.dtype(FLOATS[i % 4 % 3])) for i, q in enumerate(arrays)]

    @pytest.mark.parametrize("fmt", NEW, ids=format_name)
    def test_native_decodes_any_codes_and_scales(self, isa, fmt):
        arrays, expected = self.cases(fmt)
        for y, wanted in zip(decode_all(arrays), expected, strict=True):
            assert_same_numbers(y, wanted)

    @pytest.mark.parametrize("fmt", ONE_OF_EACH_NEW, ids=format_name)
    def test_reference_decodes_any_codes_and_scales(self, fmt):
        for axis, hadamard in ((-1, None), (-2, jlp.Hadamard())):
            q = quantized_from_bytes((2, 20, 37), fmt, seed=3, axis=axis, hadamard=hadamard)
            assert_dequantizes(q, "bfloat16", "reference")

    @pytest.mark.parametrize("fmt", ONE_OF_EACH_NEW, ids=format_name)
    def test_every_code_with_scales_of_every_magnitude(self, isa, fmt):
        """NaN and infinite codes and scales too; small results are flushed, large ones overflow."""
        if fmt.scaling == "e8m0":
            scales = [np.arange(256)]
        else:
            scales = [np.float32([2.0**e]) for e in (-126, -110, -20, 0.5, 20, 110, 127)] + [np.float32([np.nan, 0])]
        for some in scales:
            q = quantized_from_bytes((256, 256 + 128), fmt, codes=np.arange(256), scales=some)
            for dtype in FLOATS:
                assert_dequantizes(q, dtype, "ffi", "reference")


class TestMeaning:
    def test_a_number_is_code_times_block_scale_times_amax_over_2688(self):
        q = quantized_from_bytes(
            (3, 32), jlp.NVFP4(), amax=2688, codes=[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
        )
        grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        scales = np.repeat(np.asarray(q.scale, np.float64), 16, axis=-1)
        np.testing.assert_array_equal(np.asarray(q.dequantize(jnp.float32)), np.tile([*grid, *-grid], (3, 2)) * scales)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_the_default_dtype_is_the_quantised_arrays(self, dtype):
        q = jlp.quantize(random_array((16, 32), dtype), jlp.NVFP4())
        assert q.dequantize().dtype == jlp.dequantize(q).dtype == jnp.dtype(dtype)
        assert q.dequantize("float32").dtype == jnp.float32

    @pytest.mark.parametrize("implementation", ["ffi", "reference"])
    def test_what_fits_the_grid_comes_back_exactly(self, implementation):
        row = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0])
        x = jnp.asarray(row * 2.0 ** np.arange(-4, 4)[:, None], jnp.float32) * 1.75
        for axis, m in ((-1, x), (-2, x.T)):
            q = jlp.quantize(m, jlp.NVFP4(), axis, implementation=implementation)
            np.testing.assert_allclose(jlp.dequantize(q, implementation=implementation), m, rtol=2.0**-22)

    @pytest.mark.parametrize("size", [16, 64, 256])
    @pytest.mark.parametrize("shape", [(40, 50), (3, 100, 7)], ids=str)
    def test_a_rotation_is_undone(self, shape, size):
        """Padding to whole transforms included: the error stays that of rounding to four bits."""
        x = jax.random.normal(jax.random.key(0), shape)
        for axis in (-1, -2):
            y = jlp.quantize(x, jlp.NVFP4(), axis, jlp.Hadamard(size)).dequantize()
            assert y.shape == shape
            assert np.linalg.norm(y - x) < 0.13 * np.linalg.norm(x)

    @pytest.mark.parametrize("implementation", ["ffi", "reference"])
    def test_a_poisoned_block_decodes_to_nan_and_no_other(self, implementation):
        x = random_array((4, 64), "float32").at[2, 20].set(jnp.nan)
        q = jlp.quantize(x, jlp.NVFP4(), amax=jnp.float32(8), implementation=implementation)
        for dtype in FLOATS:
            nan = np.isnan(np.asarray(jlp.dequantize(q, dtype, implementation=implementation)).astype(np.float32))
            assert nan[2, 16:32].all() and nan.sum() == 16

    @pytest.mark.parametrize("axis", [-1, -2])
    def test_a_rotated_poisoned_block_stays_within_its_transform(self, axis):
        x = random_array((64, 64), "float32").at[40, 20].set(jnp.inf)
        q = jlp.quantize(x, jlp.NVFP4(), axis, True, amax=jnp.float32(8))
        nan = np.isnan(np.asarray(q.dequantize()))
        expected = np.zeros((64, 64), bool)
        expected[(40, slice(16, 32)) if axis == -1 else (slice(32, 48), 20)] = True
        np.testing.assert_array_equal(nan, expected)

    @pytest.mark.parametrize("block", BLOCKS, ids=str)
    def test_vmap_adds_batch_axes(self, block):
        q = quantized_from_bytes((3, 20, 40), jlp.NVFP4(block), seed=5)
        assert_same_numbers(jax.vmap(jlp.dequantize)(q), q.dequantize())

    def test_its_derivative_is_zero(self):
        """Quantisation is a step function; nothing differentiates through the codes by accident."""
        x = random_array((16, 32), "float32")
        gradient = jax.grad(lambda x: jlp.quantize(x, jlp.NVFP4()).dequantize().sum())(x)
        assert not gradient.any()
