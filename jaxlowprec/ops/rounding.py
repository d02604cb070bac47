"""Roundings that XLA would otherwise drop, and the bits of float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

MIN_NORMAL_BITS = 0x00800000
INFINITY_BITS = 0x7F800000
NAN_BITS = 0x7FC00000
MAX_FINITE = 3.4028234663852886e38


def rounded(product: jax.Array) -> jax.Array:
    """`product` rounded to its own dtype before anything is added to it.

    XLA's CPU compiler contracts `a * b + c` to a fused multiply-add, even through optimization_barrier and
    reduce_precision (jaxlib 0.10.2). It does not contract the addition of a selected value.
    """
    return jnp.where(jnp.isnan(product), jnp.nan, product)


def half_bits(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The bits of `x` rounded to bfloat16 or float16, as uint32."""
    return jax.lax.bitcast_convert_type(x.astype(dtype), jnp.uint16).astype(jnp.uint32)


def from_half_bits(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The float32 numbers of 16-bit floats given as bits."""
    if dtype == jnp.bfloat16:
        return from_bits(bits << 16)
    sign, magnitude = (bits & 0x8000) << 16, bits & 0x7FFF
    special = jnp.where(magnitude >= 0x7C00, jnp.uint32(112 << 23), jnp.uint32(0))  # infinity and NaN
    normal = (magnitude << 13) + jnp.uint32(112 << 23) + special
    subnormal = jax.lax.bitcast_convert_type(magnitude.astype(jnp.float32) * jnp.float32(2.0**-24), jnp.uint32)
    return from_bits(sign | jnp.where(magnitude < 0x0400, subnormal, normal))


def narrowed(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`x` rounded to `dtype`, widened back to float32.

    XLA drops a pair of casts as excess precision, in large arrays even with an optimization_barrier between them
    (jaxlib 0.10.2). So the bits are widened as integers.
    """
    return x if dtype == jnp.float32 else from_half_bits(half_bits(x, jnp.dtype(dtype)), jnp.dtype(dtype))


def narrowed_by_integers(x: jax.Array) -> jax.Array:
    """`narrowed` to bfloat16 for compilers that may drop a cast and a cast back."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    nearest = (bits + 0x7FFF + (jax.lax.shift_right_logical(bits, 16) & 1)) & ~0xFFFF
    return jnp.where(jnp.isnan(x), jnp.nan, from_bits(nearest))


@jax.custom_jvp
def widened(x: jax.Array) -> jax.Array:
    """`x` as float32, through its bits: XLA may drop the rounding of what x is computed from, and a cast back. Its
    derivative is that of the cast."""
    if x.dtype == jnp.float32:
        return x
    return from_half_bits(jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32), x.dtype)


@widened.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return widened(*primals), tangents[0].astype(jnp.float32)


def magnitude_bits(x: jax.Array) -> jax.Array:
    """The bits of |x| for a float32 x, as uint32: they sort like magnitudes, infinity above, NaN above infinity."""
    return jax.lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0x7FFFFFFF)


def from_bits(bits: jax.Array) -> jax.Array:
    """The float32 with the given bits."""
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32), jnp.float32)


def flush(x: jax.Array) -> jax.Array:
    """Subnormal float32 numbers made zero of their sign, whatever the platform does with them."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(magnitude_bits(x) < MIN_NORMAL_BITS, from_bits(bits & jnp.uint32(0x80000000)), x)
