"""The ops of norms and of their gradients. Rows stay whole on one device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxlowprec import wiring
from jaxlowprec.ops.norms import reference
from jaxlowprec.ops.rounding import narrowed, rounded, widened


@dataclasses.dataclass(frozen=True)
class NormSpec:
    """One variant of a norm.

    Attributes:
        kind: "rms" or "layer".
        epsilon: added to the mean square.
        zero_centered: rows are multiplied by 1 + gamma.
        residual: another operand, which is added to x before.
        beta: another operand, which is added after.
    """

    kind: Literal["rms", "layer"]
    epsilon: float
    zero_centered: bool
    residual: bool
    beta: bool

    @property
    def saved(self) -> int:
        """How many numbers of a row the backward pass needs: 1 / rms, or the mean and 1 / deviation."""
        return 1 if self.kind == "rms" else 2


@functools.cache
def norm_op(spec: NormSpec):
    """x [..., R, C], residual, gamma and beta [..., C] where they are -> normed rows [..., R, C], the sum of x and the
    residual if there is one, and the saved numbers, float32 [..., R] each."""
    operands = ["... r c"] * (1 + spec.residual) + ["... c"] * (1 + spec.beta)
    results = ["... r c"] * (1 + spec.residual) + ["... r"] * spec.saved

    def outputs(x, *_):
        return [(x.shape, x.dtype)] * (1 + spec.residual) + [(x.shape[:-1], jnp.float32)] * spec.saved

    def run(x, *rest):
        residual, (gamma, *beta) = rest[: spec.residual], rest[spec.residual :]
        rows = widened(x)
        if residual:
            rows = narrowed(rows + widened(residual[0]), x.dtype)
        if spec.kind == "rms":
            y, *saved = reference.rms_norm(rows, gamma, spec.epsilon, spec.zero_centered)
        else:
            y, *saved = reference.layer_norm(rows, gamma, *beta or [None], spec.epsilon, spec.zero_centered)
        return [y.astype(x.dtype), *[rows.astype(x.dtype)] * spec.residual, *saved]

    return wiring.define(f"jaxlowprec_{spec.kind}_norm", rule=_rule(operands, results), outputs=outputs, reference=run)


@functools.cache
def norm_gradient_op(spec: NormSpec):
    """dy, the sum's gradient if there is a residual, x [..., R, C], gamma [..., C] and the saved numbers [..., R] ->
    the gradient of x [..., R, C], in x's dtype."""
    operands = ["... r c"] * (2 + spec.residual) + ["... c"] + ["... r"] * spec.saved

    def run(dy, *rest):
        of_sum, (x, gamma, *saved) = rest[: spec.residual], rest[spec.residual :]
        gradient = reference.rms_norm_gradient if spec.kind == "rms" else reference.layer_norm_gradient
        dx = gradient(widened(dy), widened(x), gamma, *saved, spec.zero_centered)
        return [(rounded(dx) + widened(of_sum[0]) if of_sum else dx).astype(x.dtype)]

    return wiring.define(
        f"jaxlowprec_{spec.kind}_norm_gradient",
        rule=_rule(operands, ["... r c"]),
        outputs=lambda dy, *rest: [(rest[spec.residual].shape, rest[spec.residual].dtype)],
        reference=run,
    )


def _rule(operands: list[str], results: list[str]) -> wiring.ShardingRule:
    return wiring.ShardingRule(f"{', '.join(operands)} -> {', '.join(results)}", whole=("c",))


def parameter_gradients(spec: NormSpec, dy: jax.Array, x: jax.Array, saved: Any) -> tuple[jax.Array, jax.Array | None]:
    """The gradients of gamma and beta [C], float32: sums over all rows, in XLA's order."""
    *mean, inverse = saved
    rows, dy = widened(x), widened(dy)
    normed = (rows - mean[0][..., None] if mean else rows) * inverse[..., None]
    axes = tuple(range(dy.ndim - 1))
    return (dy * normed).sum(axis=axes), dy.sum(axis=axes) if spec.beta else None
