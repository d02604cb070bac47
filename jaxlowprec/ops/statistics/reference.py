"""Counts and sums of a quantisation in pure JAX."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.formats import Format
from jaxlowprec.ops.dequantize import dequantize_rows
from jaxlowprec.ops.quantize.reference import blocks_of
from jaxlowprec.ops.rounding import from_bits, widened

SUMS = (
    "elements",
    "zeros",
    "underflow",
    "saturation",
    "nonfinite",
    "poisoned",
    "error",
    "magnitude",
    "square_error",
    "energy",
    "ranges",
    "runs",
)
"""The names of the first sums. From "error" on, they are sums of numbers times the unit."""

SCALES_FROM, SCALES, CODES = 16, 256, 32
CODES_FROM = SCALES_FROM + SCALES
LENGTH = CODES_FROM + CODES
"""How many sums there are: these, blocks by their scale's bin, elements by their code's bin."""

RUN = 128
"""Elements along the quantised axis whose range is taken where a tensor or a line has one scale."""

EVERY = 16
"""Ranges are taken of every 16th line."""


def inverse_power(amax: jax.Array) -> jax.Array:
    """A power of two that brings amax near 1, so that squares stay within float32's range; products by it are exact."""
    exponent = jnp.clip(jax.lax.bitcast_convert_type(amax, jnp.uint32) >> 23, 1, 253)
    return from_bits((254 - exponent) << 23)


def moments(x: jax.Array) -> jax.Array:
    """x [..., R, C] -> [..., 2]: the largest finite magnitude, and the root mean square; the others count as zeros."""
    magnitude = jnp.abs(_without_subnormals(widened(jnp.where(jnp.isfinite(x), x, 0))))
    largest = magnitude.max(axis=(-2, -1), initial=0)
    unit = inverse_power(largest)
    scaled = magnitude * unit[..., None, None]
    return jnp.stack([largest, jnp.sqrt(_sum(scaled * scaled) / max(x.shape[-2] * x.shape[-1], 1)) / unit], axis=-1)


def outliers(x: jax.Array, threshold: jax.Array) -> jax.Array:
    """How many finite elements of each column exceed the threshold: x [..., R, C], [...] -> int32 [..., C]."""
    magnitude = jnp.abs(widened(x))
    beyond = jnp.isfinite(magnitude) & (magnitude > threshold[..., None, None])
    return beyond.sum(axis=-2, dtype=jnp.int32)


def sums(
    x: jax.Array, unit: jax.Array, data: jax.Array, scale: jax.Array, amax: jax.Array | None, fmt: Format
) -> jax.Array:
    """Rows x [..., R, C] and what they were quantised to -> float32 [..., LENGTH].

    Arguments:
        unit: [...], a power of two that brings the largest magnitude near 1.
        data, scale, amax: codes of the rows with their scales.
    """
    if not x.size:
        return jnp.zeros((*x.shape[:-2], LENGTH), jnp.float32)
    columns = x.shape[-1]

    def decoded(codes: jax.Array) -> jax.Array:
        return dequantize_rows(codes, scale, amax, fmt, columns, None, jnp.float32)

    highest = decoded(jnp.full_like(data, 0x77 if fmt.packed else fmt.maximum))
    return sums_of_rows(x, unit, (decoded(data), highest, -highest), code_bins(data, fmt, columns), scale, fmt)


def sums_of_rows(
    x: jax.Array,
    unit: jax.Array,
    decoded: Sequence[jax.Array],
    bins: jax.Array,
    scale: jax.Array,
    fmt: Format,
) -> jax.Array:
    """`sums` given `decoded`: the rows decoded, the largest and the smallest number of each element's block."""
    rows = _without_subnormals(widened(x))
    values, highest, lowest = decoded
    finite, decodes = jnp.isfinite(rows), jnp.isfinite(values)
    known, unit = finite & decodes, unit[..., None, None]
    magnitude = jnp.where(finite, jnp.abs(rows), 0)
    kept, error = (jnp.where(known, v, 0) for v in (rows * unit, values * unit - rows * unit))
    ranges, runs = _ranges(magnitude * unit, fmt)
    found = [
        _count(jnp.ones_like(known)),
        _count(rows == 0),
        _count((rows != 0) & (values == 0)),
        _count(known & (values != 0) & ((rows > highest) | (rows < lowest))),  # with a scale of 0 they underflow
        _count(~finite),
        _count(finite & ~decodes),
        _sum(error),
        _sum(jnp.abs(kept)),
        _sum(error * error),
        _sum(kept * kept),
        ranges,
        runs,
    ]
    first = jnp.stack([*found, *[jnp.zeros_like(ranges)] * (SCALES_FROM - len(found))], axis=-1)
    codes = _histogram(bins, jnp.ones_like(bins, jnp.float32), CODES)
    return jnp.concatenate([first, _scales(magnitude, scale, fmt), codes], axis=-1)


