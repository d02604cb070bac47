"""The ops of activations and of their gradients."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec import wiring
from jaxlowprec.ops.activations import reference
from jaxlowprec.ops.amax import NO_AMAXES, Amaxes, largest_over
from jaxlowprec.ops.checks import Implementation, choose
from jaxlowprec.ops.sum_over_rows import memory_of_parts, sum_over_rows


def _rule(operands: int, results: int, amaxes: Amaxes, row_sums: bool = False) -> wiring.ShardingRule:
    """The sharding rule of an op on matrices: each result has amaxes, and sums over rows if `row_sums`."""
    matrix = f"{amaxes.lines} c"
    of_each = [matrix] * results + ["..."] * results * amaxes.count + ["... c"] * results * row_sums
    rows = [axis for axis in ("s", "r") if row_sums and axis in re.findall(r"\w+", matrix) and axis not in amaxes.whole]
    reductions = dict.fromkeys([*rows, *amaxes.reductions])
    text = f"{', '.join([matrix] * operands)} -> {', '.join(of_each)}"
    return wiring.ShardingRule(text, tuple(reductions), amaxes.whole, **amaxes.sizes)


def native_call(kind: str, wanted: Amaxes, x: jax.Array, *up: jax.Array) -> list[jax.Array]:
    """The activation of matrices by the kernel, and the wanted amaxes of it."""
    outputs = [(x.shape, x.dtype), *wanted.outputs(x)]
    return _matrices_call("jaxlowprec_activation", wanted, outputs, x, *up, kind=reference.NAMED_ACTIVATIONS[kind].name)


def native_gradient_call(
    kind: str, wanted: Amaxes, dy: jax.Array, x: jax.Array, *up: jax.Array, row_sums: bool = False, workspace: Any = ()
) -> list[jax.Array]:
    """The gradients of the operands by the kernel, the wanted amaxes of each, and sums over rows if they are wanted.

    `workspace`: shapes and dtypes of further results that the kernel uses as memory.
    """
    outputs, name = [*_gradients(wanted, row_sums, x, *up), *workspace], "jaxlowprec_activation_gradient"
    found = _matrices_call(name, wanted, outputs, dy, x, *up, kind=reference.NAMED_ACTIVATIONS[kind].name)
    return found[: len(found) - len(workspace)]


def _native_gradient_call_on_cuda(kind: str, wanted: Amaxes, row_sums: bool, *operands: jax.Array) -> list[jax.Array]:
    """`native_gradient_call`; sums of parts of the rows are in one result more."""
    workspace = [memory_of_parts(wanted.matrix(operands[0]), len(operands) - 1)] * row_sums
    return native_gradient_call(kind, wanted, *operands, row_sums=row_sums, workspace=workspace)


def _gradients(wanted: Amaxes, row_sums: bool, *operands: Any) -> list[tuple[tuple[int, ...], Any]]:
    """Shapes and dtypes of the gradients of operands, of their amaxes, and of their sums over rows."""
    x, *_ = operands
    batch = x.shape[: -3 if wanted.rows_split else -2]
    of_each = [(x.shape, x.dtype)], wanted.outputs(x), [((*batch, x.shape[-1]), jnp.float32)] * row_sums
    return [array for arrays in of_each for array in arrays * len(operands)]


@functools.cache
def activation_op(kind: str, implementation: Implementation = None, amaxes: Amaxes | None = None) -> wiring.Op:
    """x [..., R, C] and, if it is gated, up -> [..., R, C] in x's dtype, see `reference.activation`; and the amaxes of
    that result, float32 [...] each."""
    rule, wanted = reference.NAMED_ACTIVATIONS[kind], amaxes or NO_AMAXES

    def outputs(x: jax.Array, *_: jax.Array) -> wiring.Shapes:
        return [(x.shape, x.dtype), *wanted.outputs(x)]

    def run_reference(x: jax.Array, *up: jax.Array) -> Sequence[jax.Array]:
        y = reference.activation(kind, x, *up)
        return [y, *wanted.reference(y)]

    return wiring.define(
        "jaxlowprec_activation",
        rule=_rule(1 + rule.gated, 1, wanted),
        outputs=outputs,
        reference=run_reference,
        native=functools.partial(native_call, kind, wanted),
        collective=largest_over,
        **choose("activation", implementation),
    )


@functools.cache
def activation_gradient_op(
    kind: str, implementation: Implementation = None, amaxes: Amaxes | None = None, row_sums: bool = False
) -> wiring.Op:
    """dy, x [..., R, C] and, if it is gated, up -> the gradients of x and up, see `reference.activation_gradient`; the
    amaxes of the one and of the other, float32 [...] each; and, if `row_sums`, their sums over rows, float32 [..., C].

    The sums are those of `sum_over_rows_op`.
    """
    rule, wanted = reference.NAMED_ACTIVATIONS[kind], amaxes or NO_AMAXES
    gradients = 1 + rule.gated

    def run_reference(dy: jax.Array, x: jax.Array, *up: jax.Array) -> Sequence[jax.Array]:
        found = reference.activation_gradient(kind, dy, x, *up)
        of_amaxes = [amax for gradient in found for amax in wanted.reference(gradient)]
        return found + of_amaxes + ([sum_over_rows(wanted.matrix(g)) for g in found] if row_sums else [])

    def run_cuda(*operands: jax.Array) -> Sequence[jax.Array]:
        return _native_gradient_call_on_cuda(kind, wanted, row_sums, *operands)

    before_sums = gradients * (1 + wanted.count)
    return wiring.define(
        "jaxlowprec_activation_gradient",
        rule=_rule(2 + rule.gated, gradients, wanted, row_sums),
        outputs=lambda dy, *operands: _gradients(wanted, row_sums, *operands),
        reference=run_reference,
        native={"cpu": functools.partial(native_gradient_call, kind, wanted, row_sums=row_sums), "cuda": run_cuda},
        collective=[largest_over] * before_sums + [jax.lax.psum] * gradients * row_sums,
        **choose("activation", implementation),
    )


def _matrices_call(name: str, amaxes: Amaxes, outputs: list[Any], *operands: jax.Array, kind: str) -> list[jax.Array]:
    """The kernel on matrices, one for each tensor whose amaxes are wanted."""
    matrices = [amaxes.matrix(x) for x in operands]
    like = operands[0].shape
    results = [jax.ShapeDtypeStruct(matrices[0].shape if shape == like else shape, dtype) for shape, dtype in outputs]
    found = jax.ffi.ffi_call(name, results)(*matrices, **amaxes.attributes, kind=kind)
    return [x.reshape(shape) for x, (shape, _) in zip(found, outputs, strict=True)]
