"""Optimizer states and master weights, element by element: what `jaxlowprec.optim` and AdamW's operation share
(numerics.md 19).

Every byte is made by integer operations on the bits of float32: no division, no rounding of a sum, nothing that a
compiler could contract. These functions know nothing of meshes: they take arrays, and places in whole arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlowprec.ops.quantize.random_bits import philox4x32
from jaxlowprec.ops.rounding import INFINITY_BITS, MIN_NORMAL_BITS, NAN_BITS, from_bits, magnitude_bits, widened

BLOCK = 32
"""Elements of a row that share an exponent byte."""
POISON = 255
"""The exponent byte of a block that decodes to NaN."""
EIGHTH = 8
"""Elements of a row whose draws come from one call of Philox."""
REMAINDERS: dict[int, Any] = {32: jnp.int16, 24: jnp.int8}
"""Dtypes of the remainders of master weights, by bits."""
_HALVES = 13  # tells a call for 8 half-words from one for 16 bytes
_DROPPED = 20  # bits of float32 below the three of the mantissa that are kept
_INFINITY = INFINITY_BITS >> _DROPPED
_U32 = jnp.uint32


class Coded(NamedTuple):
    """An array [..., C] in 8 bits.

    Attributes:
        codes: uint8 or int8 [..., C].
        exponents: uint8 [..., ceil(C / 32)].
    """

    codes: Any
    exponents: Any


def draws_at(rows: jax.Array, eighths: jax.Array, words: jax.Array, columns: int) -> jax.Array:
    """uint32 [..., columns] below 2^16: a draw for each element, by its place in the whole array.

    Arguments:
        rows: uint32 [..., 1] or [..., E], the numbers of rows; E is ceil(columns / 8).
        eighths: uint32 [E] or [..., E], the numbers of each 8 elements of a row.
        words: uint32 [..., 2], those of the leaf in this step; their leading axes broadcast to those of the places.
    """
    zero = jnp.zeros_like(rows + eighths)
    four = philox4x32((eighths + zero, rows + zero, zero + _U32(_HALVES), zero), (words[..., 0], words[..., 1]))
    halves = jnp.stack([half for word in four for half in (word & _U32(0xFFFF), word >> 16)], axis=-1)
    halves = halves.reshape(*halves.shape[:-2], halves.shape[-2] * EIGHTH)
    return halves if columns == halves.shape[-1] else halves[..., :columns]


# --- states


def encode_relative(x: jax.Array, signed: bool, draws: jax.Array | None = None) -> Coded:
    """x [..., C], bfloat16 or float32, in floats of 8 bits beside their block's exponent: see `optim.RelativeCode`.

    Arguments:
        draws: uint32 [..., C] below 2^16; None rounds to nearest.
    """
    b, negative = parts(x)
    half = _U32(1 << (_DROPPED - 1))
    if draws is not None:
        half = (draws << (_DROPPED - 16)) + _U32(1 << (_DROPPED - 17))
    r = (b + half) >> _DROPPED
    r = jnp.where(b == 0, _U32(0), jnp.where(b < INFINITY_BITS, jnp.minimum(r, _INFINITY - 1), _INFINITY))
    if not signed:
        r = jnp.where(negative, _U32(_INFINITY), r)
    e = largest_of_blocks(r) >> 3
    code = r.astype(jnp.int32) - _zero_at(e, signed, x.shape[-1])
    # Below the range a signed number becomes 0; an unsigned one the smallest, so 1 / sqrt(v) stays bounded.
    code = jnp.where(b == 0, 0, jnp.maximum(code, 0 if signed else 1)).astype(_U32)
    if signed:
        code = jnp.where(negative & (code != 0), code | 0x80, code)
    return Coded(code.astype(jnp.uint8), e.astype(jnp.uint8))


def decode_relative(q: Coded, signed: bool, dtype: Any = jnp.float32) -> jax.Array:
    """The numbers [..., C] that were encoded, bfloat16 or float32: both hold them exactly."""
    columns = q.codes.shape[-1]
    code = q.codes.astype(jnp.int32)
    magnitude = code & 127 if signed else code
    r = jnp.maximum(magnitude + _zero_at(q.exponents, signed, columns), 8)  # at least 2^-126
    b = jnp.where(magnitude == 0, _U32(0), r.astype(_U32) << _DROPPED)
    if signed:
        b = b | ((q.codes.astype(_U32) >> 7) << 31)
    return numbers(b, q, dtype)


def _zero_at(exponents: jax.Array, signed: bool, columns: int) -> jax.Array:
    """The upper bits that the code 0 of each element would stand for."""
    return of_each(exponents, columns) * 8 + (7 - (127 if signed else 255))


def parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The bits of |x|, subnormals as 0 and NaN as 0x7FC00000; and where x is a number below 0."""
    x = widened(x)
    b = magnitude_bits(x)
    negative = (jax.lax.bitcast_convert_type(x, _U32) >> 31) == 1
    negative &= (b >= MIN_NORMAL_BITS) & (b <= INFINITY_BITS)
    return jnp.where(b > INFINITY_BITS, _U32(NAN_BITS), jnp.where(b < MIN_NORMAL_BITS, _U32(0), b)), negative


