"""Int4 in pure JAX: the byte oracle (int4_qat.md 1.2, 1.4 and 1.5), and rules of published pipelines (1.1 and 1.2).

Arrays here are reshaped to blocks [..., B, b] along the last axis. Codes are unsigned, 0 to 15, also those of symmetric
formats, whose code of zero is 8. The published rules are there for comparison: each takes 16-bit numbers in float32 and
returns raw codes, zero points and the scale that a step decodes to in training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.formats import SYMMETRIC_ZERO, Format, Int4
from jaxlowprec.ops.exact import quotient, rounded_quotient
from jaxlowprec.ops.rounding import INFINITY_BITS, flush, magnitude_bits, narrowed, widened

LEAST_SCALE = 1e-5
LARGEST_CODE = 15


class Blocks(NamedTuple):
    """Quantised blocks.

    Attributes:
        raw: [..., B, b] int32, codes before they are limited to the range of the format.
        zero: [..., B] int32, the code of zero.
        scale: [..., B] float32, the size of a step.
    """

    raw: jax.Array
    zero: jax.Array
    scale: jax.Array


# --- the "deploy" rule


def nearest_steps(magnitude: jax.Array, scale: jax.Array, most: int) -> jax.Array:
    """`rint(magnitude / scale)` up to `most`, ties to even, by comparison: no quotient that a compiler may round twice.

    It is exact, because the middles between steps are: half-integers below 16 times a 16-bit float.
    """
    steps = jnp.zeros(magnitude.shape, jnp.int32)
    for k in range(most):
        between = (k + 0.5) * scale
        steps += (magnitude > between if k % 2 == 0 else magnitude >= between).astype(jnp.int32)
    return steps


def deploy(blocks: jax.Array, fmt: Int4) -> Blocks:
    """The rule whose decoded weight is the served weight. Blocks with NaN or infinity get a NaN scale later."""
    if fmt.symmetric:
        low = high = jnp.abs(blocks).max(axis=-1)
    else:
        low, high = jnp.minimum(blocks.min(axis=-1), 0), jnp.maximum(blocks.max(axis=-1), 0)
    scale, zero = scale_and_zero(low, high, fmt)
    return Blocks(signed_steps(blocks, scale[..., None], fmt) + zero[..., None], zero, scale)


def scale_and_zero(
    low: jax.Array,
    high: jax.Array,
    fmt: Int4,
    divide: Callable[..., jax.Array] = rounded_quotient,
    narrow: Callable[..., jax.Array] = narrowed,
) -> tuple[jax.Array, jax.Array]:
    """The scale of a block, float32, and its code of zero, int32: elementwise.

    Arguments:
        low, high: its least and its largest number, or zero; if symmetric, only `high`, its largest magnitude, counts.
        divide, narrow: `rounded_quotient` and `narrowed`, or what gives the same.
    """
    dtype = jnp.dtype(fmt.scale_dtype)
    # A product with 1/7 rounds to the same 16-bit scales as a division.
    step = high * jnp.float32(1 / 7) if fmt.symmetric else divide(high - low, LARGEST_CODE, dtype)
    scale = narrow(jnp.maximum(step, jnp.float32(LEAST_SCALE)), dtype)
    if fmt.symmetric:
        return scale, jnp.full(scale.shape, SYMMETRIC_ZERO, jnp.int32)
    return scale, nearest_steps(-low, scale, LARGEST_CODE)


def signed_steps(values: jax.Array, scale: jax.Array, fmt: Int4) -> jax.Array:
    """Steps from zero, int32: elementwise."""
    steps = nearest_steps(jnp.abs(values), scale, 7 if fmt.symmetric else LARGEST_CODE)
    return jnp.where(values < 0, -steps, steps)


# --- whole arrays


def least_code(fmt: Int4) -> int:
    """The least unsigned code. The published 16-level rule uses -8; other symmetric codes go from -7 to 7."""
    return 1 if fmt.symmetric and fmt.rule != "compressed-tensors" else 0


def quantize_blocks(x: jax.Array, fmt: Int4) -> Blocks:
    """x [..., C], padded with zeros to whole blocks. A block with NaN or infinity has scale NaN and codes of zero."""
    dtype, size = jnp.dtype(fmt.scale_dtype), fmt.group_size
    x = flush(widened(x))
    x = jnp.pad(narrowed(x, dtype), [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)])
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    rule = {"deploy": deploy, "slime": slime, "compressed-tensors": compressed_tensors}[fmt.rule]
    raw, zero, scale = rule(blocks, fmt)
    bad, zero, scale = poisoned(magnitude_bits(blocks).max(axis=-1), zero, scale, fmt)
    return Blocks(jnp.where(bad[..., None], zero[..., None], raw), zero, scale)


def poisoned(bits: jax.Array, zero: jax.Array, scale: jax.Array, fmt: Int4) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether a block has NaN, infinity or too large a scale, its code of zero and its scale then, from the bits of its
    largest magnitude: elementwise."""
    bad = (bits >= INFINITY_BITS) | (magnitude_bits(scale) >= INFINITY_BITS)
    return bad, jnp.where(bad, SYMMETRIC_ZERO if fmt.symmetric else 0, zero), jnp.where(bad, jnp.nan, scale)


def _line_by_line(blocks: jax.Array) -> jax.Array:
    """[..., B, b] -> [..., B * b]."""
    *lines, count, size = blocks.shape
    return blocks.reshape(*lines, count * size)


