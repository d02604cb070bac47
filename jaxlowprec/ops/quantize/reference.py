"""Quantisation in pure JAX: the byte oracle (numerics.md 1, 2, 4 to 7, 13 and 14)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.formats import Element, Format
from jaxlowprec.ops.exact import e2m1_value, e4m3_byte, e4m3_value, quotient, steps_of
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


def e2m1_nearest(a: jax.Array) -> jax.Array:
    """Codes 0 to 7 of magnitudes: nearest, ties to the even code, saturating."""
    steps = [a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0]
    return sum((step.astype(jnp.uint8) for step in steps), jnp.uint8(0))


def stochastic(a: jax.Array, numbers: Element, byte: jax.Array) -> jax.Array:
    """Codes of magnitudes, rounded up where the fraction of a step is at least (255.5 - byte) / 256, saturating."""
    base, steps = steps_of(jnp.minimum(a, numbers.maximum), numbers)
    low = jnp.floor(steps)
    up = steps - low >= (255.5 - byte.astype(jnp.float32)) * (1 / 256)
    return (base + low.astype(jnp.uint32) + up).astype(jnp.uint8)


def float8(a: jax.Array, fmt: Format, byte: jax.Array | None) -> jax.Array:
    """Codes of magnitudes, saturating; NaN if not finite. With a byte for each, rounded stochastically."""
    if byte is None:
        base, steps = steps_of(jnp.minimum(a, fmt.maximum), fmt.numbers)
        code = (base + jnp.rint(steps).astype(jnp.uint32)).astype(jnp.uint8)
    else:
        code = stochastic(a, fmt.numbers, byte)
    return jnp.where(jnp.isfinite(a), code, jnp.uint8(FLOAT8_NAN))


# --- scales: of blocks with the given amax bits [..., R/h, C/b] -> stored, what to multiply by, which are poisoned


def two_level(bits: jax.Array, tensor: jax.Array, largest: float = NVFP4_MAX) -> tuple[jax.Array, jax.Array, jax.Array]:
    """NVFP4: an E4M3 scale per block, relative to the tensor's amax, which becomes `largest`."""
    g = flush(tensor)[..., None, None]
    encode = tensor_encode(g, largest)
    multiplier = encode * jnp.float32(1 / 6)
    bad = poisoned(bits, g)
    scale = e4m3_byte(from_bits(bits) * multiplier)
    return stored_e4m3(scale, bad), block_encode(e4m3_value(scale), encode), bad


def tensor_encode(g: jax.Array, largest: float) -> jax.Array:
    """S_enc of NVFP4: the factor that makes the amax `largest`."""
    return jnp.where(g == 0, 1.0, jnp.minimum(quotient(largest, g), LARGEST_ENCODE))


def poisoned(bits: jax.Array, g: jax.Array) -> jax.Array:
    """Mask of the blocks of NVFP4 that become NaN."""
    return (bits >= INFINITY_BITS) | (magnitude_bits(g) >= INFINITY_BITS) | (g < 0)


def stored_e4m3(byte: jax.Array, bad: jax.Array) -> jax.Array:
    """Scales from their bytes; NaN where they are poisoned."""
    return jax.lax.bitcast_convert_type(jnp.where(bad, FLOAT8_NAN, byte).astype(jnp.uint8), jnp.float8_e4m3fn)


def block_encode(scale: jax.Array, encode: jax.Array) -> jax.Array:
    """The factor of the elements of a block with a float32 scale."""
    return jnp.minimum(quotient(1.0, flush(scale * quotient(1.0, encode))), MAX_FINITE)


