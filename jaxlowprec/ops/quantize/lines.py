"""Quantisation with one scale per line in pure JAX: the byte oracle of Float8Rows and Int8Rows (numerics.md 18)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.formats import Format
from jaxlowprec.ops.exact import e4m3_value, nearest, quotient
from jaxlowprec.ops.quantize.random_bits import Draws, random_bytes
from jaxlowprec.ops.quantize.reference import LARGEST_ENCODE, stochastic
from jaxlowprec.ops.rounding import (
    INFINITY_BITS,
    MIN_NORMAL_BITS,
    from_bits,
    magnitude_bits,
    narrowed,
    rounded,
    widened,
)

LEAST_SCALE = 2.0**-126
"""The least scale of lines that are not zero: a normal number, whose reciprocal is one too."""
_LARGEST_STEP, _LEAST_STEP = 448 / 8, 2.0**-9
"""E4M3 numbers: the step between the numbers of 4-bit weights, in units of their line's scale."""


def amax_bits(x: jax.Array, axis: int | tuple[int, ...] = -1) -> jax.Array:
    """The bits, int32, of the largest magnitude along an axis; they sort like magnitudes, NaN above infinity."""
    return magnitude_bits(widened(x)).astype(jnp.int32).max(axis=axis, initial=0)


def line_scales(bits: jax.Array, fmt: Format) -> tuple[jax.Array, jax.Array | None]:
    """The scales of lines, from the bits of their amaxes, int32: elementwise.

    Returns:
        scale: float32, a number of the format's `scale_dtype`; NaN where a line is poisoned.
        encode: float32, what elements are multiplied by; None: they are divided by the scale.
    """
    bits = jnp.where(bits < MIN_NORMAL_BITS, 0, bits)
    amax = from_bits(jnp.where(bits >= INFINITY_BITS, 0, bits))
    integers, dtype = fmt.element == "int8", jnp.dtype(fmt.scale_dtype)
    if fmt.scale_rule == "w4afp8":  # the largest scale that a file holds for a group, in its dtype, and what it becomes
        scale = quotient(narrowed(quotient(amax, 7.0), jnp.bfloat16), _LARGEST_STEP)
    else:
        scale = quotient(amax, 127.5 if fmt.scale_rule == "compressed-tensors" else fmt.maximum)
    scale = jnp.where(amax > 0, jnp.maximum(scale, LEAST_SCALE), 0)
    scale = jnp.maximum(scale, fmt.least)
    by_encode = integers and dtype == jnp.float32 and fmt.scale_rule == "deploy"
    if dtype != jnp.float32:
        scale = narrowed(scale, dtype)
        scale = jnp.where(scale == 0, float(jnp.finfo(dtype).eps), scale)
    elif not by_encode:
        scale = jnp.where(scale == 0, 1.0, scale)
    poisoned = (bits >= INFINITY_BITS) | jnp.isinf(scale)
    encode = None
    if by_encode:
        encode = jnp.where(amax > 0, jnp.minimum(quotient(127.0, amax), LARGEST_ENCODE), 1.0)
    elif fmt.scale_rule == "cache":
        encode = quotient(1.0, scale)
    return jnp.where(poisoned, jnp.nan, scale), encode


def stored_scales(amax: jax.Array, fmt: Format) -> jax.Array:
    """The scales [..., 1] of lines with these amaxes [...], in the format's dtype."""
    return line_scales(magnitude_bits(amax).astype(jnp.int32)[..., None], fmt)[0].astype(fmt.scale_dtype)


