"""Products of rows in groups in high precision, accumulated in float32, and their derivatives.

Each group's rows are multiplied in chunks. XLA's `ragged_dot` multiplies all rows by all weights, on CPUs (jaxlib
0.10.2, 16 groups: 35 times as long as a dense product) and, compiled by jaxlib 0.12, on NVIDIA GPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec import wiring
from jaxlowprec.ops.checks import wider_dtype
from jaxlowprec.ops.grouped_matmul import ragged
from jaxlowprec.ops.grouped_matmul.chunks import chunk_rows
from jaxlowprec.ops.grouped_matmul.groups import Groups, Slots
from jaxlowprec.ops.grouped_matmul.quantize_op import over_batches
from jaxlowprec.ops.grouped_matmul.reference import CHUNK, by_chunks, chunk_of


def plain_rows(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    out_dtype: jax.typing.DTypeLike,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """x [..., T, K], w [..., E, K, N], sizes int32 [..., E] -> [..., T, N]; rows in no group give zeros."""
    dtype = wider_dtype(x.dtype, w.dtype)
    return _rows_op(jnp.dtype(out_dtype), precision)(x.astype(dtype), w.astype(dtype), sizes)[0]


def plain_wgrad(
    x: jax.Array,
    dy: jax.Array,
    sizes: jax.Array,
    out_dtype: jax.typing.DTypeLike,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """x [..., T, K], dy [..., T, N], sizes int32 [..., E] -> [..., E, K, N], each group's x transposed @ dy."""
    dtype = wider_dtype(x.dtype, dy.dtype)
    return _wgrad_op(jnp.dtype(out_dtype), precision)(x.astype(dtype), dy.astype(dtype), sizes)[0]


def _define(
    name: str,
    rule: wiring.ShardingRule,
    outputs: Callable,
    chunks: Callable,
    on_tpu: Callable | None = None,
    when_reduced: Callable | None = None,
) -> wiring.Op:
    """The op of operands x, other, sizes that `chunks(rows of one, x, sizes, other)` computes, and on TPUs
    `on_tpu(x, sizes, other)`."""

    def by(rows_of_one: Callable) -> Callable:
        def run(x: jax.Array, other: jax.Array, sizes: jax.Array) -> Sequence[jax.Array]:
            chunk = rows_of_one(x.shape[-2], sizes.shape[-1])
            return [over_batches(functools.partial(chunks, chunk))(x, sizes, other)]

        return run

    def run_on_tpu(x: jax.Array, other: jax.Array, sizes: jax.Array) -> Sequence[jax.Array]:
        return [over_batches(on_tpu)(x, sizes, other)]  # type: ignore[arg-type]

    in_chunks = by(chunk_rows)
    return wiring.define(
        name,
        rule=rule,
        outputs=outputs,
        reference=by(lambda rows, experts: CHUNK),
        portable={None: in_chunks, "tpu": run_on_tpu} if on_tpu else in_chunks,
        elsewhere="portable",
        by_reference=("cpu",),
        when_reduced=when_reduced,
    )


@functools.cache
def _rows_op(out_dtype: jax.typing.DTypeLike, precision: jax.lax.PrecisionLike) -> wiring.Op:
    return _define(
        "jaxlowprec_grouped_plain_matmul",
        wiring.ShardingRule("... t k, ... e k n, ... e -> ... t n", reductions=("k",), whole=("t", "e")),
        lambda x, w, sizes: [((*x.shape[:-1], w.shape[-1]), out_dtype)],
        functools.partial(rows_by_chunks, out_dtype, precision),
        functools.partial(ragged.plain_rows, out_dtype, precision),
        lambda add_up, *operands: [add_up(_rows_op(jnp.dtype("float32"), precision)(*operands)[0]).astype(out_dtype)],
    )


@functools.cache
def _wgrad_op(out_dtype: jax.typing.DTypeLike, precision: jax.lax.PrecisionLike) -> wiring.Op:
    return _define(
        "jaxlowprec_grouped_plain_wgrad",
        wiring.ShardingRule("... t k, ... t n, ... e -> ... e k n", whole=("t", "e")),
        lambda x, dy, sizes: [((*sizes.shape, x.shape[-1], dy.shape[-1]), out_dtype)],
        functools.partial(wgrad_by_chunks, out_dtype, precision),
    )