def e8m0(bits: jax.Array, fmt: Format) -> tuple[jax.Array, jax.Array, jax.Array]:
    """MX: a power of two per block."""
    if fmt.scale_rule == "up":
        exponent = (magnitude_bits(flush(from_bits(bits) * jnp.float32(1 / fmt.maximum))) + 0x7FFFFF) >> 23
    else:
        half_unit = 1 << (22 - fmt.numbers.mantissa_bits)
        rounded = bits + (half_unit if fmt.scale_rule == "even" else 0)
        largest = fmt.numbers.largest_exponent
        exponent = jnp.maximum(rounded >> 23, largest) - largest
    exponent = jnp.where(bits < MIN_NORMAL_BITS, 0, jnp.maximum(exponent, 1))
    bad = bits >= INFINITY_BITS
    stored = jnp.where(bad, E8M0_NAN, exponent).astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(stored, jnp.float8_e8m0fnu), from_bits((254 - exponent) << 23), bad


def float32_scale(amax: jax.Array, fmt: Format) -> jax.Array:
    """The factor that makes `amax` the largest element (numerics.md 5)."""
    a = jnp.maximum(flush(amax), jnp.float32(fmt.amax_epsilon))
    encode = jnp.where(a == 0, 1.0, jnp.minimum(quotient(fmt.maximum, a), LARGEST_ENCODE))
    if fmt.power_of_two:
        encode = from_bits(magnitude_bits(encode) & INFINITY_BITS)
    return encode


def float32(bits: jax.Array, fmt: Format) -> tuple[jax.Array, jax.Array, jax.Array]:
    """FP8 blockwise: a float32 per block."""
    bad = bits >= INFINITY_BITS
    encode = float32_scale(from_bits(jnp.where(bad, 0, bits)), fmt)
    return jnp.where(bad, jnp.nan, quotient(1.0, encode)), encode, bad


