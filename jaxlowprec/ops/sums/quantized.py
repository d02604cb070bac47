"""Sums over devices that travel quantised, in two stages, or stochastically rounded to bfloat16 (numerics.md 16).

Each device cuts its partial result into one piece for each device, quantises the pieces and sends each to its device,
which decodes and adds up, in float32 and in the order of the devices: that is a reduce-scatter. For an all-reduce the
sums are quantised again and gathered. Each device and piece has random words of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.formats import MXFP8, Format
from jaxlowprec.ops.byte_collectives import Axes, exchanged, gathered, size_along
from jaxlowprec.ops.dequantize import dequantize
from jaxlowprec.ops.quantize.api import quantize
from jaxlowprec.ops.quantize.random_bits import philox4x32, words_at
from jaxlowprec.ops.rounding import INFINITY_BITS, from_bits, magnitude_bits

PIECES, GATHERED, ROUNDED, FURTHER_SUMS = 6, 7, 8, 12
"""Streams: of the pieces that a device sends, of the sum that it sends to all, of what it rounds to bfloat16, and of
the sums that follow the first."""

_EACH = 8  # elements that one call of Philox serves, by 16 bits
FORMAT = MXFP8()
_LINE = 1024  # elements of a line, where the pieces' own last axis has no whole blocks


def index_along(axes: Axes) -> jax.Array:
    """The device's index along mesh axes, the major one first; 0 along none. uint32 []."""
    names: Any = tuple(axes)
    return jax.lax.axis_index(names).astype(jnp.uint32) if names else jnp.zeros((), jnp.uint32)


def own_words(words: jax.Array, axes: Axes, stream: int = ROUNDED) -> jax.Array:
    """Words [2] that only the device at its place along the axes has."""
    return words_at(words, index_along(axes), stream=stream)


def words_of_pieces(words: jax.Array, axes: Axes, elsewhere: Axes, count: int) -> jax.Array:
    """Words [count, 2] for the pieces that the device at its place along the axes sends."""
    piece = jnp.arange(count, dtype=jnp.uint32)
    device, other = (jnp.broadcast_to(index_along(a), piece.shape) for a in (axes, elsewhere))
    return words_at(words, device, piece, other, stream=PIECES)


def stochastic_bfloat16(x: jax.Array, words: jax.Array) -> jax.Array:
    """float32 numbers, each one of the two bfloat16 numbers beside x, as float32: unbiased.

    Element i of the flattened x takes the half-word i mod 8 of Philox's result for the counter (i // 8, 0, 0, 1),
    low halves first. What has a bfloat16 number keeps it; NaN and infinity stay. Above the largest finite bfloat16 a
    number becomes that or infinity (numerics.md 16).

    Arguments:
        x: float32.
        words: uint32 [2].
    """
    calls = jnp.arange(-(-max(x.size, 1) // _EACH), dtype=jnp.uint32)
    zero = jnp.zeros_like(calls)
    drawn = jnp.stack(philox4x32((calls, zero, zero, zero + 1), (words[0], words[1])), axis=-1)
    halves = jnp.stack([drawn & 0xFFFF, drawn >> 16], axis=-1).reshape(-1)[: math.prod(x.shape)].reshape(x.shape)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    rounded = from_bits((bits + halves) & jnp.uint32(0xFFFF0000))
    return jnp.where(magnitude_bits(x) < INFINITY_BITS, rounded, x)


def reduce_scatter(
    partial: jax.Array, axes: Axes, dim: int, words: jax.Array, elsewhere: Axes = (), fmt: Format = FORMAT
) -> jax.Array:
    """The device's part along `dim` of the sum over the axes, float32.

    Arguments:
        partial: float; `dim` is a multiple of the number of devices.
        words: uint32 [2], the same on all devices.
        elsewhere: further mesh axes along which random bits differ.
    """
    devices = size_along(axes)
    before, size, after = partial.shape[:dim], partial.shape[dim], partial.shape[dim + 1 :]
    cut = partial.reshape(*before, devices, size // devices, *after)
    pieces = jnp.moveaxis(cut, dim, 0)
    total = _added_up(_in_lines(pieces, fmt), axes, words, elsewhere, fmt)
    return _out_of_lines(total, pieces.shape[1:])


def all_reduce(
    partial: jax.Array, axes: Axes, words: jax.Array, elsewhere: Axes = (), fmt: Format = FORMAT
) -> jax.Array:
    """The sum over the axes on each of their devices, float32. See `reduce_scatter`."""
    devices = size_along(axes)
    whole = devices * _line(-(-partial.size // devices), fmt)
    flat = jnp.pad(partial.reshape(-1), (0, -partial.size % whole))
    total = _added_up(flat.reshape(devices, -1, whole // devices), axes, words, elsewhere, fmt)
    own = own_words(words, (*axes, *elsewhere), GATHERED)
    q = quantize(total, fmt, rounding="stochastic", key=own)
    rows = devices * total.shape[0]
    q = dataclasses.replace(jax.tree.map(lambda leaf: gathered(leaf, axes), q), matrix_shape=(rows, total.shape[1]))
    return dequantize(q, dtype=jnp.float32).reshape(-1)[: partial.size].reshape(partial.shape)


def _added_up(pieces: jax.Array, axes: Axes, words: jax.Array, elsewhere: Axes, fmt: Format) -> jax.Array:
    """The sum [R, C] of what the devices have for this one. `pieces`: [n, R, C], one for each device."""
    devices = pieces.shape[0]
    q = quantize(pieces, fmt, rounding="stochastic", key=words_of_pieces(words, axes, elsewhere, devices))
    received = dequantize(jax.tree.map(functools.partial(exchanged, axes=axes), q), dtype=jnp.float32)
    total = received[0]
    for device in range(1, devices):
        total = total + received[device]
    return total


def _line(size: int, fmt: Format) -> int:
    """The length of the lines in which a piece of this size is quantised."""
    return min(_LINE, fmt.length * max(1, -(-size // fmt.length)))


def _in_lines(pieces: jax.Array, fmt: Format) -> jax.Array:
    """Pieces [n, ...] as matrices [n, R, C] of whole blocks: their own last axis is C if it has whole blocks."""
    count, *shape = pieces.shape
    if len(shape) > 1 and shape[-1] % fmt.length == 0:
        return pieces.reshape(count, -1, shape[-1])
    size = math.prod(shape)
    line = _line(size, fmt)
    flat = jnp.pad(pieces.reshape(count, size), ((0, 0), (0, -size % line)))
    return flat.reshape(count, -1, line)


def _out_of_lines(lines: jax.Array, shape: tuple[int, ...]) -> Any:
    """A piece of this shape from its lines [R, C]."""
    return lines.reshape(-1)[: math.prod(shape)].reshape(shape)
