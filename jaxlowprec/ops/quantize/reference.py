"""Quantisation in pure JAX: the byte oracle (numerics.md 1, 2, 4 to 7, 13 and 14)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.formats import Element, Format
from jaxlowprec.ops.exact import e2m1_value, e4m3_byte, e4m3_value, nearest, quotient, steps_of
from jaxlowprec.ops.quantize.random_bits import Draws, random_bytes, random_words_of
from jaxlowprec.ops.rounding import (
    INFINITY_BITS,
    MAX_FINITE,
    MIN_NORMAL_BITS,
    flush,
    from_bits,
    magnitude_bits,
    rounded,
    widened,
)

NVFP4_MAX = 2688.0  # 448 * 6: the largest block scale times the largest code
NVFP4_MAX_WITH_ROOM = 1536.0  # 256 * 6: room above the scale of the largest block for scales that are chosen
LARGEST_ENCODE = 2.0**126  # keeps its reciprocal normal
E8M0_NAN = 255
FLOAT8_NAN = 0x7F


# --- codes

LEAST_NORMAL = 2.0**-6  # of E4M3
LARGEST_BYTE = 0x7E  # of E4M3
FIRST_STREAM = 2  # of scales rowwise; 3: columnwise


def stochastic(a: jax.Array, numbers: Element, byte: jax.Array) -> jax.Array:
    """Codes of magnitudes, int32, saturating: rounded up where the fraction of a step is (255.5 - byte) / 256 or more.

    `byte`: random, 0 to 255.
    """
    base, steps = steps_of(jnp.minimum(a, numbers.maximum), numbers)
    low = jnp.floor(steps)
    up = steps - low >= (255.5 - byte.astype(jnp.float32)) * (1 / 256)
    return base + low.astype(jnp.int32) + up.astype(jnp.int32)


def signed_codes(values: jax.Array, encode: jax.Array, fmt: Format, byte: jax.Array | None) -> jax.Array:
    """Codes, int32, of float32 numbers times a factor: zeros where the factor is NaN, and +0 of zeros of either sign,
    subnormal float32 numbers among them.

    `byte`: for each number, where it is rounded stochastically. A number that is not finite is NaN; only formats with
    one scale per tensor have such among others.
    """
    bits = magnitude_bits(values)
    magnitude = from_bits(bits) * encode
    code = nearest(magnitude, fmt.numbers) if byte is None else stochastic(magnitude, fmt.numbers, byte)
    poison = jnp.isnan(magnitude)
    if fmt.scaling == "tensor":
        code = jnp.where(bits < INFINITY_BITS, code, FLOAT8_NAN)
        poison = jnp.isnan(encode)
    negative = (jax.lax.bitcast_convert_type(values, jnp.uint32) >> 31).astype(jnp.int32)
    return jnp.where(poison | (bits < MIN_NORMAL_BITS), 0, code | negative << (3 if fmt.packed else 7))


# --- scales


class TensorFactors(NamedTuple):
    """The factors that follow from the amax [...] of a format with a tensor scale: float32, NaN if it is poisoned.

    Attributes:
        encode: S_enc of NVFP4, or the factor of the elements.
        decode: its reciprocal.
    """

    encode: jax.Array
    decode: jax.Array


def tensor_factors(tensor: jax.Array, fmt: Format, given: bool = False, largest: float = NVFP4_MAX) -> TensorFactors:
    """The factors of an amax or, if `given`, of the factor itself, which must be positive and finite.

    `largest`: what NVFP4 makes of the amax.
    """
    bits, value = magnitude_bits(tensor), flush(tensor)
    bad = (bits >= INFINITY_BITS) | (value <= 0 if given else value < 0)
    if fmt.scaling == "two_level":
        encode = tensor_encode(value, largest)
    else:
        encode = value if given else float32_scale(from_bits(jnp.where(bad, 0, bits)), fmt)
    return TensorFactors(*(jnp.where(bad, jnp.nan, number) for number in (encode, quotient(1.0, encode))))


def block_scales(bits: jax.Array, fmt: Format, tensor: TensorFactors | None) -> tuple[jax.Array, jax.Array]:
    """The scales of blocks, from the bits of their amaxes, int32: elementwise.

    Returns:
        scale: what is stored: float32, or the byte as int32.
        encode: float32, the factor of the elements; NaN where a block is poisoned.
    """
    bits = jnp.where(bits < MIN_NORMAL_BITS, 0, bits)
    bad = bits >= INFINITY_BITS
    if fmt.scaling == "two_level":
        assert tensor is not None
        bad = bad | jnp.isnan(tensor.encode)
        scale = e4m3_byte(from_bits(bits) * (tensor.encode * jnp.float32(1 / 6)))
        encode = block_encode(e4m3_value(scale), tensor.decode)
        poison: Any = FLOAT8_NAN
    elif fmt.scaling == "e8m0":
        scale = e8m0_exponent(bits, fmt)
        encode, poison = from_bits((254 - scale) << 23), E8M0_NAN
    else:
        encode = float32_scale(from_bits(jnp.where(bad, 0, bits)), fmt)
        scale, poison = quotient(1.0, encode), jnp.nan
    return jnp.where(bad, poison, scale), jnp.where(bad, jnp.nan, encode)


def tensor_encode(g: jax.Array, largest: float) -> jax.Array:
    """S_enc of NVFP4: the factor that makes the amax `largest`."""
    return jnp.where(g == 0, 1.0, jnp.minimum(quotient(largest, g), LARGEST_ENCODE))


def block_encode(scale: jax.Array, decode: jax.Array) -> jax.Array:
    """The factor of the elements of a block of NVFP4, from its scale and the reciprocal of S_enc."""
    return jnp.minimum(quotient(1.0, flush(scale * decode)), MAX_FINITE)


def e8m0_exponent(bits: jax.Array, fmt: Format) -> jax.Array:
    """MX: a power of two per block, as its stored exponent."""
    if fmt.scale_rule == "up":
        low = magnitude_bits(flush(from_bits(bits) * jnp.float32(1 / fmt.maximum))).astype(jnp.int32)
        exponent = (low + 0x7FFFFF) >> 23
    else:
        half_unit = 1 << (22 - fmt.numbers.mantissa_bits)
        rounded = bits + (half_unit if fmt.scale_rule == "even" else 0)
        largest = fmt.numbers.largest_exponent
        exponent = jnp.maximum(rounded >> 23, largest) - largest
    return jnp.where(bits < MIN_NORMAL_BITS, 0, jnp.maximum(exponent, 1))


def float32_scale(amax: jax.Array, fmt: Format) -> jax.Array:
    """The factor that makes `amax` the largest element (numerics.md 5)."""
    a = jnp.maximum(flush(amax), jnp.float32(fmt.amax_epsilon))
    encode = jnp.where(a == 0, 1.0, jnp.minimum(quotient(fmt.maximum, a), LARGEST_ENCODE))
    if fmt.power_of_two:
        encode = from_bits(magnitude_bits(encode) & INFINITY_BITS)
    return encode


def stored(scale: jax.Array, fmt: Format) -> jax.Array:
    """Scales in the dtype of the format, from those of `block_scales`."""
    if fmt.scaling not in ("two_level", "e8m0"):
        return scale
    return jax.lax.bitcast_convert_type(scale.astype(jnp.uint8), fmt.scale_dtype)


# --- the best of several scales (numerics.md 13)


def best_of_scales(
    magnitude: jax.Array, bits: jax.Array, tensor: jax.Array, fmt: Format, transposed: bool
) -> tuple[jax.Array, jax.Array]:
    """Scales [..., R/h, C/b] and the factors of their blocks, as those of `block_scales`, of NVFP4 that chooses scales.

    `magnitude` [..., R/h, h, C/b, b] are the elements' magnitudes, `bits` those of blocks' amaxes, `tensor` [...] the
    amax. `transposed`: they are those of the transposed array.
    """
    g = flush(tensor)[..., None, None]
    factors = tensor_factors(g, fmt, largest=NVFP4_MAX_WITH_ROOM)
    bits = jnp.where(bits < MIN_NORMAL_BITS, 0, bits)
    bad = (bits >= INFINITY_BITS) | jnp.isnan(factors.encode)
    encode, decode = (jnp.where(jnp.isnan(factor), 1.0, factor) for factor in factors)

    def tried(byte: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = e4m3_value(byte)
        codes = nearest(magnitude * block_encode(scale, decode)[..., None, :, None], fmt.numbers)
        errors = element_errors(magnitude, codes, scale, (g, encode), fmt)
        return byte, block_error(jnp.swapaxes(errors, -3, -1) if transposed and fmt.tiles else errors)

    (byte, error), *others = map(tried, candidate_scales(bits, encode, fmt))
    for other, its_error in others:
        better = its_error < error  # an equal error keeps the earlier scale
        byte, error = jnp.where(better, other, byte), jnp.where(better, its_error, error)
    return jnp.where(bad, FLOAT8_NAN, byte), jnp.where(bad, jnp.nan, block_encode(e4m3_value(byte), decode))


def candidate_scales(bits: jax.Array, encode: jax.Array, fmt: Format) -> list[jax.Array]:
    """The scales that a rule tries, in order, as bytes."""
    base = flush(quotient(from_bits(bits), 6.0) * encode)
    six, four = e4m3_byte(base), e4m3_byte(base * 1.5)
    return [six, four, six - (six >= 2)] if fmt.scale_rule == "search" else [six, four]


def element_errors(
    magnitude: jax.Array, codes: jax.Array, scale: jax.Array, tensor: tuple[jax.Array, jax.Array], fmt: Format
) -> jax.Array:
    """The errors of elements that became codes, in the rule's units. `tensor`: its amax g and S_enc."""
    g, encode = (number[..., None, :, None] for number in tensor)
    relative = e2m1_value(codes) * scale[..., None, :, None]  # exact
    if fmt.scale_rule == "search":
        difference = relative - rounded(flush(magnitude * encode))
    else:
        difference = flush(quotient(flush(relative * g), NVFP4_MAX_WITH_ROOM)) - magnitude
    difference = flush(difference)
    return jnp.abs(difference) if fmt.scale_rule == "four_over_six" else rounded(flush(difference * difference))