def run_length(fmt: Format) -> int:
    """How many elements along the quantised axis a range is taken of: those that share a scale."""
    return RUN if fmt.scaling in ("tensor", "rows") else fmt.length


def code_bins(data: jax.Array, fmt: Format, columns: int) -> jax.Array:
    """Codes [..., R, bytes] -> the bins of the elements [..., R, columns]: 4-bit codes, exponents of 8-bit floats, how
    many bits the magnitudes of 8-bit integers have."""
    if fmt.packed:
        return jnp.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)[..., :columns]
    if fmt.element == "int8":
        return 32 - jax.lax.clz(jnp.abs(data.astype(jnp.int32)))
    return (jax.lax.bitcast_convert_type(data, jnp.uint8) & 0x7F) >> fmt.numbers.mantissa_bits


def scale_bins(scale: jax.Array, fmt: Format) -> jax.Array:
    """The bins of scales: bytes as they are, of wider ones the exponent as float32 has it."""
    if fmt.scaling in ("two_level", "e8m0"):
        return jax.lax.bitcast_convert_type(scale, jnp.uint8)
    return (jax.lax.bitcast_convert_type(scale.astype(jnp.float32), jnp.uint32) >> 23) & 0xFF


def _scales(magnitude: jax.Array, scale: jax.Array, fmt: Format) -> jax.Array:
    """How many blocks that are not zero have each scale; lines, where all have the tensor's."""
    bins = scale_bins(scale, fmt)
    if fmt.scaling == "tensor":
        used = magnitude.max(axis=-1, initial=0)[..., None] > 0
        bins = jnp.broadcast_to(bins[..., None, None], used.shape)
    elif fmt.scaling == "rows":
        used = magnitude.max(axis=-1, keepdims=True, initial=0) > 0
    else:
        used = blocks_of(magnitude, fmt).max(axis=(-3, -1), initial=0) > 0
    return _histogram(bins, used.astype(jnp.float32), SCALES)


def _ranges(magnitude: jax.Array, fmt: Format) -> tuple[jax.Array, jax.Array]:
    """The sum of largest over median magnitude of whole runs whose median is not zero; how many these are."""
    length = run_length(fmt)
    lines = magnitude[..., ::EVERY, : magnitude.shape[-1] // length * length]
    runs = lines.shape[-2] * (lines.shape[-1] // length)
    ascending = jnp.sort(lines.reshape(*lines.shape[:-2], runs, length), axis=-1)
    median = ascending[..., (length - 1) // 2] / 2 + ascending[..., length // 2] / 2
    spread = median > 0
    ratio = jnp.where(spread, ascending[..., -1] / jnp.where(spread, median, 1), 0)
    return ratio.sum(axis=-1), spread.astype(jnp.float32).sum(axis=-1)


def _histogram(bins: jax.Array, weights: jax.Array, length: int) -> jax.Array:
    """[..., n, m] -> the sum of the weights in each bin, [..., length]."""
    *batch, rows, columns = bins.shape
    matrices = math.prod(batch), rows * columns
    bins, weights = (v.reshape(matrices) for v in (bins.astype(jnp.int32), weights))
    found = jax.vmap(lambda b, w: jnp.zeros(length, jnp.float32).at[b].add(w))(bins, weights)
    return found.reshape(*batch, length)


def _without_subnormals(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.abs(x) < jnp.finfo(jnp.float32).tiny, 0, x)


def _count(mask: jax.Array) -> jax.Array:
    return _sum(mask.astype(jnp.float32))


def _sum(x: jax.Array) -> jax.Array:
    """The sum of each matrix, line by line: of many lines none gets lost in a long sum."""
    return x.sum(axis=-1).sum(axis=-1)