def codes(blocks: Blocks, fmt: Int4) -> jax.Array:
    """The codes limited to the range of the format: int32 [..., B, b]."""
    return jnp.clip(blocks.raw, least_code(fmt), LARGEST_CODE)


def clipped(x: jax.Array, fmt: Int4) -> jax.Array:
    """Mask of the elements of x [..., C] whose codes are limited."""
    blocks = quantize_blocks(x, fmt)
    outside = blocks.raw != codes(blocks, fmt)
    return _line_by_line(outside)[..., : x.shape[-1]]


def decode(steps: jax.Array, scale: jax.Array, fmt: Format) -> jax.Array:
    """Steps from zero times the scale, rounded once to the deployment dtype; float32."""
    values = narrowed(steps.astype(jnp.float32) * scale[..., None], jnp.dtype(fmt.scale_dtype))
    return jnp.where(jnp.isnan(values), jnp.nan, values)  # the same NaN on every platform


def fake_quantize(x: jax.Array, fmt: Int4) -> jax.Array:
    """x [..., C] -> the numbers that its codes decode to, in x's dtype."""
    blocks = quantize_blocks(x, fmt)
    values = decode(codes(blocks, fmt) - blocks.zero[..., None], blocks.scale, fmt)
    return _line_by_line(values)[..., : x.shape[-1]].astype(x.dtype)


def quantize(x: jax.Array, fmt: Int4) -> tuple[jax.Array, ...]:
    """x [..., C] -> bytes of two codes, scales and, where asymmetric, zero points."""
    blocks = quantize_blocks(x, fmt)
    code = _line_by_line(codes(blocks, fmt).astype(jnp.uint8))
    zero = blocks.zero.astype(jnp.uint8)
    if code.shape[-1] % 2:
        code = jnp.concatenate([code, zero[..., -1:]], axis=-1)
    packed = code[..., 0::2] | (code[..., 1::2] << 4)
    scale = blocks.scale.astype(fmt.scale_dtype)
    return (packed, scale) if fmt.symmetric else (packed, scale, zero)


def dequantize(
    data: jax.Array, scale: jax.Array, zero: jax.Array | None, fmt: Format, columns: int, dtype: jnp.dtype
) -> jax.Array:
    """The inverse: [..., columns] of `dtype`."""
    code = _line_by_line(jnp.stack([data & 15, data >> 4], axis=-1))
    code = code[..., : scale.shape[-1] * fmt.length].reshape(*scale.shape, fmt.length).astype(jnp.int32)
    middle = SYMMETRIC_ZERO if zero is None else zero[..., None].astype(jnp.int32)
    scale = flush(widened(scale))
    values = decode(code - middle, jnp.where(jnp.isfinite(scale), scale, jnp.nan), fmt)
    return _line_by_line(values)[..., :columns].astype(dtype)


def slime(blocks: jax.Array, fmt: Int4) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Columns A (symmetric: the trainer) and B (asymmetric: the kernel, whose range may exclude zero).

    The scale is not rounded, so each element is divided by it. Codes above 15, which the kernel's packing carries into
    the next nibble, are returned raw.
    """
    if fmt.symmetric:
        amax = jnp.abs(blocks).max(axis=-1)
        scale = jnp.maximum(quotient(amax, 7.0), jnp.float32(1e-5))
        zero = jnp.full(scale.shape, SYMMETRIC_ZERO, jnp.int32)
    else:
        low = blocks.min(axis=-1)
        scale = jnp.maximum((blocks.max(axis=-1) - low) * jnp.float32(1 / 15), jnp.float32(1e-5))
        zero = jnp.clip(-jnp.rint(quotient(low, scale)), 0, 15).astype(jnp.int32)
    steps = jnp.rint(quotient(blocks, scale[..., None]))
    return jnp.clip(steps, -1024, 1024).astype(jnp.int32) + zero[..., None], zero, scale


def compressed_tensors(blocks: jax.Array, fmt: Int4) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Column C, as its CPU path computes it: every operation rounds to the scale's dtype.

    The scale of a block of zeros is the dtype's epsilon. Zero points are added before rounding.
    """
    dtype = jnp.dtype(fmt.scale_dtype)

    def rounded(x: jax.Array) -> jax.Array:
        return narrowed(x, dtype)

    low, high = jnp.minimum(blocks.min(axis=-1), 0), jnp.maximum(blocks.max(axis=-1), 0)
    if fmt.symmetric:
        scale = rounded_quotient(jnp.maximum(-low, high), 7.5, dtype)
        zero = jnp.zeros(scale.shape, jnp.float32)
    else:
        scale = rounded_quotient(rounded(high - low), 15.0, dtype)
        divisor = jnp.where(scale == 0, 1, scale)
        zero = jnp.clip(rounded(-8 - rounded_quotient(low, divisor, dtype)), -8, 7)
        zero = jnp.where(scale == 0, 0, jnp.rint(zero))
    scale = jnp.where(scale == 0, jnp.float32(jnp.finfo(dtype).eps), scale)
    steps = rounded_quotient(blocks, scale[..., None], dtype)
    raw = jnp.rint(steps if fmt.symmetric else rounded(steps + zero[..., None]))
    return jnp.clip(raw, -1024, 1024).astype(jnp.int32) + SYMMETRIC_ZERO, zero.astype(jnp.int32) + SYMMETRIC_ZERO, scale
