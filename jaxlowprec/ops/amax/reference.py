"""Tensor amax in pure JAX (numerics.md 1)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxlowprec.formats import Hadamard
from jaxlowprec.ops.hadamard.reference import rotate_padded
from jaxlowprec.ops.rounding import INFINITY_BITS, MIN_NORMAL_BITS, NAN_BITS, magnitude_bits


def amax_bits(x: jax.Array) -> jax.Array:
    """[..., R, C] -> uint32 [...]: magnitude bits of the largest element; subnormals are 0, NaN the quiet NaN."""
    bits = magnitude_bits(x.astype(jnp.float32)).max(axis=(-2, -1), initial=0)
    bits = jnp.where(bits > INFINITY_BITS, NAN_BITS, bits)
    return jnp.where(bits < MIN_NORMAL_BITS, 0, bits).astype(jnp.uint32)


def rotated_amax_bits(x: jax.Array, hadamard: Hadamard) -> jax.Array:
    """The same after the rotation along axis -2 and its rounding to x's dtype."""
    return amax_bits(rotate_padded(jnp.swapaxes(x, -1, -2), hadamard))
