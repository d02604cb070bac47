"""NVFP4 quantisation in pure JAX: the byte oracle (numerics.md 1 to 4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxlowprec.formats import BLOCK
from jaxlowprec.ops.quantize.philox import random_bytes
from jaxlowprec.ops.rounding import INFINITY_BITS, MAX_FINITE, MIN_NORMAL_BITS, flush, magnitude_bits

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_MAX = 448.0
NVFP4_MAX = 2688.0  # 448 * 6: the largest number a block scale and a code make
LARGEST_ENCODE = 2.0**126  # keeps its reciprocal normal


def e2m1_nearest(a: jax.Array) -> jax.Array:
    """Codes 0 to 7 of magnitudes: nearest, ties to the even code, saturating."""
    steps = [a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0]
    return sum((step.astype(jnp.uint8) for step in steps), jnp.uint8(0))


def e2m1_stochastic(a: jax.Array, byte: jax.Array) -> jax.Array:
    """Codes of magnitudes, rounded up where the fraction of a step is at least (255.5 - byte) / 256."""
    low = sum((a >= value).astype(jnp.uint8) for value in E2M1_VALUES[1:])
    value = jnp.asarray(E2M1_VALUES, jnp.float32)[low]
    steps_per_unit = jnp.where(a < 2.0, 2.0, jnp.where(a < 4.0, 1.0, 0.5))
    fraction = (a - value) * steps_per_unit
    up = fraction >= (255.5 - byte.astype(jnp.float32)) * (1 / 256)
    return jnp.minimum(low + up.astype(jnp.uint8), 7)


def e4m3(x: jax.Array) -> jax.Array:
    """float8_e4m3fn nearest to x >= 0, saturating at 448."""
    return jnp.minimum(x, E4M3_MAX).astype(jnp.float8_e4m3fn)


def blocks_of(x: jax.Array, tiles: bool) -> jax.Array:
    """x [..., R, C] padded with zeros and seen as [..., R/b, b, C/16, 16]: b is 16 for square tiles, else 1."""
    rows, columns = x.shape[-2:]
    height = BLOCK if tiles else 1
    padding = [(0, 0)] * (x.ndim - 2) + [(0, -rows % height), (0, -columns % BLOCK)]
    x = jnp.pad(x, padding)
    return x.reshape(*x.shape[:-2], x.shape[-2] // height, height, x.shape[-1] // BLOCK, BLOCK)


def quantize_rows(
    x: jax.Array,
    amax: jax.Array,
    tiles: bool = False,
    key: jax.Array | None = None,
    rows: jax.Array | None = None,
    block_columns: jax.Array | None = None,
    stream: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """x [..., R, C] -> codes uint8 [..., R, ceil(C/16) * 8] and scales float8_e4m3fn, blocks along the last axis.

    With a key, codes are rounded stochastically by the global indices `rows` [R] and `block_columns` [ceil(C/16)].
    """
    count = x.shape[-2]
    blocks = blocks_of(x.astype(jnp.float32), tiles)
    g = flush(amax)[..., None, None]
    encode = jnp.where(g == 0, 1.0, jnp.minimum(NVFP4_MAX / g, LARGEST_ENCODE))
    decode = 1.0 / encode
    multiplier = encode * jnp.float32(1 / 6)

    bits = magnitude_bits(blocks).max(axis=(-3, -1))  # [..., R/b, C/16]
    bad = (bits >= INFINITY_BITS) | (magnitude_bits(g) >= INFINITY_BITS)
    block_amax = jax.lax.bitcast_convert_type(bits, jnp.float32)
    scale = jnp.where(bad, jnp.nan, e4m3(jnp.minimum(block_amax * multiplier, MAX_FINITE)).astype(jnp.float32))
    block_encode = jnp.minimum(1.0 / flush(scale * decode), MAX_FINITE)[..., None, :, None]

    canonical = jnp.where(magnitude_bits(blocks) < MIN_NORMAL_BITS, 0.0, blocks)  # zeros of either sign are +0
    scaled = canonical * block_encode
    magnitude = jnp.abs(scaled)
    if key is None or rows is None or block_columns is None:
        code = e2m1_nearest(magnitude)
    else:
        byte = random_bytes(key, stream, rows, block_columns)  # [..., R, C/16, 16]
        padding = [(0, 0)] * byte.ndim
        padding[-3] = (0, -count % blocks.shape[-3])
        code = e2m1_stochastic(magnitude, jnp.pad(byte, padding).reshape(blocks.shape))
    code = code | ((canonical < 0).astype(jnp.uint8) << 3)
    code = jnp.where(bad[..., None, :, None], 0, code).astype(jnp.uint8)
    *batch, across, height, down, _ = code.shape
    code = code.reshape(*batch, across * height, down * BLOCK)[..., :count, :]
    return code[..., 0::2] | (code[..., 1::2] << 4), scale.astype(jnp.float8_e4m3fn)
