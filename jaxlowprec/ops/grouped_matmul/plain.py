"""Products of rows in groups in high precision, accumulated in float32, and their derivatives.

`jax.lax.ragged_dot` where XLA has a good one. On CPUs it multiplies all rows by all weights (jaxlib 0.10.2: with 16
groups 35 times as long as a dense product), so there each group's rows are multiplied in chunks.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec import wiring
from jaxlowprec.ops.grouped_matmul.groups import Groups, Slots
from jaxlowprec.ops.grouped_matmul.quantize_op import over_batches
from jaxlowprec.ops.grouped_matmul.reference import CHUNK, by_chunks, chunk_of


def plain_rows(x: jax.Array, w: jax.Array, sizes: jax.Array, out_dtype: Any) -> jax.Array:
    """x [..., T, K], w [..., E, K, N], sizes int32 [..., E] -> [..., T, N]; rows in no group give zeros."""
    dtype = jnp.promote_types(x.dtype, w.dtype)
    return _rows_op(jnp.dtype(out_dtype))(x.astype(dtype), w.astype(dtype), sizes)[0]


def plain_wgrad(x: jax.Array, dy: jax.Array, sizes: jax.Array, out_dtype: Any) -> jax.Array:
    """x [..., T, K], dy [..., T, N], sizes int32 [..., E] -> [..., E, K, N], each group's x transposed @ dy."""
    dtype = jnp.promote_types(x.dtype, dy.dtype)
    return _wgrad_op(jnp.dtype(out_dtype))(x.astype(dtype), dy.astype(dtype), sizes)[0]


@functools.cache
def _rows_op(out_dtype: Any):
    def chunks(x, sizes, w):
        rows_of = chunk_of(x)

        def multiply(row, group):
            return jnp.matmul(rows_of(row), w[group], preferred_element_type=jnp.float32)

        return by_chunks(sizes, x.shape[0], w.shape[-1], out_dtype, multiply)

    def ragged(x, sizes, w):
        there = Groups.of(sizes, x.shape[0]).of_rows() < sizes.shape[0]
        return jnp.where(there[:, None], ragged_rows(x, w, sizes), 0.0).astype(out_dtype)

    return wiring.define(
        "jaxlowprec_grouped_plain_matmul",
        rule=wiring.Rule("... t k, ... e k n, ... e -> ... t n", reductions=("k",), whole=("t", "e")),
        outputs=lambda x, w, sizes: [((*x.shape[:-1], w.shape[-1]), out_dtype)],
        reference=lambda x, w, sizes: [over_batches(ragged)(x, sizes, w)],
        native=lambda x, w, sizes: [over_batches(chunks)(x, sizes, w)],
        platforms=("cpu",),
        when_reduced=lambda add_up, *operands: [add_up(_rows_op(jnp.dtype("float32"))(*operands)[0]).astype(out_dtype)],
    )


@functools.cache
def _wgrad_op(out_dtype: Any):
    def chunks(x, sizes, dy):
        slots = Slots.of(Groups.of(sizes, x.shape[0]), CHUNK)
        x_of, dy_of = chunk_of(x), chunk_of(dy)

        def add(dw, slot):
            row, group, valid = slot
            there = (jnp.arange(CHUNK) < valid)[:, None]
            a, b = (jnp.where(there, of(row), jnp.zeros((), x.dtype)) for of in (x_of, dy_of))
            term = jnp.einsum("tk,tn->kn", a, b, preferred_element_type=jnp.float32)
            return dw.at[group].add(term), None

        zero = jnp.zeros((sizes.shape[0], x.shape[-1], dy.shape[-1]), jnp.float32)
        return jax.lax.scan(add, zero, (slots.row, slots.group, slots.valid))[0].astype(out_dtype)

    def ragged(x, sizes, dy):
        return ragged_wgrad(x, dy, sizes).astype(out_dtype)

    return wiring.define(
        "jaxlowprec_grouped_plain_wgrad",
        rule=wiring.Rule("... t k, ... t n, ... e -> ... e k n", whole=("t", "e")),
        outputs=lambda x, dy, sizes: [((*sizes.shape, x.shape[-1], dy.shape[-1]), out_dtype)],
        reference=lambda x, dy, sizes: [over_batches(ragged)(x, sizes, dy)],
        native=lambda x, dy, sizes: [over_batches(chunks)(x, sizes, dy)],
        platforms=("cpu",),
    )


# --- by XLA's ragged products, without batch axes


def ragged_rows(x: jax.Array, w: jax.Array, sizes: jax.Array, precision: Any = None) -> jax.Array:
    """x [T, K], w [E, K, N] of one dtype -> float32 [T, N]. Rows in no group: anything.

    `ragged_dot` may multiply a group's rows by other groups' weights and zeros, where NaN would not stay: a column of
    weights that has a number that is not finite gives NaN to all rows of its own group, and to no others.
    """
    groups, experts = Groups.of(sizes, x.shape[0]), sizes.shape[0]
    finite = jnp.isfinite(w).all(axis=-2)
    clean = jnp.where(finite[:, None], w, jnp.zeros((), w.dtype))
    y = jax.lax.ragged_dot(x, clean, groups.count, precision=precision, preferred_element_type=jnp.float32)
    return jnp.where(finite[jnp.minimum(groups.of_rows(), experts - 1)], y, jnp.nan)


def ragged_wgrad(x: jax.Array, dy: jax.Array, sizes: jax.Array, precision: Any = None) -> jax.Array:
    """x [T, K], dy [T, N] of one dtype -> float32 [E, K, N]."""
    dims = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    counts = Groups.of(sizes, x.shape[0]).count
    return jax.lax.ragged_dot_general(x, dy, counts, dims, precision=precision, preferred_element_type=jnp.float32)


# Each is linear in both operands, and their derivatives are one another.


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def rows_product(x: jax.Array, w: jax.Array, sizes: jax.Array, out_dtype: Any) -> jax.Array:
    """`plain_rows`, differentiable as often as wanted; gradients have the dtypes of what they are gradients of."""
    return plain_rows(x, w, sizes, out_dtype)


def _rows_forward(x, w, sizes, out_dtype):
    return rows_product(x, w, sizes, out_dtype), (x, w, sizes)


def _rows_backward(out_dtype, residuals, dy):
    x, w, sizes = residuals
    dx = rows_product(dy, jnp.swapaxes(w, -1, -2), sizes, x.dtype)
    return dx, wgrad_product(x, dy, sizes, w.dtype), None


rows_product.defvjp(_rows_forward, _rows_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def wgrad_product(x: jax.Array, dy: jax.Array, sizes: jax.Array, out_dtype: Any) -> jax.Array:
    """`plain_wgrad`, likewise."""
    return plain_wgrad(x, dy, sizes, out_dtype)


def _wgrad_forward(x, dy, sizes, out_dtype):
    return wgrad_product(x, dy, sizes, out_dtype), (x, dy, sizes)


def _wgrad_backward(out_dtype, residuals, g):
    x, dy, sizes = residuals
    dx = rows_product(dy, jnp.swapaxes(g, -1, -2), sizes, x.dtype)
    return dx, rows_product(x, g, sizes, dy.dtype), None


wgrad_product.defvjp(_wgrad_forward, _wgrad_backward)
