"""The Hadamard transform in pure JAX (numerics.md 3)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.ops.hadamard.signs import factors
from jaxlowprec.ops.rounding import narrowed, widened


def _butterfly(v: jax.Array) -> jax.Array:
    """v H along the last axis: pairs (a, b) -> (a + b, a - b) at strides 1, 2, 4, ..."""
    n, stride = v.shape[-1], 1
    while stride < n:
        pairs = v.reshape(*v.shape[:-1], n // (2 * stride), 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        v = jnp.stack([a + b, a - b], axis=-2).reshape(v.shape)
        stride *= 2
    return v


def rotate(x: jax.Array, hadamard: Hadamard, inverse: bool = False, drawn: jax.Array | None = None) -> jax.Array:
    """x [..., K] rotated along its last axis, K a multiple of the transform's size; rounded to x's dtype.

    `drawn`: for x [..., R, K] and a transform of drawn signs, those of each matrix, uint32 [..., 4].
    """
    return rotate_float32(widened(x), hadamard, inverse, x.dtype, drawn).astype(x.dtype)


def rotate_float32(
    x: jax.Array, hadamard: Hadamard, inverse: bool, dtype=jnp.float32, drawn: jax.Array | None = None
) -> jax.Array:
    """As `rotate` on float32 numbers, rounded to `dtype` but left in float32."""
    size = hadamard.size
    if drawn is None:
        signs = jnp.asarray(np.where(hadamard.negative, -1.0, 1.0), jnp.float32)
    else:
        signs = factors(drawn, size)[..., None, None, :]
    v = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    v = _butterfly(v if inverse else v * signs) * jnp.float32(size**-0.5)
    v = (v * signs if inverse else v).reshape(x.shape)
    return v if dtype == jnp.float32 else narrowed(v, dtype)


def rotate_padded(x: jax.Array, hadamard: Hadamard) -> jax.Array:
    """x [..., K] padded with zeros to whole transforms, then rotated."""
    pad = hadamard.padded(x.shape[-1]) - x.shape[-1]
    return rotate(jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)]), hadamard)
