"""The quantised bytes on a GPU are the CPU's: every format, rounding, direction, rotation and dtype, any shape."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from tests.gpu.sides import assert_same_bytes_on
from tests.helpers import FLOATS, FORMATS, NVFP4S, ONE_OF_EACH, format_name, often, quantized_from_bytes, random_array

KEY = np.array([3, 5], np.uint32)
ROUNDINGS = ({}, {"rounding": "stochastic", "key": KEY})
SHAPES = ((1, 16), (17, 33), (130, 258), (2, 3, 20, 40), (512, 1024))
LARGE = ((8192, 8192), (16384, 4096), (8191, 8190))
ROTATIONS = (True, jlp.Hadamard(signs=None))


def every_way(x, fmt, options, hadamard=False):
    """Both directions, each alone and in one pass."""
    alone = [jlp.quantize(x, fmt, axis=axis, hadamard=hadamard, implementation="ffi", **options) for axis in (-1, -2)]
    return alone, jlp.quantize_both(x, fmt, hadamard_columnwise=hadamard, implementation="ffi", **options)


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [(fmt, "bfloat16") for fmt in FORMATS] + list(itertools.product(ONE_OF_EACH, ("float16", "float32"))),
    ids=lambda value: value if isinstance(value, str) else format_name(value),
)
def test_every_format_rounding_and_direction(cpu, gpu, fmt, dtype):
    for shape, options in itertools.product(SHAPES, ROUNDINGS):
        x = random_array(shape, dtype, seed=sum(shape))
        assert_same_bytes_on((cpu, gpu), lambda x, o=options: every_way(x, fmt, o), x)


@pytest.mark.parametrize("rotation", ROTATIONS, ids=("signs", "plain"))
@pytest.mark.parametrize("fmt", (*NVFP4S, jlp.MXFP8(), jlp.Float8Tensor()), ids=format_name)
@pytest.mark.parametrize("dtype", often(FLOATS[:1], FLOATS))
def test_rotated(cpu, gpu, fmt, dtype, rotation):
    for shape, options in itertools.product(SHAPES, ROUNDINGS):
        x = random_array(shape, dtype, seed=sum(shape))
        assert_same_bytes_on((cpu, gpu), lambda x, o=options: every_way(x, fmt, o, rotation), x)


@pytest.mark.parametrize("rule", ("six", "four_over_six", "four_over_six_mse", "search"))
@pytest.mark.parametrize("dtype", FLOATS)
def test_eden(cpu, gpu, rule, dtype):
    fmt, options = jlp.NVFP4(scale_rule=rule), {"rounding": "eden", "key": KEY, "implementation": "ffi"}
    for shape, rotation in itertools.product(SHAPES, (jlp.Hadamard(), jlp.Hadamard(128))):
        x = random_array(shape, dtype, seed=sum(shape))
        both = [functools.partial(jlp.quantize, fmt=fmt, axis=axis, hadamard=rotation, **options) for axis in (-1, -2)]
        assert_same_bytes_on((cpu, gpu), lambda x, both=both: [quantize(x) for quantize in both], x)


@pytest.mark.parametrize("fmt", ONE_OF_EACH, ids=format_name)
@pytest.mark.parametrize("dtype", FLOATS)
def test_any_magnitude(cpu, gpu, fmt, dtype):
    for exponent in (-149, -126, -110, -24, 15, 100, 126):
        x = jnp.ldexp(random_array((48, 160), "float32", seed=1), exponent).astype(dtype)
        assert_same_bytes_on((cpu, gpu), lambda x: every_way(x, fmt, {}), x)


@pytest.mark.parametrize("fmt", ONE_OF_EACH, ids=format_name)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite(cpu, gpu, fmt, bad):
    x = random_array((64, 256), "bfloat16").at[5, 7].set(bad)
    assert_same_bytes_on((cpu, gpu), lambda x: every_way(x, fmt, {}), x)


@pytest.mark.parametrize("fmt", ONE_OF_EACH, ids=format_name)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_bit_pattern_of_16_bits(cpu, gpu, fmt, dtype):
    bits = jnp.arange(1 << 16, dtype=jnp.uint16)
    x = (
        jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16 | bits, jnp.float32)
        if dtype == "float32"
        else jax.lax.bitcast_convert_type(bits, jnp.dtype(dtype))
    )
    x = jnp.where(jnp.isfinite(x), x, 0).reshape(256, 256)
    for options in ROUNDINGS:
        assert_same_bytes_on((cpu, gpu), lambda x, o=options: every_way(x, fmt, o), x)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ONE_OF_EACH, ids=format_name)
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large(cpu, gpu, fmt, shape):
    x = random_array(shape, "bfloat16", seed=1)
    for options, rotation in itertools.product(ROUNDINGS, (False, True) if fmt.scaling == "two_level" else (False,)):

        def both(x, o=options, rotation=rotation):
            return jlp.quantize_both(x, fmt, hadamard_columnwise=rotation, implementation="ffi", **o)

        assert_same_bytes_on((cpu, gpu), both, x)


class TestDequantize:
    @pytest.mark.parametrize("fmt", FORMATS, ids=format_name)
    def test_arbitrary_bytes(self, cpu, gpu, fmt):
        for shape, dtype in itertools.product(SHAPES, FLOATS):
            q = quantized_from_bytes(shape, fmt, seed=sum(shape))
            assert_same_bytes_on((cpu, gpu), lambda q, d=dtype: jlp.dequantize(q, dtype=d, implementation="ffi"), q)

    @pytest.mark.parametrize("fmt", NVFP4S, ids=format_name)
    @pytest.mark.parametrize("axis", [-1, -2])
    def test_rotated(self, cpu, gpu, fmt, axis):
        for shape in SHAPES:
            q = quantized_from_bytes(shape, fmt, axis=axis, hadamard=jlp.Hadamard())
            assert_same_bytes_on((cpu, gpu), lambda q: jlp.dequantize(q, implementation="ffi"), q)


class TestHadamard:
    @pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_every_size_axis_and_direction(self, cpu, gpu, size, dtype):
        signs = np.where(np.random.default_rng(size).integers(0, 2, size), 1, -1)
        for (rows, columns), axis, inverse in itertools.product(((1, 1), (3, 2), (5, 3)), (-1, -2), (False, True)):
            shape = (rows * 7, columns * size) if axis == -1 else (rows * size, columns * 7)
            x = random_array(shape, dtype, seed=size)

            def transform(x, axis=axis, inverse=inverse):
                return jlp.hadamard_transform(
                    x, axis=axis, size=size, signs=tuple(signs), inverse=inverse, implementation="ffi"
                )

            assert_same_bytes_on((cpu, gpu), transform, x)


@pytest.mark.sanitize
@pytest.mark.parametrize("fmt", ONE_OF_EACH, ids=format_name)
def test_every_kernel_once(cpu, gpu, fmt):
    """Small, with edges that are not whole blocks: what compute-sanitizer has time for."""
    x = random_array((67, 150), "bfloat16")
    for options in ROUNDINGS:
        assert_same_bytes_on((cpu, gpu), lambda x, o=options: every_way(x, fmt, o, fmt.scaling == "two_level"), x)
    q = quantized_from_bytes((67, 150), fmt)
    assert_same_bytes_on((cpu, gpu), lambda q: jlp.dequantize(q, implementation="ffi"), q)
    assert_same_bytes_on(
        (cpu, gpu), lambda x: jlp.hadamard_transform(x[:, :128], axis=-1, size=16, implementation="ffi"), x
    )
