"""The ops of norms and of their gradients. Rows stay whole on one device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec import wiring
from jaxlowprec.ops.amax.wanted import NO_AMAXES, Amaxes, largest_over
from jaxlowprec.ops.implementation import Implementation, choose
from jaxlowprec.ops.norms import reference
from jaxlowprec.ops.rounding import narrowed, rounded, widened


@dataclasses.dataclass(frozen=True)
class NormSpec:
    """One variant of a norm.

    Attributes:
        kind: "rms" or "layer".
        epsilon: added to the mean square.
        residual: another operand, which is added to x before.
        beta: another operand, which is added after.
        implementation: None, "ffi" or "reference".
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
        """The norm for a native call."""
        return {"layer": self.kind == "layer", "residual": self.residual}


@functools.cache
def norm_op(spec: NormSpec):
    """x [..., R, C], the residual, weight and beta, float32 [..., C], where they are -> normed rows [..., R, C], the
    sum of x and the residual if there is one, the saved numbers, float32 [..., R] each, and the amaxes of the normed
    rows, float32 [...] each."""
    wanted, count = spec.amaxes or NO_AMAXES, 1 + spec.residual
    of_matrix = dataclasses.replace(wanted, rows_split=False)
    operands = [f"{wanted.lines} c"] * count + ["... c"] * (1 + spec.beta)
    results = [f"{wanted.lines} c"] * count + [wanted.lines] * spec.saved + ["..."] * wanted.count

    def outputs(x, *_, amaxes=wanted):
        saved = [(x.shape[:-1], jnp.float32)] * spec.saved
        return [(x.shape, x.dtype)] * count + saved + amaxes.outputs(x)

    def on_matrices(body):
        """The body, which takes one matrix [R, C] for each weight, on tensors whose rows may be split."""

        def run(x, *rest):
            rows = [wanted.matrix(operand) for operand in (x, *rest[: spec.residual])]
            found = body(*rows, *rest[spec.residual :])
            return [y.reshape(shape) for y, (shape, _) in zip(found, outputs(x), strict=True)]

        return run

    def run_reference(x, *rest):
        residual, (weight, *beta) = rest[: spec.residual], rest[spec.residual :]
        rows = widened(x)
        if residual:
            rows = narrowed(rows + widened(residual[0]), x.dtype)
        if spec.kind == "rms":
            y, *saved = reference.rms_norm(rows, weight, spec.epsilon)
        else:
            y, *saved = reference.layer_norm(rows, weight, *beta or [None], spec.epsilon)
        y = y.astype(x.dtype)
        return [y, *[rows.astype(x.dtype)] * spec.residual, *saved, *of_matrix.reference(y)]

    def run_native(x, *rest):
        results = [jax.ShapeDtypeStruct(*result) for result in outputs(x, amaxes=of_matrix)]
        attributes = {**spec.attributes, **wanted.attributes, "beta": spec.beta, "epsilon": np.float32(spec.epsilon)}
        return jax.ffi.ffi_call("jaxlowprec_norm", results)(x, *rest, **attributes)

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
def norm_gradient_op(spec: NormSpec):
    """dy, the sum's gradient if there is a residual, x [..., R, C], weight [..., C] and the saved numbers [..., R] ->
    the gradient of x [..., R, C], in x's dtype."""
    operands = ["... r c"] * (2 + spec.residual) + ["... c"] + ["... r"] * spec.saved

    def outputs(dy, *_):
        return [(dy.shape, dy.dtype)]

    def run_reference(dy, *rest):
        of_sum, (x, weight, *saved) = rest[: spec.residual], rest[spec.residual :]
        gradient = reference.rms_norm_gradient if spec.kind == "rms" else reference.layer_norm_gradient
        dx = gradient(widened(dy), widened(x), weight, *saved)
        return [(rounded(dx) + widened(of_sum[0]) if of_sum else dx).astype(x.dtype)]

    def run_native(dy, *rest):
        call = jax.ffi.ffi_call("jaxlowprec_norm_gradient", [jax.ShapeDtypeStruct(*result) for result in outputs(dy)])
        return call(dy, *rest, **spec.attributes)

    return wiring.define(
        f"jaxlowprec_{spec.kind}_norm_gradient",
        rule=_rule(operands, ["... r c"]),
        outputs=outputs,
        reference=run_reference,
        native=run_native,
        **choose("norm", spec.implementation),
    )


def _rule(operands: list[str], results: list[str], amaxes: Amaxes = NO_AMAXES) -> wiring.ShardingRule:
    reductions = [axis for axis in amaxes.reductions if axis != "c"]
    text = f"{', '.join(operands)} -> {', '.join(results)}"
    return wiring.ShardingRule(text, reductions, ("c", *amaxes.whole), **amaxes.sizes)


def parameter_gradients(spec: NormSpec, dy: jax.Array, x: jax.Array, saved: Any) -> tuple[jax.Array, jax.Array | None]:
    """The gradients of weight and beta [C], float32: sums over all rows, in XLA's order."""
    *mean, inverse = saved
    rows, dy = widened(x), widened(dy)
    normed = (rows - mean[0][..., None] if mean else rows) * inverse[..., None]
    axes = tuple(range(dy.ndim - 1))
    return (dy * normed).sum(axis=axes), dy.sum(axis=axes) if spec.beta else None
