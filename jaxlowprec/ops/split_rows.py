"""A tensor whose rows are split into S parts: [..., S, R, C] instead of [..., S * R, C].

Activations [batch, time, features] are such tensors. If a mesh splits both axes, the merged rows of a device would be
strided, which no sharding can express, and XLA would gather the tensor to merge them. So ops take the parts as they are
and merge the rows that each device holds.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def merged_rows(x: jax.Array) -> jax.Array:
    """[..., S, R, C] -> [..., S * R, C]."""
    *batch, s, r, c = x.shape
    return x.reshape(*batch, s * r, c)


def split_rows(x: jax.Array, parts: int, rows: int) -> jax.Array:
    """The inverse: that many parts, each of that many rows; both are given since parts may have no elements."""
    *batch, _, c = x.shape
    return x.reshape(*batch, parts, rows, c)


def merged_columns(x: jax.Array) -> jax.Array:
    """[..., S, C, R] -> [..., C, S * R]."""
    *batch, s, c, r = x.shape
    return jnp.moveaxis(x, -3, -2).reshape(*batch, c, s * r)


def split_columns(x: jax.Array, parts: int, columns: int) -> jax.Array:
    """The inverse: that many parts, each of that many columns."""
    *batch, c, _ = x.shape
    return jnp.moveaxis(x.reshape(*batch, c, parts, columns), -2, -3)
