"""Arrays that NVFP4's rules for scales have to stand: any floats, ties, outliers, magnitudes near float32's limits."""

import functools

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from tests.numpy_oracle.codes import encode_e2m1
from tests.numpy_oracle.scale_rules import best_scale

GRID = [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # of E2M1
GIVEN_AMAXES = (0.5, 1e-20, 1e30, 2.0**127, 0.0, 1e-39, np.inf, np.nan, -0.5)


def spread(shape, exponent, spread_, dtype, seed=0):
    """Normal numbers times powers of two from 2^(exponent - spread_) to 2^(exponent + spread_)."""
    rng = np.random.default_rng(seed)
    exponents = exponent + rng.integers(-spread_, spread_ + 1, shape)
    with np.errstate(over="ignore"):
        return np.ldexp(rng.standard_normal(shape), exponents).astype(np.float32).astype(jnp.dtype(dtype))


@st.composite
def any_floats(draw):
    """NaN, infinity, subnormals, zeros of both signs, in blocks of their own and beside others.

    76 blocks have up to 48 values at every place in a block that they come to.
    """
    floats = st.floats(width=32) | st.sampled_from([*GRID, 1e-40, -0.0])
    values = draw(st.lists(floats, min_size=1, max_size=48))
    return np.resize(np.array(values, np.float32), (19, 64))


@st.composite
def ties_and_outliers(draw):
    """Multiples of an eighth tie between codes and between scales; one element a block may be 2^outlier larger."""
    numerators = draw(st.lists(st.integers(-48, 48), min_size=1, max_size=40))
    outlier, seed = draw(st.integers(0, 12)), draw(st.integers(0, 2**16))
    x = np.resize(np.array(numerators, np.float32), (19, 64)) / 8
    blocks = x.reshape(19, 4, 16)
    at = np.random.default_rng(seed).integers(0, 16, (19, 4))
    np.put_along_axis(blocks, at[..., None], np.take_along_axis(blocks, at[..., None], 2) * 2.0**outlier, 2)
    return x


@functools.cache
def beside_ties(rule, height, exponent=0):
    """Blocks in pairs on both sides of where a rule takes another scale, as near each other as bisection gets.

    Returns:
        float32 [512, 16], and the amax to quantise with. Rows r and r + 256 are a pair, or parts of a pair of tiles.
    """
    rng, count, g = np.random.default_rng(5), 256 // height, np.float32(4 * 2.0**exponent)

    def scales(blocks):
        a = np.abs(blocks).max(axis=(1, 3))
        return best_scale(blocks, a, g, rule, encode_e2m1)[0][:, 0]

    def between(t):
        mixed = ((1 - t) * a.astype(np.float64) + t * b.astype(np.float64)).astype(np.float32)
        return mixed, scales(mixed)

    blocks = rng.uniform(-3, 3, (64 * count, height, 1, 16)) * rng.uniform(0, 1, (64 * count, 1, 1, 1))
    blocks[:, 0, 0, 0] = 3.6  # of all the largest: the scales to try are the same
    blocks = (blocks * 2.0**exponent).astype(np.float32)
    found = scales(blocks)
    least, most = np.flatnonzero(found == found.min()), np.flatnonzero(found == found.max())
    a, b = (blocks[rng.choice(these, count)] for these in (least, most))
    low, high = np.zeros((count, 1, 1, 1)), np.ones((count, 1, 1, 1))
    for _ in range(52):
        middle = (low + high) / 2
        is_low = (between(middle)[1] == found.min()).reshape(low.shape)
        low, high = np.where(is_low, middle, low), np.where(is_low, high, middle)
    (lower, its), (upper, others) = between(low), between(high)
    assert (its != others).all() and np.abs(upper - lower).max() <= 2.0 ** (exponent - 22)
    return np.concatenate([lower, upper]).reshape(512, 16), g
