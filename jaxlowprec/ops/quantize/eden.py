"""NVFP4 whose block scales, and not whose codes, are rounded stochastically, in pure JAX (numerics.md 14: MS-EDEN)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxlowprec.ops.quantize.philox import Draws, random_words_of
from jaxlowprec.ops.rounding import flush, quotient, rounded

LEAST_NORMAL = 2.0**-6  # of E4M3
LARGEST_BYTE = 0x7E  # of E4M3
FIRST_STREAM = 2  # of scales rowwise; 3: columnwise


def random_bits(draws: Draws) -> jax.Array:
    """20 random bits for each block, uint32 [..., R, ceil(C/16)]. One call of Philox serves four blocks of a row."""
    words = random_words_of(draws._replace(sixteens=draws.sixteens // 4))  # [..., R, ceil(C/16), 4]
    word = jnp.broadcast_to((draws.sixteens % 4)[..., None, :, None], (*words.shape[:-1], 1))
    return jnp.take_along_axis(words, word.astype(jnp.int32), axis=-1)[..., 0] >> 12


def corrected_scales(scale: jax.Array, scaled: jax.Array, numbers: jax.Array, bits: jax.Array) -> jax.Array:
    """Scale bytes [..., R, C/16] of blocks of 16, corrected for the errors of their codes.

    Arguments:
        scale: float32 [..., R, C/16], what codes were made by.
        scaled, numbers: [..., R, C/16, 16], magnitudes of the scaled elements, which may be above the largest code, and
            those of their codes.
        bits: of `random_bits`.
    """
    energy, product = _sum(scaled * scaled), _sum(scaled * numbers)
    ratio = quotient(energy, jnp.where(product == 0, 1.0, product))
    ratio = jnp.where((product == 0) | ~jnp.isfinite(ratio), 1.0, ratio)
    return rounded_up_by(flush(scale * ratio), bits)


def rounded_up_by(wanted: jax.Array, bits: jax.Array) -> jax.Array:
    """E4M3 bytes of magnitudes, the upper of both neighbours with the probability of the distance from the lower one.

    In float32's own bits, the 20 that E4M3 has not are that distance, in 2^-20; below the least normal number the grid
    is even.
    """
    normal = ((jax.lax.bitcast_convert_type(wanted, jnp.uint32) + bits) >> 20) - 960
    subnormal = (jnp.floor(jnp.minimum(wanted, LEAST_NORMAL) * 2.0**29).astype(jnp.uint32) + bits) >> 20
    return jnp.minimum(jnp.where(wanted >= LEAST_NORMAL, normal, subnormal), LARGEST_BYTE).astype(jnp.uint8)


def _sum(products: jax.Array) -> jax.Array:
    """Over the last axis, in order; products are rounded before they are added."""
    products = rounded(flush(products))
    total = products[..., 0]
    for i in range(1, products.shape[-1]):
        total = total + products[..., i]
    return total
