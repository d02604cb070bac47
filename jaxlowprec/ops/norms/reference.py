"""Norms of rows in float32: the rules of numerics.md 12. Every operation is rounded separately."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxlowprec.ops.exact import quotient, root
from jaxlowprec.ops.rounding import rounded, widened

LANES = 256
"""Partial sums of a row."""


def row_sums(x: jax.Array) -> jax.Array:
    """float32 [..., C] -> [..., 1]: each element is added to the sum of its place modulo 256, in ascending order, then
    halves of these sums are added."""
    columns = x.shape[-1]
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -columns % LANES)])
    parts = padded.reshape(*x.shape[:-1], -(-columns // LANES), LANES)
    first = parts[..., 0, :]
    total = jnp.where(first == 0, 0.0, first)  # 0 + first, which XLA takes for `first`, though -0 becomes 0
    for place in range(1, parts.shape[-2]):
        total = total + parts[..., place, :]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total


def row_means(x: jax.Array) -> jax.Array:
    """float32 [..., C] -> [..., 1]: the sum times the rounded reciprocal of C."""
    return rounded(row_sums(x) * jnp.float32(1 / x.shape[-1]))


def weights(gamma: jax.Array, zero_centered: bool) -> jax.Array:
    """The factors of normalised rows, float32: gamma, or 1 + gamma."""
    gamma = widened(gamma)
    return jnp.float32(1) + gamma if zero_centered else gamma


def inverse_root(mean_square: jax.Array, epsilon: float) -> jax.Array:
    """1 / sqrt(mean_square + epsilon), each operation rounded."""
    return quotient(1.0, root(mean_square + jnp.float32(epsilon)))


def rms_norm(rows: jax.Array, weight: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
    """float32 [..., R, C], weight [..., C] -> the normed rows, and 1 / rms [..., R]."""
    inverse = inverse_root(row_means(rounded(rows * rows)), epsilon)
    return (rows * inverse) * weight[..., None, :], inverse[..., 0]


def rms_norm_gradient(dy: jax.Array, rows: jax.Array, weight: jax.Array, inverse: jax.Array) -> jax.Array:
    """dy and rows, float32 [..., R, C] -> the gradient of the rows."""
    inverse = inverse[..., None]
    normed = rows * inverse
    scaled = rounded(dy * weight[..., None, :])
    return (scaled - rounded(normed * row_means(rounded(scaled * normed)))) * inverse


def layer_norm(
    rows: jax.Array, weight: jax.Array, beta: jax.Array | None, epsilon: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """float32 [..., R, C], weight and beta [..., C] -> the normed rows, their means and 1 / deviations [..., R]."""
    mean = row_means(rows)
    centered = rows - mean
    inverse = inverse_root(row_means(rounded(centered * centered)), epsilon)
    y = rounded((centered * inverse) * weight[..., None, :])
    y = y if beta is None else y + beta[..., None, :]
    return y, mean[..., 0], inverse[..., 0]


def layer_norm_gradient(
    dy: jax.Array, rows: jax.Array, weight: jax.Array, mean: jax.Array, inverse: jax.Array
) -> jax.Array:
    """dy and rows, float32 [..., R, C] -> the gradient of the rows."""
    inverse = inverse[..., None]
    normed = (rows - mean[..., None]) * inverse
    scaled = rounded(dy * weight[..., None, :])
    slope = rounded(normed * row_means(rounded(scaled * normed)))
    return ((scaled - row_means(scaled)) - slope) * inverse


def parameter_gradients(dy: jax.Array, rows: jax.Array, *saved: jax.Array) -> list[jax.Array]:
    """dy and rows, float32 [..., R, C], and what a norm has saved -> the gradients of weight and beta, float32
    [..., C]."""
    *mean, inverse = saved
    normed = (rows - mean[0][..., None] if mean else rows) * inverse[..., None]
    return [(dy * normed).sum(axis=-2), dy.sum(axis=-2)]
