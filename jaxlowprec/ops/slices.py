"""A tensor whose rows lie in two axes: [..., S, R, C], in slices, instead of [..., S * R, C].

As activations do, [batch, time, features]. Merged, two split axes would be strided, which no mesh axis can say, and XLA
would gather the tensor to merge it. So ops take the slices as they are, and merge what each device has of them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def merged_rows(x: jax.Array) -> jax.Array:
    """[..., S, R, C] -> [..., S * R, C]."""
    *batch, s, r, c = x.shape
    return x.reshape(*batch, s * r, c)


def sliced_rows(x: jax.Array, slices: int, rows: int) -> jax.Array:
    """The inverse: of that many slices, each of that many rows, which slices without elements do not tell."""
    *batch, _, c = x.shape
    return x.reshape(*batch, slices, rows, c)


def merged_columns(x: jax.Array) -> jax.Array:
    """[..., S, C, R] -> [..., C, S * R]."""
    *batch, s, c, r = x.shape
    return jnp.moveaxis(x, -3, -2).reshape(*batch, c, s * r)


def sliced_columns(x: jax.Array, slices: int, columns: int) -> jax.Array:
    """The inverse: of that many slices, each of that many columns."""
    *batch, c, _ = x.shape
    return jnp.moveaxis(x.reshape(*batch, c, slices, columns), -2, -3)