def largest_of_blocks(b: jax.Array) -> jax.Array:
    """The largest of each block of [..., C]: [..., ceil(C / 32)]."""
    if pad := -b.shape[-1] % BLOCK:
        b = jnp.pad(b, [(0, 0)] * (b.ndim - 1) + [(0, pad)])
    return b.reshape(*b.shape[:-1], b.shape[-1] // BLOCK, BLOCK).max(-1)


def of_each(exponents: jax.Array, columns: int) -> jax.Array:
    """int32 [..., columns]: the exponent of each element's block."""
    blocks = exponents.shape[-1]
    repeated = jnp.broadcast_to(exponents[..., None], (*exponents.shape, BLOCK))
    repeated = repeated.reshape(*exponents.shape[:-1], blocks * BLOCK).astype(jnp.int32)
    return repeated if columns == blocks * BLOCK else repeated[..., :columns]


def numbers(b: jax.Array, q: Coded, dtype: Any) -> jax.Array:
    """The floats of such bits; NaN in poisoned blocks."""
    poisoned = of_each(q.exponents, q.codes.shape[-1]) == POISON
    return from_bits(jnp.where(poisoned, _U32(NAN_BITS), b)).astype(dtype)


# --- weights


def stored(x: jax.Array) -> jax.Array:
    """float32 numbers as they are stored: every NaN is 0x7FC00000, whatever the platform made of it."""
    return jnp.where(jnp.isnan(x), from_bits(_U32(NAN_BITS)), x)


def split_weight(weight: jax.Array, bits: int, draws: jax.Array | None = None) -> tuple[jax.Array, jax.Array | None]:
    """float32 weights [...] as bfloat16, to nearest with ties away from zero, and the rest of so many bits.

    Arguments:
        bits: 32, 24 or 16.
        draws: uint32 [...] below 2^16, for 16 bits: these are rounded stochastically and leave no rest.
    """
    b = jax.lax.bitcast_convert_type(weight, _U32)
    magnitude = magnitude_bits(weight)
    b = jnp.where(magnitude > INFINITY_BITS, _U32(NAN_BITS), b)  # else a NaN could carry into -0
    finite = magnitude < INFINITY_BITS
    if bits == 16:
        assert draws is not None
        return _bfloat16(jnp.where(finite, b + draws, b) >> 16), None
    if bits == 24:
        b = jnp.where(finite, (b + 0x80) & _U32(0xFFFFFF00), b)
    upper = (b + 0x8000) >> 16
    rest = b - (upper << 16)
    if bits == 24:
        return _bfloat16(upper), jax.lax.bitcast_convert_type((rest >> 8).astype(jnp.uint8), jnp.int8)
    return _bfloat16(upper), jax.lax.bitcast_convert_type(rest.astype(jnp.uint16), jnp.int16)


def nearest_weight(weight: jax.Array) -> jax.Array:
    """float32 weights [...] as bfloat16, to nearest with ties to even."""
    b = jax.lax.bitcast_convert_type(stored(weight), _U32)
    nearest = (b + 0x7FFF + ((b >> 16) & 1)) >> 16
    return _bfloat16(jnp.where(magnitude_bits(weight) > INFINITY_BITS, b >> 16, nearest))


def join_weight(p: jax.Array, rest: jax.Array | None) -> jax.Array:
    """The float32 weights [...] that were split."""
    if rest is None:
        return widened(p)
    upper = jax.lax.bitcast_convert_type(p, jnp.uint16).astype(_U32) << 16
    low = rest.astype(jnp.int32) << (8 if rest.dtype == jnp.int8 else 0)
    return from_bits(upper + jax.lax.bitcast_convert_type(low, _U32))


def _bfloat16(upper: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
