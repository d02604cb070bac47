"""The op of sums over rows: the gradient of a bias."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec import wiring
from jaxlowprec.ops.implementation import Implementation, choose
from jaxlowprec.ops.split_rows import merged_rows
from jaxlowprec.ops.sum_over_rows import reference


def memory_of_parts(rows: Any, arrays: int = 1) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of the memory in which CUDA's kernels leave the sums of parts of the rows.

    Arguments:
        rows: like an array whose rows are summed, [..., R, C].
        arrays: how many are like it.
    """
    *batch, count, columns = rows.shape
    return (*batch, -(-count // reference.PART), arrays, columns), jnp.float32


@functools.cache
def sum_over_rows_op(rows_split: bool = False, implementation: Implementation = None):
    """x [..., R, C], or [..., S, R, C] with `rows_split` -> float32 [..., C], see `reference.sum_over_rows`."""

    def matrix(x):
        return merged_rows(x) if rows_split else x

    def outputs(x):
        return [((*x.shape[: -3 if rows_split else -2], x.shape[-1]), jnp.float32)]

    def native_call(x, workspace):
        results = [jax.ShapeDtypeStruct(*result) for result in (*outputs(x), *workspace)]
        return jax.ffi.ffi_call("jaxlowprec_sum_over_rows", results)(matrix(x))[:1]

    lines = "... s r" if rows_split else "... r"
    return wiring.define(
        "jaxlowprec_sum_over_rows",
        rule=wiring.ShardingRule(f"{lines} c -> ... c", ("s", "r") if rows_split else ("r",)),
        outputs=outputs,
        reference=lambda x: [reference.sum_over_rows(matrix(x))],
        native={
            "cpu": lambda x: native_call(x, []),
            "cuda": lambda x: native_call(x, [memory_of_parts(matrix(x))]),
        },
        **choose("sum_over_rows", implementation),
    )
