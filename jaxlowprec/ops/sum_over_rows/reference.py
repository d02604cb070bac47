"""Sums over rows in pure JAX (numerics.md 12.3)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxlowprec.ops.rounding import widened

SIXTEENS = 4
"""Sixteens of rows in a part."""

PART = 16 * SIXTEENS
"""Rows of a part: kSummedRows of xla_ffi/problems.h."""

APART = 8
"""Sequences of parts: kAddedApart there."""


def sum_over_rows(x: jax.Array) -> jax.Array:
    """[..., R, C] -> float32 [..., C].

    Rows are added in sixteens, these in parts of 64 rows, then every eighth part from each of the first ones on, and
    these eight sums; all in ascending order.
    """
    *batch, rows, columns = x.shape
    turns = -(-rows // (PART * APART))
    x = jnp.pad(widened(x), [(0, 0)] * len(batch) + [(0, turns * PART * APART - rows), (0, 0)])
    x = x.reshape(*batch, turns, APART, SIXTEENS, 16, columns)
    parts = jnp.moveaxis(_in_order(_in_order(x, -2), -2), -3, 0)
    apart, _ = jax.lax.scan(lambda total, part: (total + part, None), jnp.zeros(parts.shape[1:]), parts)
    total = _in_order(apart, -2)
    return jnp.where(total == 0, 0.0, total)  # sums begin with 0, and 0 + -0 is 0: XLA takes it for -0


def _in_order(x: jax.Array, axis: int) -> jax.Array:
    """The sum along an axis in ascending order."""
    first, *rest = (jnp.take(x, i, axis) for i in range(x.shape[axis]))
    for part in rest:
        first = first + part
    return first
