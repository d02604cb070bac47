"""Tensor amax in pure JAX (numerics.md 1)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.ops.hadamard.reference import rotate_padded
from jaxlowprec.ops.rounding import (
    INFINITY_BITS,
    MIN_NORMAL_BITS,
    NAN_BITS,
    from_bits,
    magnitude_bits,
    rounded,
    widened,
)


def amax(x: jax.Array) -> jax.Array:
    """[..., R, C] -> float32 [...]: the largest magnitude; subnormals are 0, NaN the quiet NaN and above all."""
    bits = magnitude_bits(widened(x)).max(axis=(-2, -1), initial=0)
    bits = jnp.where(bits > INFINITY_BITS, NAN_BITS, bits)
    return from_bits(jnp.where(bits < MIN_NORMAL_BITS, 0, bits))


def rotated_amax(x: jax.Array, hadamard: Hadamard) -> jax.Array:
    """The amax after the rotation along axis -2, rounded to x's dtype."""
    return amax(rotate_padded(rounded(jnp.swapaxes(x, -1, -2)), hadamard))  # x may be a product in the same program
