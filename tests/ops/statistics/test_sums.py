"""The kernels that count what quantisation did, against the reference."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlowprec.ops.statistics import finish, reference
from jaxlowprec.ops.statistics.op import moments_op, outliers_op, ragged_of, statistics_op, sums_op
from tests.eager import evaluated, jlp
from tests.helpers import often
from tests.telemetry.test_statistics import FORMATS as EVERY_FORMAT

FORMATS = {name: fmt for name, fmt in EVERY_FORMAT.items() if fmt.element != "int4"}  # Int4 has no kernel
FORMATS["float8 block 128x128"] = jlp.Float8Block(block=(128, 128))
SHAPES = [(128, 256), (3, 48, 80), (130, 300), (5, 7), (1, 16), (257, 129)]


def array(shape, dtype, spoilt):
    """Magnitudes of 16 octaves; NaN and infinity if it is spoilt."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(-8, 8, shape))).astype(np.float32)
    if spoilt:
        x.flat[3], x.flat[x.size // 2] = np.nan, np.inf
    return x.astype(jnp.dtype(dtype))


def both(op, *args):
    """The results of a kernel and of the reference."""
    return (np.asarray(run(*args)[0]) for run in (evaluated(op("ffi")), op("reference")))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_moments_and_outliers(shape, spoilt, dtype):
    x = array(shape, dtype, spoilt)
    actual, expected = both(moments_op, x)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    threshold = jnp.asarray(2 * expected[..., 1])
    np.testing.assert_array_equal(*both(outliers_op, x, threshold))


def test_the_root_mean_square_of_huge_numbers_is_finite():
    actual, expected = both(moments_op, jnp.full((256, 512), 3e38, jnp.float32))
    np.testing.assert_allclose(actual, [3e38, 3e38], rtol=1e-5)
    np.testing.assert_allclose(expected, [3e38, 3e38], rtol=1e-5)


SUMMED = [  # each format along each axis in two shapes; tests/cpp has all shapes
    (name, axis, SHAPES[(2 * i + j + k) % len(SHAPES)])
    for (i, name), (j, axis), k in itertools.product(enumerate(FORMATS), enumerate((-1, -2)), (0, 3))
]


@pytest.mark.parametrize(("name", "axis", "shape"), often(SUMMED[::5], SUMMED, 3))
def test_sums_and_vectors(name, axis, shape):
    fmt, x = FORMATS[name], array(shape, "bfloat16" if axis == -1 else "float32", shape[-1] == 300)
    q = jlp.quantize(x, fmt, axis=axis)
    ragged = ragged_of(fmt, x.shape, axis == -2)
    operands = (x, jnp.full(x.shape[:-2], 2.0**-4), q.data, q.scale, *([] if q.amax is None else [q.amax]))
    actual, expected = both(lambda how: sums_op(fmt, axis == -2, ragged, how), *operands)
    counts = [*range(6), reference.SUMS.index("runs"), *range(reference.SCALES_FROM, reference.LENGTH)]
    np.testing.assert_array_equal(actual[..., counts], expected[..., counts])
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-3)
    sums = jnp.asarray(expected).reshape(-1, 1, reference.LENGTH)
    known = [jnp.full(sums.shape[:-1], value) for value in (3.0, 1.0, 0.25)]
    channels = jnp.broadcast_to(jnp.arange(8.0), (*sums.shape[:-1], 2 * finish.CHANNELS))
    vectors = both(lambda how: statistics_op((fmt.scaling,), how), sums, *known, channels)
    np.testing.assert_allclose(*vectors, rtol=1e-6)


def test_vectors_of_several_tensors_under_vmap():
    sums = jnp.abs(jax.random.normal(jax.random.key(0), (3, 2, reference.LENGTH)))
    operands = (sums, *jnp.ones((3, 3, 2)), jnp.zeros((3, 2, 8)))
    run = statistics_op(("e8m0", "two_level"))
    np.testing.assert_allclose(jax.vmap(run)(*operands)[0], run(*operands)[0], rtol=1e-6)
