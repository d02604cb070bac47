"""NVFP4 decoding in pure JAX (numerics.md 2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxlowprec.formats import BLOCK, Hadamard
from jaxlowprec.ops.hadamard.reference import rotate_float32
from jaxlowprec.ops.quantize.reference import E2M1_VALUES
from jaxlowprec.ops.rounding import flush


def e2m1_values(data: jax.Array) -> jax.Array:
    """Packed codes [..., n] -> float32 [..., 2n]."""
    table = jnp.asarray(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), jnp.float32)
    codes = jnp.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], 2 * data.shape[-1])
    return table[codes]


def repeat_tiles(scale: jax.Array, rows: int, tiles: bool) -> jax.Array:
    """Block scales as float32, one for each row: those of 16x16 tiles are repeated over their rows."""
    scale = scale.astype(jnp.float32)
    return jnp.repeat(scale, BLOCK, axis=-2)[..., :rows, :] if tiles else scale


def dequantize_rows(
    data: jax.Array, scale: jax.Array, amax: jax.Array, tiles: bool, columns: int, hadamard: Hadamard | None, dtype
) -> jax.Array:
    """Codes [..., R, bytes] -> [..., R, columns] of `dtype`: decoded and rotated back in float32, rounded once."""
    scales = jnp.repeat(repeat_tiles(scale, data.shape[-2], tiles), BLOCK, axis=-1)
    relative = e2m1_values(data) * scales
    values = flush(flush(relative * amax[..., None, None]) * jnp.float32(1 / 2688))
    if hadamard:
        values = rotate_float32(values, hadamard, inverse=True)
    return values[..., :columns].astype(dtype)