def tensor_scale(tensor: jax.Array, fmt: Format, given: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One float32 per tensor, from its amax or, if `given`, the factor itself, which must be positive and finite."""
    bits, value = magnitude_bits(tensor), flush(tensor)
    bad = (bits >= INFINITY_BITS) | (value <= 0 if given else value < 0)
    encode = value if given else float32_scale(from_bits(jnp.where(bad, 0, bits)), fmt)
    return jnp.where(bad, jnp.nan, quotient(1.0, encode)), encode[..., None, None], bad[..., None, None]


# --- the best of several scales (numerics.md 13)


def best_of_scales(
    magnitude: jax.Array, bits: jax.Array, tensor: jax.Array, fmt: Format, transposed: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scales [..., R/h, C/b], codes without signs and which blocks are poisoned, of NVFP4 whose scales are chosen.

    `magnitude` [..., R/h, h, C/b, b] are the elements' magnitudes, `bits` and `tensor` the amaxes as for `two_level`.
    `transposed`: they are those of the transposed array.
    """
    g = flush(tensor)[..., None, None]
    encode = tensor_encode(g, NVFP4_MAX_WITH_ROOM)

    def tried(scale: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        codes = e2m1_nearest(magnitude * block_encode(scale, encode)[..., None, :, None])
        errors = element_errors(magnitude, codes, scale, (g, encode), fmt)
        return scale, codes, block_error(jnp.swapaxes(errors, -3, -1) if transposed and fmt.tiles else errors)

    first, *others = map(tried, candidate_scales(bits, encode, fmt))
    scale, codes, error = first
    for other in others:
        better = other[2] < error  # an equal error keeps the earlier scale
        scale, error = jnp.where(better, other[0], scale), jnp.where(better, other[2], error)
        codes = jnp.where(better[..., None, :, None], other[1], codes)
    bad = poisoned(bits, g)
    return stored_e4m3(e4m3_byte(scale), bad), codes, bad


def candidate_scales(bits: jax.Array, encode: jax.Array, fmt: Format) -> list[jax.Array]:
    """The scales that a rule tries, in order, as float32."""
    base = flush(quotient(from_bits(bits), 6.0) * encode)
    six, four = e4m3_byte(base), e4m3_byte(base * 1.5)
    found = [six, four]
    if fmt.scale_rule == "search":
        found.append(six - (six >= 2))
    return [e4m3_value(byte) for byte in found]


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
    blocks = blocks_of(widened(x), fmt)
    canonical = jnp.where(magnitude_bits(blocks) < MIN_NORMAL_BITS, 0.0, blocks)  # zeros of either sign are +0
    code = None
    if tensor is not None and fmt.scaling == "tensor":
        scale, encode, bad = tensor_scale(tensor, fmt, encode_scale_given)
    else:
        bits = magnitude_bits(blocks).max(axis=(-3, -1), initial=0)  # [..., R/h, C/b]
        bits = jnp.where(bits < MIN_NORMAL_BITS, 0, bits)
        if tensor is not None and fmt.chooses_scales:
            scale, code, bad = best_of_scales(jnp.abs(canonical), bits, tensor, fmt, transposed)
        elif tensor is not None:
            scale, encode, bad = two_level(bits, tensor, NVFP4_MAX_WITH_ROOM if eden else NVFP4_MAX)
        else:
            scale, encode, bad = (e8m0 if fmt.scaling == "e8m0" else float32)(bits, fmt)

    if code is None:
        draws_of_codes = None if eden else draws
        code = magnitude_codes(blocks, canonical * encode[..., None, :, None], fmt, draws_of_codes, x.shape)
    if eden:
        scale = with_random_scales(scale, jnp.abs(canonical), code, tensor, draws)
    negative = jax.lax.bitcast_convert_type(canonical, jnp.uint32) >> 31
    code = code | (negative << (3 if fmt.packed else 7)).astype(jnp.uint8)
    code = jnp.where(bad[..., None, :, None], 0, code).astype(jnp.uint8)
    *batch, down, height, across, length = code.shape
    code = code.reshape(*batch, down * height, across * length)[..., :count, :]
    if fmt.packed:
        return code[..., 0::2] | (code[..., 1::2] << 4), scale
    return jax.lax.bitcast_convert_type(code[..., :columns], fmt.data_dtype), scale


def with_random_scales(scale: jax.Array, magnitude: jax.Array, code: jax.Array, tensor: Any, draws: Any) -> jax.Array:
    """E4M3 scales [..., R, C/16] of elements [..., R, 1, C/16, 16] that became codes, rounded stochastically after the
    correction of numerics.md 14. Those that are NaN stay NaN."""
    encode = tensor_encode(flush(tensor)[..., None, None], NVFP4_MAX_WITH_ROOM)
    byte = jax.lax.bitcast_convert_type(scale, jnp.uint8)
    bad = byte == FLOAT8_NAN
    value = e4m3_value(jnp.where(bad, 0, byte))
    scaled = flush(magnitude * block_encode(value, encode)[..., None, :, None])[..., 0, :, :]
    numbers = e2m1_value(code)[..., 0, :, :]
    stored = corrected_scales(value, scaled, numbers, random_bits(draws))
    return stored_e4m3(stored, bad)


def magnitude_codes(
    blocks: jax.Array, scaled: jax.Array, fmt: Format, draws: Draws | None, shape: tuple[int, ...]
) -> jax.Array:
    """Codes without signs of scaled elements. `shape` is that of the array before it was cut into blocks."""
    byte = None
    if draws is not None:
        byte = random_bytes(draws)
        byte = byte.reshape(*shape[:-1], byte.shape[-2] * byte.shape[-1])[..., : shape[-1]]
        byte = blocks_of(byte, fmt)
    magnitude = jnp.abs(scaled)
    if fmt.packed:
        return e2m1_nearest(magnitude) if byte is None else stochastic(magnitude, fmt.numbers, byte)
    # finite numbers saturate, others are NaN
    magnitude = jnp.where(magnitude_bits(blocks) < INFINITY_BITS, jnp.minimum(magnitude, MAX_FINITE), jnp.nan)
    return float8(magnitude, fmt, byte)


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
