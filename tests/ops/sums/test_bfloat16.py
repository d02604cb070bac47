"""Stochastic rounding to bfloat16, as sums use it."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxlowprec.ops.sums.quantized import stochastic_bfloat16
from tests.helpers import assert_same_bytes, random_array
from tests.numpy_oracle import sums as oracle

WORDS = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
SPECIAL = np.array([0, -0.0, np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, -1e-40, 1.0, 1 + 2**-7], np.float32)


@pytest.mark.parametrize("shape", [(64, 33), (1,), (0,), (7, 1, 5)], ids=str)
def test_the_bits_are_the_oracles(shape):
    x = np.asarray(random_array(shape, "float32", seed=1))
    assert_same_bytes(jax.jit(stochastic_bfloat16)(x, WORDS), oracle.stochastic_bfloat16(x, WORDS))


def test_special_values():
    y = np.asarray(jax.jit(stochastic_bfloat16)(SPECIAL, WORDS))
    assert_same_bytes(y, oracle.stochastic_bfloat16(SPECIAL, WORDS))
    assert_same_bytes(y[np.isfinite(y)], y[np.isfinite(y)].astype(ml_dtypes.bfloat16).astype(np.float32))
    assert np.isnan(y[2]) and y[3] == np.inf and y[4] == -np.inf
    assert_same_bytes(y[-2:], SPECIAL[-2:])  # what has a bfloat16 number keeps it
    assert_same_bytes(y[:2], SPECIAL[:2])


def test_it_is_unbiased():
    x, draws = jnp.float32(1 + 0.3 * 2**-7), 100_000
    y = np.asarray(jax.jit(stochastic_bfloat16)(jnp.full(draws, x), WORDS), np.float64)
    up = (y > 1).mean()
    assert set(np.unique(y)) == {1.0, 1 + 2.0**-7}
    assert abs(up - 0.3) < 4 * np.sqrt(0.3 * 0.7 / draws)
