"""Decoding in pure JAX (numerics.md 2 and 5 to 7)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.formats import Format
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.ops.hadamard.reference import rotate_float32
from jaxlowprec.ops.quantize.reference import E2M1_VALUES, E8M0_NAN, NVFP4_MAX
from jaxlowprec.ops.rounding import flush, from_bits


def code_values(data: jax.Array, fmt: Format) -> jax.Array:
    """Codes as float32: packed ones [..., n] -> [..., 2n]."""
    if not fmt.packed:
        return data.astype(jnp.float32)
    table = jnp.asarray(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), jnp.float32)
    codes = jnp.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], 2 * data.shape[-1])
    return table[codes]


def scale_values(scale: jax.Array, fmt: Format, rows: int) -> jax.Array:
    """Scales as float32, one per row and block [..., rows, blocks]: scales of tiles are repeated over the tile's rows.

    A tensor's [...] becomes [..., 1, 1].
    """
    if fmt.scaling == "tensor":
        return scale[..., None, None]
    if fmt.scaling == "e8m0":  # 2^-127, of zero blocks, is subnormal
        exponent = jax.lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.uint32)
        scale = jnp.where(exponent == E8M0_NAN, jnp.nan, from_bits(exponent << 23))
    scale = scale.astype(jnp.float32)
    return jnp.repeat(scale, fmt.length, axis=-2)[..., :rows, :] if fmt.tiles else scale


def dequantize_rows(
    data: jax.Array,
    scale: jax.Array,
    amax: jax.Array | None,
    fmt: Format,
    columns: int,
    hadamard: Hadamard | None,
    dtype,
) -> jax.Array:
    """Codes [..., R, bytes] -> [..., R, columns] of `dtype`: decoded and rotated back in float32, rounded once."""
    codes, scales = code_values(data, fmt), scale_values(scale, fmt, data.shape[-2])
    if fmt.scaling != "tensor":
        scales = jnp.repeat(scales, fmt.length, axis=-1)[..., : codes.shape[-1]]
    values = flush(codes * scales)
    if amax is not None:
        values = flush(flush(values * amax[..., None, None]) * jnp.float32(1 / NVFP4_MAX))
    if hadamard:
        values = rotate_float32(values, hadamard, inverse=True)
    return values[..., :columns].astype(dtype)
