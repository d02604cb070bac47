"""Sums over devices that travel quantised, in two stages (numerics.md 16).

Each device cuts its partial result into one piece for each device, quantises the pieces and sends each to its device,
which decodes and adds up, in float32 and in the order of the devices: that is a reduce-scatter. For an all-reduce the
sums are quantised again and gathered.
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
from jaxlowprec.ops.dequantize.api import dequantize
from jaxlowprec.ops.quantize.api import quantize
from jaxlowprec.ops.sums.streams import GATHERED, own_words, words_of_pieces

FORMAT = MXFP8()
_LINE = 1024  # elements of a line, where the pieces' own last axis has no whole blocks


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
    return dequantize(q, jnp.float32).reshape(-1)[: partial.size].reshape(partial.shape)


def _added_up(pieces: jax.Array, axes: Axes, words: jax.Array, elsewhere: Axes, fmt: Format) -> jax.Array:
    """The sum [R, C] of what the devices have for this one. `pieces`: [n, R, C], one for each device."""
    devices = pieces.shape[0]
    q = quantize(pieces, fmt, rounding="stochastic", key=words_of_pieces(words, axes, elsewhere, devices))
    received = dequantize(jax.tree.map(functools.partial(exchanged, axes=axes), q), jnp.float32)
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
