"""Arrays that NVFP4's rules for scales have to stand: any floats, ties, outliers, magnitudes near float32's limits."""

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

GRID = [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # of E2M1
GIVEN_AMAXES = (0.5, 1e-20, 1e30, 2.0**127, 0.0, 1e-39, np.inf, np.nan, -0.5)


def spread(shape, exponent, spread_, dtype, seed=0):
    """Normal numbers times powers of two from 2^(exponent - spread_) to 2^(exponent + spread_)."""
    rng = np.random.default_rng(seed)
    exponents = exponent + rng.integers(-spread_, spread_ + 1, shape)
    with np.errstate(over="ignore"):
        return jnp.asarray(np.ldexp(rng.standard_normal(shape), exponents).astype(np.float32)).astype(dtype)


@st.composite
def any_floats(draw):
    """NaN, infinity, subnormals, zeros of both signs, in blocks of their own and beside others."""
    floats = st.floats(width=32) | st.sampled_from([*GRID, 1e-40, -0.0])
    values = draw(st.lists(floats, min_size=1, max_size=48))
    return jnp.asarray(np.resize(np.array(values, np.float32), (19, 160)))


@st.composite
def ties_and_outliers(draw):
    """Multiples of an eighth tie between codes and between scales; one element a block may be 2^outlier larger."""
    numerators = draw(st.lists(st.integers(-48, 48), min_size=1, max_size=40))
    outlier, seed = draw(st.integers(0, 12)), draw(st.integers(0, 2**16))
    x = np.resize(np.array(numerators, np.float32), (19, 160)) / 8
    blocks = x.reshape(19, 10, 16)
    at = np.random.default_rng(seed).integers(0, 16, (19, 10))
    np.put_along_axis(blocks, at[..., None], np.take_along_axis(blocks, at[..., None], 2) * 2.0**outlier, 2)
    return jnp.asarray(x)
