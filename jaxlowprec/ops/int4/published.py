"""Int4 rules of published pipelines, for comparison with them (int4_qat.md 1.1 and 1.2).

Each takes blocks [..., B, b] of 16-bit numbers in float32 and returns raw codes (unsigned), zero points and the scale
that a step decodes to in training.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.formats import SYMMETRIC_ZERO, Int4
from jaxlowprec.ops.rounding import narrowed, quotient, rounded_quotient


def slime(blocks: jax.Array, fmt: Int4) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Columns A (symmetric: the trainer) and B (asymmetric: the kernel, whose range may exclude zero).

    The scale is not rounded, so quotients are exact only where XLA divides exactly: on a CPU. Codes above 15, which the
    kernel's packing carries into the next nibble, are returned raw.
    """
    if fmt.symmetric:
        amax = jnp.abs(blocks).max(axis=-1)
        scale = jnp.maximum(quotient(amax, jnp.float32(7)), jnp.float32(1e-5))
        zero = jnp.full(scale.shape, SYMMETRIC_ZERO, jnp.int32)
    else:
        low = blocks.min(axis=-1)
        scale = jnp.maximum((blocks.max(axis=-1) - low) * jnp.float32(1 / 15), jnp.float32(1e-5))
        zero = jnp.clip(-jnp.rint(quotient(low, scale)), 0, 15).astype(jnp.int32)
    steps = jnp.rint(quotient(blocks, scale[..., None]))
    return jnp.clip(steps, -1024, 1024).astype(jnp.int32) + zero[..., None], zero, scale


def compressed_tensors(blocks: jax.Array, fmt: Int4) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Column C, as its CPU path computes it: every operation rounds to the scale's dtype.

    The scale of a block of zeros is the dtype's epsilon. Zero points are added before rounding.
    """
    dtype = jnp.dtype(fmt.scale_dtype)

    def rounded(x: jax.Array) -> jax.Array:
        return narrowed(x, dtype)

    low, high = jnp.minimum(blocks.min(axis=-1), 0), jnp.maximum(blocks.max(axis=-1), 0)
    if fmt.symmetric:
        scale = rounded_quotient(jnp.maximum(-low, high), 7.5, dtype)
        zero = jnp.zeros(scale.shape, jnp.float32)
    else:
        scale = rounded_quotient(rounded(high - low), 15.0, dtype)
        divisor = jnp.where(scale == 0, 1, scale)
        zero = jnp.clip(rounded(-8 - rounded_quotient(low, divisor, dtype)), -8, 7)
        zero = jnp.where(scale == 0, 0, jnp.rint(zero))
    scale = jnp.where(scale == 0, jnp.float32(jnp.finfo(dtype).eps), scale)
    steps = rounded_quotient(blocks, scale[..., None], dtype)
    raw = jnp.rint(steps if fmt.symmetric else rounded(steps + zero[..., None]))
    return jnp.clip(raw, -1024, 1024).astype(jnp.int32) + SYMMETRIC_ZERO, zero.astype(jnp.int32) + SYMMETRIC_ZERO, scale
