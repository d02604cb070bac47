"""Sums over rows, in an order of their own (numerics.md 12.3): the gradient of a bias."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec import wiring
from jaxlowprec.ops.checks import Implementation, choose
from jaxlowprec.ops.rounding import widened
from jaxlowprec.ops.split_rows import merged_rows

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


def memory_of_parts(rows: Any, arrays: int = 1) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of the memory in which CUDA's kernels leave the sums of parts of the rows.

    Arguments:
        rows: like an array whose rows are summed, [..., R, C].
        arrays: how many are like it.
    """
    *batch, count, columns = rows.shape
    return (*batch, -(-count // PART), arrays, columns), jnp.float32


@functools.cache
def sum_over_rows_op(rows_split: bool = False, implementation: Implementation = None) -> wiring.Op:
    """x [..., R, C], or [..., S, R, C] with `rows_split` -> float32 [..., C], see `reference.sum_over_rows`."""

    def matrix(x: jax.Array) -> jax.Array:
        return merged_rows(x) if rows_split else x

    def outputs(x: jax.Array) -> wiring.Shapes:
        return [((*x.shape[: -3 if rows_split else -2], x.shape[-1]), jnp.float32)]

    def native_call(x: jax.Array, workspace: wiring.Shapes) -> Sequence[jax.Array]:
        results = [jax.ShapeDtypeStruct(*result) for result in (*outputs(x), *workspace)]
        return jax.ffi.ffi_call("jaxlowprec_sum_over_rows", results)(matrix(x))[:1]

    lines = "... s r" if rows_split else "... r"
    return wiring.define(
        "jaxlowprec_sum_over_rows",
        rule=wiring.ShardingRule(f"{lines} c -> ... c", ("s", "r") if rows_split else ("r",)),
        outputs=outputs,
        reference=lambda x: [sum_over_rows(matrix(x))],
        native={
            "cpu": lambda x: native_call(x, []),
            "cuda": lambda x: native_call(x, [memory_of_parts(matrix(x))]),
        },
        **choose("sum_over_rows", implementation),
    )
