"""What quantisation did to an array, as a GPU counts it: the CPU's counts exactly, the CPU's sums to rounding."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec.ops.statistics import finish, reference
from jaxlowprec.ops.statistics.op import moments_op, outliers_op, ragged_of, statistics_op, sums_op
from tests.gpu.sides import run_on
from tests.helpers import COUNTED, FLOATS, FORMATS, format_name, random_array

SHAPES = ((1, 16), (17, 33), (130, 258), (2, 3, 20, 40), (512, 1024))
COUNTS = [*range(6), reference.SUMS.index("runs"), *range(reference.SCALES_FROM, reference.LENGTH)]


def spoilt(shape, dtype):
    """With NaN, infinity and subnormal numbers where there is room."""
    x = random_array(shape, "float32", seed=sum(shape)).reshape(-1)
    if x.size > 100:
        x = x.at[3].set(jnp.nan).at[50].set(-jnp.inf).at[70:90].set(1e-39)
    return x.reshape(shape).astype(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", (*SHAPES, (4096, 4096)), ids=str)
def test_moments_and_outliers(cpu, gpu, shape, dtype):
    x, threshold = spoilt(shape, dtype), jnp.full(shape[:-2], 2.0)
    on_cpu, on_gpu = (run_on(device, lambda x: moments_op("ffi")(x)[0], x) for device in (cpu, gpu))
    np.testing.assert_array_equal(on_gpu[..., 0], on_cpu[..., 0])
    np.testing.assert_allclose(on_gpu[..., 1], on_cpu[..., 1], rtol=1e-5)
    counts = [run_on(device, lambda x, t: outliers_op("ffi")(x, t)[0], x, threshold) for device in (cpu, gpu)]
    np.testing.assert_array_equal(*counts)


def sums_on(device, fmt, axis, x):
    op = sums_op(fmt, axis == -2, ragged_of(fmt, x.shape, axis == -2), "ffi")

    def run(x):
        q = jlp.quantize(x, fmt, axis=axis)
        return op(x, jnp.full(x.shape[:-2], 0.25), q.data, q.scale, *([] if q.amax is None else [q.amax]))[0]

    return run_on(device, run, x)


def assert_same_sums(devices, fmt, axis, x):
    first, second = (sums_on(device, fmt, axis, x) for device in devices)
    np.testing.assert_array_equal(second[..., COUNTS], first[..., COUNTS])
    np.testing.assert_allclose(second, first, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("fmt", FORMATS, ids=format_name)
@pytest.mark.parametrize("axis", [-1, -2])
def test_sums(cpu, gpu, fmt, axis):
    for shape, dtype in itertools.product(SHAPES, FLOATS):
        assert_same_sums((cpu, gpu), fmt, axis, spoilt(shape, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("fmt", COUNTED, ids=format_name)
@pytest.mark.parametrize("axis", [-1, -2])
def test_sums_of_a_large_array(cpu, gpu, fmt, axis):
    assert_same_sums((cpu, gpu), fmt, axis, random_array((8191, 8200), "bfloat16", seed=1))


def test_sums_are_the_same_bytes_every_time(gpu):
    x = random_array((2048, 4096), "bfloat16", seed=2)
    first = sums_on(gpu, jlp.NVFP4(), -1, x)
    for _ in range(5):
        np.testing.assert_array_equal(sums_on(gpu, jlp.NVFP4(), -1, x), first)


def test_vectors(cpu, gpu):
    sums = jnp.floor(jnp.abs(1000 * jax.random.normal(jax.random.key(0), (3, 2, reference.LENGTH))))
    operands = (sums, *jnp.ones((3, 3, 2)), jnp.zeros((3, 2, 2 * finish.CHANNELS)))
    run = statistics_op(("e8m0", "two_level"), "ffi")
    found = [run_on(device, lambda *args: run(*args)[0], *operands) for device in (cpu, gpu)]
    np.testing.assert_allclose(*found, rtol=1e-6)


@pytest.mark.sanitize
@pytest.mark.parametrize("fmt", COUNTED, ids=format_name)
def test_every_kernel_once(cpu, gpu, fmt):
    """Small, with edges that are not whole blocks: what compute-sanitizer has time for."""
    x = spoilt((67, 150), "bfloat16")
    for axis in (-1, -2):
        assert_same_sums((cpu, gpu), fmt, axis, x)
    run_on(gpu, lambda x: (moments_op("ffi")(x), outliers_op("ffi")(x, jnp.float32(1))), x)