def line_codes(
    values: jax.Array, scale: jax.Array, encode: jax.Array | None, fmt: Format, byte: jax.Array | None
) -> jax.Array:
    """Codes, int32, of float32 numbers [..., R, C] in lines with scales [..., R, 1]: integers, or bytes of floats.

    Zeros in poisoned lines, and +0 of zeros of either sign, subnormal float32 numbers among them. `byte`: for each
    number, where it is rounded stochastically.
    """
    bits = magnitude_bits(values)
    magnitude = from_bits(jnp.where(bits < INFINITY_BITS, bits, 0))
    scaled = quotient(magnitude, scale) if encode is None else magnitude * encode
    negative = (jax.lax.bitcast_convert_type(values, jnp.uint32) >> 31).astype(jnp.int32)
    if fmt.element != "int8":
        code = nearest(scaled, fmt.numbers) if byte is None else stochastic(scaled, fmt.numbers, byte)
        code = code | negative << 7
    else:
        limit = 127.0 + (negative if fmt.scale_rule == "compressed-tensors" and byte is None else 0)
        scaled = jnp.minimum(scaled, limit)
        nearest_of = _half_away if fmt.scale_rule == "cache" else jnp.rint
        low = nearest_of(scaled) if byte is None else jnp.floor(scaled)
        up = 0 if byte is None else scaled - low >= (255.5 - byte.astype(jnp.float32)) * (1 / 256)
        code = (low.astype(jnp.int32) + up) * (1 - 2 * negative)
    return jnp.where(jnp.isnan(scale) | (bits < MIN_NORMAL_BITS), 0, code)


def group_codes(values: jax.Array, scale: jax.Array, fmt: Format) -> jax.Array:
    """`line_codes` by the rule of 4-bit weights: each group of [..., R, C] has E4M3(k h), k = -7 to 7, among its codes.

    h is the E4M3 number next to a seventh of the group's largest |x| / scale.
    """
    bits = magnitude_bits(values)
    magnitude = from_bits(jnp.where(bits < INFINITY_BITS, bits, 0))
    scaled = quotient(magnitude, scale)
    groups = scaled.reshape(*scaled.shape[:-1], scaled.shape[-1] // fmt.length, fmt.length)
    step = _as_element(quotient(groups.max(axis=-1, keepdims=True, initial=0), 7.0), fmt)
    step = jnp.maximum(step, _LEAST_STEP)
    numbers = [_as_element(k * step, fmt) for k in range(8)]
    code = jnp.zeros(groups.shape, jnp.int32)
    for k in range(1, 8):
        middle = 0.5 * (numbers[k - 1] + numbers[k])
        beyond = groups >= middle if k % 2 == 0 else groups > middle  # ties go to the even k
        code = jnp.where(beyond, nearest(numbers[k], fmt.numbers), code)
    negative = (jax.lax.bitcast_convert_type(values, jnp.uint32) >> 31).astype(jnp.int32)
    code = code.reshape(values.shape)
    return jnp.where(jnp.isnan(scale) | (code == 0), 0, code | negative << 7)


def _as_element(x: jax.Array, fmt: Format) -> jax.Array:
    """Magnitudes rounded to E4M3 numbers, in float32."""
    return e4m3_value(nearest(x, fmt.numbers))


def _half_away(magnitude: jax.Array) -> jax.Array:
    """floor(fl(magnitude + 1/2)) of magnitudes up to 127, as caches round to integers."""
    return jnp.floor(rounded(magnitude) + 0.5)


def quantize_lines(
    x: jax.Array, fmt: Format, amax: jax.Array | None = None, draws: Draws | None = None
) -> tuple[jax.Array, jax.Array]:
    """x [..., R, C] -> codes and scales [..., R, 1], a scale for each row.

    `amax` [..., R]: those of longer lines that these are parts of. With `draws` codes are rounded stochastically.
    """
    bits = amax_bits(x) if amax is None else magnitude_bits(amax).astype(jnp.int32)
    scale, encode = line_scales(bits[..., None], fmt)
    byte = None
    if draws is not None:
        byte = random_bytes(draws)
        byte = byte.reshape(*x.shape[:-1], byte.shape[-2] * byte.shape[-1])[..., : x.shape[-1]]
    if fmt.scale_rule == "w4afp8":
        code = group_codes(widened(x), scale, fmt)
    else:
        code = line_codes(widened(x), scale, encode, fmt, byte)
    narrow = code.astype(jnp.int8 if fmt.element == "int8" else jnp.uint8)
    data = narrow if fmt.element == "int8" else jax.lax.bitcast_convert_type(narrow, fmt.data_dtype)
    return data, scale.astype(fmt.scale_dtype)