# --- without batch axes


def rows_by_chunks(
    out_dtype: jax.typing.DTypeLike,
    precision: jax.lax.PrecisionLike,
    chunk: int,
    x: jax.Array,
    sizes: jax.Array,
    w: jax.Array,
) -> jax.Array:
    """`plain_rows`, `chunk` rows at a time."""
    rows_of = chunk_of(x, chunk)

    def multiply(row: jax.Array, group: jax.Array) -> jax.Array:
        return jnp.matmul(rows_of(row), w[group], precision=precision, preferred_element_type=jnp.float32)

    return by_chunks(sizes, x.shape[0], w.shape[-1], out_dtype, multiply, chunk)


def wgrad_by_chunks(
    out_dtype: jax.typing.DTypeLike,
    precision: jax.lax.PrecisionLike,
    chunk: int,
    x: jax.Array,
    sizes: jax.Array,
    dy: jax.Array,
) -> jax.Array:
    """`plain_wgrad`, likewise."""
    slots = Slots.of(Groups.of(sizes, x.shape[0]), chunk).used()
    x_of, dy_of = chunk_of(x, chunk), chunk_of(dy, chunk)

    def add(dw: jax.Array, slot: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        row, group, valid = slot
        there = (jnp.arange(chunk) < valid)[:, None]
        a, b = (jnp.where(there, of(row), jnp.zeros((), x.dtype)) for of in (x_of, dy_of))
        term = jnp.einsum("tk,tn->kn", a, b, precision=precision, preferred_element_type=jnp.float32)
        return dw.at[group].add(term), None

    zero = jnp.zeros((sizes.shape[0], x.shape[-1], dy.shape[-1]), jnp.float32)
    return jax.lax.scan(add, zero, (slots.row, slots.group, slots.valid))[0].astype(out_dtype)


# Each is linear in both operands, and its derivatives are products of these two kinds.


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def rows_product(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    out_dtype: jax.typing.DTypeLike,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """`plain_rows`, differentiable any number of times; each gradient has the dtype of its primal."""
    return plain_rows(x, w, sizes, out_dtype, precision)


def _rows_forward(
    x: jax.Array, w: jax.Array, sizes: jax.Array, out_dtype: jax.typing.DTypeLike, precision: jax.lax.PrecisionLike
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return rows_product(x, w, sizes, out_dtype, precision), (x, w, sizes)


def _rows_backward(
    out_dtype: jax.typing.DTypeLike, precision: jax.lax.PrecisionLike, residuals: Any, dy: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x, w, sizes = residuals
    dx = rows_product(dy, jnp.swapaxes(w, -1, -2), sizes, x.dtype, precision)
    return dx, wgrad_product(x, dy, sizes, w.dtype, precision), None


rows_product.defvjp(_rows_forward, _rows_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def wgrad_product(
    x: jax.Array,
    dy: jax.Array,
    sizes: jax.Array,
    out_dtype: jax.typing.DTypeLike,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """`plain_wgrad`, likewise."""
    return plain_wgrad(x, dy, sizes, out_dtype, precision)


def _wgrad_forward(
    x: jax.Array, dy: jax.Array, sizes: jax.Array, out_dtype: jax.typing.DTypeLike, precision: jax.lax.PrecisionLike
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return wgrad_product(x, dy, sizes, out_dtype, precision), (x, dy, sizes)


def _wgrad_backward(
    out_dtype: jax.typing.DTypeLike, precision: jax.lax.PrecisionLike, residuals: Any, g: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x, dy, sizes = residuals
    dx = rows_product(dy, jnp.swapaxes(g, -1, -2), sizes, x.dtype, precision)
    return dx, rows_product(x, g, sizes, dy.dtype, precision), None


wgrad_product.defvjp(_wgrad_forward, _wgrad_backward)
