"""Quotients, roots and 4- and 8-bit floats whose last bit no platform decides (numerics.md 10).

TPUs divide by multiplying with an approximate reciprocal and take roots by an approximate one; XLA's division on GPUs
is one unit in the last place off for every fourth pair. So a quotient is estimated here and corrected by its remainder,
which is exact: uint32 arithmetic wraps around, and what is left over is small. Casts to 8-bit floats and back are
dropped within a fusion, so numbers become bytes, and bytes numbers, by their bits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.arrays.formats import ELEMENTS, Element
from jaxlowprec.ops.rounding import (
    INFINITY_BITS,
    MIN_NORMAL_BITS,
    from_bits,
    from_half_bits,
    half_bits,
    magnitude_bits,
)

SIGN, MANTISSA, ONE = np.uint32(0x80000000), 0x007FFFFF, 0x3F800000  # bits of float32
HIDDEN = 0x00800000  # the first bit of a significand, which float32 does not store


def quotient(a: jax.Array | float, b: jax.Array | float) -> jax.Array:
    """fl(a / b) of float32, subnormals counting as zeros: CPUs divide, which is exact there; the others by integers.

    Only within an op, which is compiled for the platform that it runs on.
    """

    def by_cpus(a: jax.Array, b: jax.Array) -> jax.Array:
        # XLA would multiply by the reciprocal of a repeated b. Selected by a, it is repeated by jax.vmap, too.
        if b.shape != jnp.broadcast_shapes(a.shape, b.shape):
            b = jax.lax.optimization_barrier(jnp.where(jnp.isnan(a), 1, b))
        return a / b

    a, b = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
    return jax.lax.platform_dependent(a, b, cpu=by_cpus, default=quotient_by_integers)


def root(x: jax.Array) -> jax.Array:
    """fl(sqrt(x)) of float32, subnormals counting as zeros; see `quotient`."""

    def by_cpus(x: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier(jnp.sqrt(x))  # XLA would make an inexact rsqrt of 1 / sqrt(x)

    return jax.lax.platform_dependent(x, cpu=by_cpus, default=root_by_integers)


@jax.jit
def reciprocal_estimate(x: jax.Array) -> jax.Array:
    """1 / x with a relative error of up to 2^-18, for results that are corrected."""
    return 1.0 / x


@jax.jit
def inverse_root_estimate(x: jax.Array) -> jax.Array:
    """1 / sqrt(x) with a relative error of up to 2^-20, for results that are corrected."""
    return jax.lax.rsqrt(x)


def _exponent(bits: jax.Array) -> jax.Array:
    """The stored exponents of float32 bits, int32; those of zeros and of infinities far outside of all others."""
    stored = ((bits & INFINITY_BITS) >> 23).astype(jnp.int32)
    return jnp.where(stored == 0, -512, jnp.where(stored == 255, 767, stored))


def quotient_by_integers(a: jax.Array | float, b: jax.Array | float) -> jax.Array:
    """`quotient` without a division: an estimate, and integers that correct it.

    A quotient of significands is q = floor(2^k ma / mb) with 24 bits; k is 23, or 24 where ma < mb. The estimate of q
    is less than 2^7 off, so its remainder 2^k ma - q mb fits into 32 bits, though neither product does. There are no
    ties: the middle between two quotients of 24 bits times mb has more bits than 2^k ma.
    """
    a, b = jnp.broadcast_arrays(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32))
    a_bits, b_bits = (jax.lax.bitcast_convert_type(v, jnp.uint32) for v in (a, b))
    ma, mb = ((bits & MANTISSA) | HIDDEN for bits in (a_bits, b_bits))
    below = (ma < mb).astype(jnp.uint32)
    over = reciprocal_estimate(from_bits((b_bits & MANTISSA) | ONE))  # of numbers from 1 to 2
    estimate = from_bits((a_bits & MANTISSA) | ONE) * over * from_bits((150 + below) << 23)
    q = estimate.astype(jnp.int32)
    rest = ((ma << (23 + below)) - q.astype(jnp.uint32) * mb).astype(jnp.int32)
    mb = mb.astype(jnp.int32)
    correction = jnp.rint(rest.astype(jnp.float32) * (over * jnp.float32(2.0**-23))).astype(jnp.int32)
    q, twice = q + correction, 2 * (rest - correction * mb)  # at most about mb
    q += (twice > mb).astype(jnp.int32) - (twice < -mb).astype(jnp.int32)

    a_exponent, b_exponent = _exponent(a_bits), _exponent(b_bits)
    exponent = a_exponent - b_exponent + 127 - below.astype(jnp.int32)
    bits = (exponent << 23) + q - HIDDEN  # a q of 2^24 carries into the exponent
    bits = jnp.where((exponent < 0) | (bits < MIN_NORMAL_BITS), 0, bits)
    bits = jnp.where(exponent > 254, INFINITY_BITS, bits).astype(jnp.uint32) | ((a_bits ^ b_bits) & SIGN)
    alike = (a_exponent == b_exponent) & ((a_exponent < 0) | (a_exponent > 254))  # 0 / 0 and infinity / infinity
    return jnp.where(alike | jnp.isnan(a) | jnp.isnan(b), jnp.nan, from_bits(bits))


def rounded_quotient(a: jax.Array, b: jax.Array | float, dtype: jnp.dtype) -> jax.Array:
    """`a / b` rounded to bfloat16 or float16, ties to even, as float32; b a positive number of at most 12 bits."""
    b = jnp.asarray(b, jnp.float32)
    near = half_bits(jnp.abs(a) * reciprocal_estimate(b), dtype)
    return jnp.sign(a) * corrected_quotient(jnp.abs(a), b, near.astype(jnp.int32), dtype)


def corrected_quotient(a: jax.Array, b: jax.Array | float, near: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`rounded_quotient` of a magnitude, from the bits, int32, of an estimate that is rounded.

    It is rounded wrongly where the quotient is next to the middle of two numbers. Such a middle times b is exact, so a
    is compared with that product.
    """
    here, below, above = (
        from_half_bits(n.astype(jnp.uint32), dtype) for n in (near, jnp.maximum(near, 1) - 1, near + 1)
    )
    odd = near & 1 == 1
    under, over = (here * 0.5 + below * 0.5) * b, (here * 0.5 + above * 0.5) * b
    up, down = (a > over) | ((a == over) & odd), (a < under) | ((a == under) & odd)
    finite = magnitude_bits(here) < INFINITY_BITS
    return jnp.where(up & finite, above, jnp.where(down & finite, below, here))