def block_error(errors: jax.Array) -> jax.Array:
    """The sum over a block [..., h, :, b]: over the elements of a row in order, then over rows as a tree."""
    total = errors[..., 0]
    for i in range(1, errors.shape[-1]):
        total = total + errors[..., i]
    rows = total.shape[-2]
    while rows > 1:  # of a tile, row r and row r + rows / 2
        rows //= 2
        total = total[..., :rows, :] + total[..., rows:, :]
    return total[..., 0, :]


# --- whole arrays


def blocks_of(x: jax.Array, fmt: Format) -> jax.Array:
    """x [..., R, C] padded with zeros and seen as [..., R/h, h, C/b, b] in blocks of h x b.

    For formats with one scale per tensor the result is [..., R, 1, 1, C].
    """
    rows, columns = x.shape[-2:]
    length = columns if fmt.scaling == "tensor" else fmt.length
    height = length if fmt.tiles else 1
    padding = [(0, 0)] * (x.ndim - 2) + [(0, -rows % height), (0, -columns % max(length, 1))]
    x = jnp.pad(x, padding)
    down, across = x.shape[-2] // height, 1 if fmt.scaling == "tensor" else x.shape[-1] // length
    return x.reshape(*x.shape[:-2], down, height, across, length)


def quantize_rows(
    x: jax.Array,
    fmt: Format,
    tensor: jax.Array | None = None,
    encode_scale_given: bool = False,
    draws: Draws | None = None,
    transposed: bool = False,
    eden: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """x [..., R, C] -> codes and scales, blocks along the last axis.

    `tensor` [...] is the amax of formats with a tensor scale, or the encode scale. With `draws` codes are rounded
    stochastically, else to nearest; with `eden` it is scales that are, which makes sense for NVFP4 in 1x16 only.
    `transposed`: x is the transposed array, which matters for the order of sums only.
    """
    count, columns = x.shape[-2:]
    values = blocks_of(widened(x), fmt)
    magnitude = jnp.abs(flush(values)) if fmt.chooses_scales or eden else values  # the others flush codes
    if fmt.scaling == "tensor" and tensor is not None:
        factors = tensor_factors(tensor, fmt, encode_scale_given)
        scale, encode = factors.decode, factors.encode[..., None, None]
    else:
        bits = magnitude_bits(values).astype(jnp.int32)  # [..., R/h, C/b] after both steps
        bits = bits.max(axis=-1, initial=0).max(axis=-2, initial=0)
        if fmt.chooses_scales and tensor is not None:
            scale, encode = best_of_scales(magnitude, bits, tensor, fmt, transposed)
        else:
            factors = None
            if tensor is not None:
                each = tensor[..., None, None]
                factors = tensor_factors(each, fmt, largest=NVFP4_MAX_WITH_ROOM if eden else NVFP4_MAX)
            scale, encode = block_scales(bits, fmt, factors)

    byte = None
    if draws is not None and not eden:
        byte = random_bytes(draws)
        byte = byte.reshape(*x.shape[:-1], byte.shape[-2] * byte.shape[-1])[..., :columns]
        byte = blocks_of(byte, fmt)
    code = signed_codes(values, encode[..., None, :, None], fmt, byte)
    if eden:
        scale = with_random_scales(scale, magnitude, code & 7, tensor, draws)
    *batch, down, height, across, length = code.shape
    code = code.reshape(*batch, down * height, across * length)[..., :count, :]
    if fmt.packed:
        return (code[..., 0::2] | (code[..., 1::2] << 4)).astype(jnp.uint8), stored(scale, fmt)
    data = jax.lax.bitcast_convert_type(code[..., :columns].astype(jnp.uint8), fmt.data_dtype)
    return data, stored(scale, fmt)


def with_random_scales(scale: jax.Array, magnitude: jax.Array, code: jax.Array, tensor: Any, draws: Any) -> jax.Array:
    """E4M3 scales [..., R, C/16], as bytes, of elements [..., R, 1, C/16, 16] that became codes, rounded stochastically
    after the correction of numerics.md 14. Those that are NaN stay NaN."""
    decode = quotient(1.0, tensor_encode(flush(tensor)[..., None, None], NVFP4_MAX_WITH_ROOM))
    bad = scale == FLOAT8_NAN
    value = e4m3_value(jnp.where(bad, 0, scale))
    scaled = flush(magnitude * block_encode(value, decode)[..., None, :, None])[..., 0, :, :]
    numbers = e2m1_value(code)[..., 0, :, :]
    return jnp.where(bad, FLOAT8_NAN, corrected_scales(value, scaled, numbers, random_bits(draws)))


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
