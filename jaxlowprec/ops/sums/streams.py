"""Random words for sums over devices: each device and piece has its own (numerics.md 16)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.ops.byte_collectives import Axes
from jaxlowprec.ops.quantize.philox import words_at

PIECES, GATHERED, ROUNDED, FURTHER_SUMS = 6, 7, 8, 12
"""Streams: of the pieces that a device sends, of the sum that it sends to all, of what it rounds to bfloat16, and of
the sums that follow the first."""


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
