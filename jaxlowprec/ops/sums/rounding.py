"""Stochastic rounding to bfloat16."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxlowprec.ops.quantize.philox import philox4x32
from jaxlowprec.ops.rounding import INFINITY_BITS, from_bits, magnitude_bits

_EACH = 8  # elements that one call of Philox serves, by 16 bits


def stochastic_bfloat16(x: jax.Array, words: jax.Array) -> jax.Array:
    """float32 numbers, each one of the two bfloat16 numbers beside x, as float32: unbiased.

    Element i of the flattened x takes the half-word i mod 8 of Philox's result for the counter (i // 8, 0, 0, 1),
    low halves first. What has a bfloat16 number keeps it; NaN and infinity stay. Above the largest finite bfloat16 a
    number becomes that or infinity (numerics.md 16).

    Arguments:
        x: float32.
        words: uint32 [2].
    """
    calls = jnp.arange(-(-max(x.size, 1) // _EACH), dtype=jnp.uint32)
    zero = jnp.zeros_like(calls)
    drawn = jnp.stack(philox4x32((calls, zero, zero, zero + 1), (words[0], words[1])), axis=-1)
    halves = jnp.stack([drawn & 0xFFFF, drawn >> 16], axis=-1).reshape(-1)[: math.prod(x.shape)].reshape(x.shape)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    rounded = from_bits((bits + halves) & jnp.uint32(0xFFFF0000))
    return jnp.where(magnitude_bits(x) < INFINITY_BITS, rounded, x)