def root_by_integers(x: jax.Array) -> jax.Array:
    """`root` without a square root: an estimate, and integers that correct it.

    The root s of 2^23 m has 24 bits; m is the significand, twice that where the exponent is odd. The estimate of s is
    less than 2^5 off, and corrected by the remainder 2^23 m - s^2, which fits into 32 bits. There are no ties: the
    square of a middle, s^2 + s + 1/4, is no integer.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    stored = (bits & INFINITY_BITS) >> 23
    odd = 1 - (stored & 1)  # of the exponent, which is stored + 127
    m = ((bits & MANTISSA) | HIDDEN) << odd
    near = from_bits(((bits & MANTISSA) | ONE) + (odd << 23))  # from 1 to 4
    over = inverse_root_estimate(near)
    s = (near * over * jnp.float32(2.0**23)).astype(jnp.int32)

    def rest(s: jax.Array) -> jax.Array:
        return ((m << 23) - s.astype(jnp.uint32) * s.astype(jnp.uint32)).astype(jnp.int32)

    s += jnp.rint(rest(s).astype(jnp.float32) * (over * jnp.float32(2.0**-24))).astype(jnp.int32)
    left = rest(s)
    s += (left > s).astype(jnp.int32) - (left <= -s).astype(jnp.int32)
    found = from_bits((((stored + 127 - odd) >> 1) << 23) + s.astype(jnp.uint32) - HIDDEN)
    found = jnp.where(stored == 0, 0.0 * x, jnp.where(stored == 255, x, found))
    return jnp.where((bits > SIGN) & (stored > 0), jnp.nan, found)


def steps_of(a: jax.Array, numbers: Element) -> tuple[jax.Array, jax.Array]:
    """Magnitudes up to the largest of a 4- or 8-bit float, in steps of their binade.

    Returns:
        base: int32; the codes are base + rounded steps.
        steps: float32, exact. Subnormal numbers have the steps of the least binade.
    """
    mantissa, least = numbers.mantissa_bits, 128 - numbers.exponent_bias
    exponent = jnp.maximum((magnitude_bits(a) >> 23).astype(jnp.int32), least)
    return (exponent - least) << mantissa, a * from_bits((254 + mantissa - exponent) << 23)


def e4m3_byte(x: jax.Array) -> jax.Array:
    """E4M3_rne_sat of magnitudes: int32, 0 to 0x7E; undefined for NaN."""
    return nearest(x, ELEMENTS["e4m3"])


def nearest(a: jax.Array, numbers: Element) -> jax.Array:
    """Codes of magnitudes, int32: nearest, ties to the even code, saturating; undefined for NaN.

    A number whose unit in the last place is a step of the format is added, so that float32's addition rounds.
    """
    a = jnp.minimum(a, numbers.maximum)
    fraction, least = 23 - numbers.mantissa_bits, 128 - numbers.exponent_bias
    binade = jnp.maximum(from_bits(magnitude_bits(a) & INFINITY_BITS), jnp.float32(2.0 ** (least - 127)))
    rounder = binade * jnp.float32(2.0**fraction)
    steps = _bits(a + rounder) - _bits(rounder)
    return steps + ((_bits(binade) >> fraction) - (least << numbers.mantissa_bits))


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def e4m3_value(byte: jax.Array) -> jax.Array:
    """The float32 numbers of the E4M3 bytes 0 to 0x7E."""
    byte = byte.astype(jnp.int32)
    normal = from_bits((byte + (120 << 3)) << 20)
    return jnp.where(byte < 8, byte.astype(jnp.float32) * jnp.float32(2.0**-9), normal)


def e2m1_value(code: jax.Array) -> jax.Array:
    """The float32 numbers of the E2M1 codes 0 to 15."""
    code = code.astype(jnp.uint32)
    magnitude = code & 7
    normal = (magnitude + (126 << 1)) << 22
    bits = jnp.where(magnitude > 1, normal, jnp.where(magnitude == 1, jnp.uint32(126 << 23), jnp.uint32(0)))
    return from_bits(bits | ((code & 8) << 28))
