"""The ops of norms and of their gradients. Rows stay whole on one device."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec import wiring
from jaxlowprec.ops.amax import NO_AMAXES, Amaxes, largest_over
from jaxlowprec.ops.checks import Implementation, choose
from jaxlowprec.ops.norms import reference
from jaxlowprec.ops.rounding import narrowed, rounded, widened
from jaxlowprec.ops.split_rows import merged_rows
from jaxlowprec.wiring import native


@dataclasses.dataclass(frozen=True)
class NormSpec:
    """One variant of a norm.

    Attributes:
        kind: "rms" or "layer".
        epsilon: added to the mean square.
        residual: another operand, which is added to x before.
        beta: another operand, which is added after.
        implementation: None, "ffi", "portable" or "reference": see `quantize`.
        amaxes: which amaxes of the normed rows are wanted; None: none. With `rows_split`, arrays are [..., S, R, C].
    """

    kind: Literal["rms", "layer"]
    epsilon: float
    residual: bool
    beta: bool
    implementation: Implementation = None
    amaxes: Amaxes | None = None

    @property
    def saved(self) -> int:
        """How many numbers of a row the backward pass needs: 1 / rms, or the mean and 1 / deviation."""
        return 1 if self.kind == "rms" else 2

    @property
    def attributes(self) -> dict[str, bool]:
        """Attributes of a native call of the norm or its gradient."""
        return {"layer": self.kind == "layer", "residual": self.residual}

    @property
    def parameters(self) -> dict[str, Any]:
        """Further attributes of the norm's call."""
        return {"beta": self.beta, "epsilon": np.float32(self.epsilon)}


def shapes(spec: NormSpec, x: Any) -> list[tuple[tuple[int, ...], Any]]:
    """Shapes and dtypes of the normed rows x, the sum if there is one, and the saved numbers."""
    return [(x.shape, x.dtype)] * (1 + spec.residual) + [(x.shape[:-1], jnp.float32)] * spec.saved


def reference_call(spec: NormSpec, x: jax.Array, *rest: jax.Array) -> list[jax.Array]:
    """Arrays of these shapes, in pure JAX. `rest`: the residual, weight and beta, where they are."""
    residual, (weight, *beta) = rest[: spec.residual], rest[spec.residual :]
    rows = widened(x)
    if residual:
        rows = narrowed(rows + widened(residual[0]), x.dtype)
    if spec.kind == "rms":
        y, *saved = reference.rms_norm(rows, weight, spec.epsilon)
    else:
        y, *saved = reference.layer_norm(rows, weight, beta[0] if beta else None, spec.epsilon)
    return [y.astype(x.dtype), *[rows.astype(x.dtype)] * spec.residual, *saved]


def native_call(spec: NormSpec, amaxes: Amaxes, x: jax.Array, *rest: jax.Array) -> Sequence[Any]:
    """The results of `reference_call` by the native kernel, and the amaxes of the normed rows."""
    results = [jax.ShapeDtypeStruct(*result) for result in shapes(spec, x) + amaxes.outputs(x)]
    attributes = {**spec.attributes, **spec.parameters, **amaxes.attributes}
    return jax.ffi.ffi_call("jaxlowprec_norm", results)(x, *rest, **attributes)


@functools.cache
def norm_op(spec: NormSpec) -> wiring.Op:
    """x [..., R, C], the residual, weight and beta, float32 [..., C], where they are -> normed rows [..., R, C], the
    sum of x and the residual if there is one, the saved numbers, float32 [..., R] each, and the amaxes of the normed
    rows, float32 [...] each."""
    wanted, count = spec.amaxes or NO_AMAXES, 1 + spec.residual
    of_matrix = dataclasses.replace(wanted, rows_split=False)
    operands = [f"{wanted.lines} c"] * count + ["... c"] * (1 + spec.beta)
    results = [f"{wanted.lines} c"] * count + [wanted.lines] * spec.saved + ["..."] * wanted.count

    def outputs(x: jax.Array, *_: jax.Array) -> wiring.Shapes:
        return shapes(spec, x) + wanted.outputs(x)

    def on_matrices(body: wiring.Body) -> wiring.Body:
        """The body, which takes one matrix [R, C] for each weight, on tensors whose rows may be split."""

        def run(x: jax.Array, *rest: jax.Array) -> Sequence[jax.Array]:
            rows = [wanted.matrix(operand) for operand in (x, *rest[: spec.residual])]
            found = body(*rows, *rest[spec.residual :])
            return [y.reshape(shape) for y, (shape, _) in zip(found, outputs(x), strict=True)]

        return run

    def run_reference(x: jax.Array, *rest: jax.Array) -> Sequence[jax.Array]:
        y, *others = reference_call(spec, x, *rest)
        return [y, *others, *of_matrix.reference(y)]

    def run_native(x: jax.Array, *rest: jax.Array) -> Sequence[jax.Array]:
        return native_call(spec, of_matrix, x, *rest)

    return wiring.define(
        f"jaxlowprec_{spec.kind}_norm",
        rule=_rule(operands, results, wanted),
        outputs=outputs,
        reference=on_matrices(run_reference),
        native=on_matrices(run_native),
        collective=largest_over,
        **choose("norm", spec.implementation),
    )


