"""Roundings that XLA would otherwise leave out, and float32's bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp

MIN_NORMAL_BITS = 0x00800000
INFINITY_BITS = 0x7F800000
NAN_BITS = 0x7FC00000
MAX_FINITE = 3.4028234663852886e38


def rounded(product: jax.Array) -> jax.Array:
    """`product` rounded to its own dtype before anything is added to it.

    XLA's CPU compiler contracts `a * b + c` to a fused multiply-add, through optimization_barrier and reduce_precision
    too (jaxlib 0.10.2); an addition of a selected value is left alone.
    """
    return jnp.where(jnp.isnan(product), jnp.nan, product)


def narrowed(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`x` rounded to `dtype`, widened back to float32. A bare pair of casts is dropped as excess precision."""
    return jax.lax.optimization_barrier(x.astype(dtype)).astype(jnp.float32)


def quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a / b` rounded once, on a CPU. XLA multiplies by the reciprocal of a divisor that it sees repeated."""
    return a / jax.lax.optimization_barrier(jnp.broadcast_to(b, a.shape))


def magnitude_bits(x: jax.Array) -> jax.Array:
    """The bits of |x| for a float32 x, as uint32: they sort like magnitudes, infinity above, NaN above infinity."""
    return jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7FFFFFFF)


def from_bits(bits: jax.Array) -> jax.Array:
    """The float32 with the given bits."""
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32), jnp.float32)


def flush(x: jax.Array) -> jax.Array:
    """Subnormal float32 numbers made zero of their sign, whatever the platform does with them."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(magnitude_bits(x) < MIN_NORMAL_BITS, from_bits(bits & jnp.uint32(0x80000000)), x)
