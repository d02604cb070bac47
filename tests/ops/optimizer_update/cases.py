"""Operands of AdamW's and Lion's update, and the bytes that the oracle says of them."""

import itertools

import jax.numpy as jnp
import numpy as np

from jaxlowprec.ops.optimizer_states import Coded
from tests.numpy_oracle import optimizer_states as oracle

WORDS = np.array([[3, 9], [1 << 31, 77]], np.uint32)
SCALARS = np.array([0.9, 0.1, 0.999, 0.001, 0.271, 0.002997, 1e-8, 0.1, -1e-3], np.float32)
LION_SCALARS = SCALARS[[0, 1, 2, 3, 7, 8]]
ROUNDINGS = (None, "nearest", "stochastic")
WEIGHTS = ((np.float32, None), (jnp.bfloat16, None), (jnp.bfloat16, 32), (jnp.bfloat16, 24), (jnp.bfloat16, 16))
CODES = tuple(itertools.product(ROUNDINGS, ROUNDINGS))
HOSTILE = [0.0, -0.0, 1e-40, -1e-40, 2.0**-126, 3.4028235e38, -3.4028235e38, np.inf, -np.inf, np.nan, -np.nan]
HOSTILE += [1e-12, -1e-18, 1e-19, 1.1e-19, 1e18, -1e25]


def numbers(shape, seed, scale=1.0, hostile=True):
    """float32 over 20 octaves; hostile ones in the first rows of four or more."""
    rng = np.random.default_rng(seed)
    x = np.asarray(rng.standard_normal(shape) * 2.0 ** rng.integers(-10, 10, shape) * scale, np.float32)
    rows = x.reshape(-1, shape[-1] if shape else 1)
    if hostile and len(rows) >= 4:
        flat = rows[: len(rows) // 2].reshape(-1)
        at = rng.permutation(flat.size)[: len(HOSTILE)]
        flat[at] = np.array(HOSTILE, np.float32)[: len(at)]
    return x


def operands(shape, codes, p_dtype, bits, g_dtype=np.float32, seed=0, hostile=True, rule="adamw"):
    """g, p, rest, mu, nu, scalars and words, of NumPy."""
    g = numbers(shape, seed, 1e-3, hostile).astype(g_dtype)
    weight = numbers(shape, seed + 1, 0.1, hostile)
    p, rest = weight.astype(p_dtype), None
    if bits in (32, 24):
        upper, rest = oracle.split(weight, bits)
        p = upper.view(p_dtype)
    moments = [numbers(shape, seed + 2, 1e-3, hostile), np.abs(numbers(shape, seed + 3, 1e-5, hostile))]
    if hostile and shape and shape[-1] > 1:
        moments[1].reshape(-1, shape[-1])[-1, 1] = -1e-3  # a second moment below 0 is an error: NaN
    for i, rounding in enumerate(codes):
        if rounding is not None:
            moments[i] = Coded(*oracle.encode_relative(moments[i], i == 0))
    scalars = SCALARS
    if rule == "lion":
        moments[1], scalars = None, LION_SCALARS
    return g, p, rest, *moments, scalars, WORDS if bits == 16 or "stochastic" in codes else None


def expected(args, codes, bits, is_update=False, rule="adamw"):
    """Parameter or update, rest, mu, nu."""
    g, p, rest, mu, nu, scalars, words = args
    return oracle.optimizer_update(
        g, p, rest, mu, nu, scalars, WORDS if words is None else words, codes, bits, is_update, rule
    )