@functools.cache
def norm_gradient_op(spec: NormSpec, rows_split: bool) -> wiring.Op:
    """dy, the sum's gradient if there is a residual, x [..., R, C], weight [..., C] and the saved numbers [..., R] ->
    the gradients of x [..., R, C], in x's dtype, of the weight and, if there is one, of beta, float32 [..., C].

    Those of weight and beta are sums over rows, in float32, in an order that depends on shapes and on the mesh only.

    Arguments:
        rows_split: arrays are [..., S, R, C], and the sums are taken over S and R.
    """
    lines = "... s r" if rows_split else "... r"
    operands = [f"{lines} c"] * (2 + spec.residual) + ["... c"] + [lines] * spec.saved
    sums, before = 1 + spec.beta, 2 + spec.residual

    def outputs(dy: jax.Array, *rest: jax.Array) -> wiring.Shapes:
        return [(dy.shape, dy.dtype)] + [(rest[before - 1].shape, jnp.float32)] * sums

    def of_matrix(dy: jax.Array, rest: Sequence[jax.Array]) -> list[jax.Array]:
        """The operands [..., R, C], with split rows merged."""
        if not rows_split:
            return [dy, *rest]
        rows, (weight, *saved) = [dy, *rest[: before - 1]], rest[before - 1 :]
        numbers = [number.reshape(*number.shape[:-2], -1) for number in saved]
        return [*map(merged_rows, rows), weight, *numbers]

    def gradient_of(dy: jax.Array, *rest: jax.Array) -> jax.Array:
        of_sum, (x, weight, *saved) = rest[: spec.residual], rest[spec.residual :]
        gradient = reference.rms_norm_gradient if spec.kind == "rms" else reference.layer_norm_gradient
        dx = gradient(widened(dy), widened(x), weight, *saved)
        return (rounded(dx) + widened(of_sum[0]) if of_sum else dx).astype(x.dtype)

    def sums_of(dy: jax.Array, *rest: jax.Array) -> Sequence[jax.Array]:
        x, _, *saved = rest[spec.residual :]
        return reference.parameter_gradients(widened(dy), widened(x), *saved)[:sums]

    def run_reference(dy: jax.Array, *rest: jax.Array) -> Sequence[jax.Array]:
        given = of_matrix(dy, rest)
        return [gradient_of(*given).reshape(dy.shape), *sums_of(*given)]

    def run_native(dy: jax.Array, *rest: jax.Array, workspace: wiring.Shapes = ()) -> Sequence[jax.Array]:
        given = of_matrix(dy, rest)
        shapes = [(given[0].shape, dy.dtype), *outputs(dy, *rest)[1:], *workspace]
        results = [jax.ShapeDtypeStruct(*result) for result in shapes]
        dx, *found = jax.ffi.ffi_call("jaxlowprec_norm_gradient", results)(*given, **spec.attributes)
        return [dx.reshape(dy.shape), *found[:sums]]

    def run_cuda(
        dy: jax.Array, *rest: jax.Array
    ) -> Sequence[jax.Array]:  # sums of parts of the rows are in one result more
        rows = of_matrix(dy, rest)[0]
        batch, (count, columns) = rows.shape[:-2], rows.shape[-2:]
        parts = native.library().module.cuda_norm_gradient_parts(math.prod(batch), count)  # type: ignore[union-attr]
        return run_native(dy, *rest, workspace=[((*batch, parts, sums, columns), jnp.float32)])

    rule = f"{', '.join(operands)} -> {', '.join([f'{lines} c', *['... c'] * sums])}"
    return wiring.define(
        f"jaxlowprec_{spec.kind}_norm_gradient",
        rule=wiring.ShardingRule(rule, ("s", "r") if rows_split else ("r",), ("c",)),
        outputs=outputs,
        reference=run_reference,
        native={"cpu": run_native, "cuda": run_cuda},
        **choose("norm", spec.implementation),
    )


def _rule(operands: list[str], results: list[str], amaxes: Amaxes = NO_AMAXES) -> wiring.ShardingRule:
    reductions = [axis for axis in amaxes.reductions if axis != "c"]
    text = f"{', '.join(operands)} -> {', '.join(results)}"
    return wiring.ShardingRule(text, reductions, ("c", *amaxes.whole), **amaxes.sizes)
