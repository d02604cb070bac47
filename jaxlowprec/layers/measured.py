"""Telemetry of a layer: the effect of quantisation on its tensors."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.layers.operands import Gemms, both_ways, groups_both_ways, role_of
from jaxlowprec.layers.residuals import in_profiles
from jaxlowprec.recipes.roles import Roles
from jaxlowprec.telemetry import measuring, probes
from jaxlowprec.telemetry.sampling import Gemm, Operand, RowsByWeights, WithinGroups


class ForwardMeasurements(NamedTuple):
    """Measurements of a layer's forward pass, and lines of its tensors that the backward pass measures.

    Attributes:
        probe: telemetry's.
        statistics: by label.
        lines: for wgrad and dgrad; None where these are not quantised.
    """

    probe: probes.Probe
    statistics: dict[str, jax.Array]
    lines: measuring.SampledLines


Forms = tuple[Any, Any]
"""A tensor quantised rowwise and columnwise: a QuantizedArray, of rows in groups a GroupedQuantizedArray; or None."""


def measured_forward(
    probe: probes.Probe,
    x: jax.Array,
    w: jax.Array | None,
    x_forms: Forms,
    w_forms: Forms,
    rows_split: bool = False,
    sizes: jax.Array | None = None,
) -> ForwardMeasurements:
    """Measures the forward pass of a product x @ w; w is None if only its quantised forms are known.

    Arguments:
        rows_split: inputs and gradients are [..., S, T, K] for a weight without S.
        sizes: int32 [E], if inputs and gradients are rows in groups, for weights [E, K, N].
    """
    (x_row, x_column), (w_row, w_column) = x_forms, w_forms
    tensors = {"input rowwise": (x, x_row), "input columnwise": (x, x_column)}
    gemms: dict[str, Any] = {}
    weight = None
    if w is not None:
        tensors |= {"weight rowwise": (w, w_row), "weight columnwise": (w, w_column)}
        weight = w_row if w_column is None else w_column
        if w_column is not None:
            gemms["fprop"] = _by_weight(Operand(x, x_row, -1), Operand(w, w_column, -2), rows_split, sizes)
    kept = measuring.SampledLines(None if x_column is None else x, None if w_row is None else w)
    return ForwardMeasurements(
        probe, *_measured(probe, measuring.PassTensors(tensors, gemms, weight, kept), rows_split, sizes)
    )


def measured_backward(
    before: ForwardMeasurements,
    kept: tuple[Any, Any],
    dy: jax.Array,
    dy_forms: Forms,
    rows_split: bool = False,
    sizes: jax.Array | None = None,
) -> probes.Probe:
    """Measures the backward pass, too: the cotangent of the probe. `kept`: x columnwise and w rowwise, quantised."""
    dy_row, dy_column = dy_forms
    x_column, w_row = kept
    gemms: dict[str, Any] = {}
    if before.lines.w is not None and dy_row is not None:
        gemms["dgrad"] = _by_weight(Operand(dy, dy_row, -1), Operand(before.lines.w, w_row, None), rows_split, sizes)
    if before.lines.x is not None and dy_column is not None:
        operands = Operand(before.lines.x, x_column, None), Operand(dy, dy_column, -2)
        gemms["wgrad"] = (
            Gemm(*operands, "ab" if rows_split else "") if sizes is None else WithinGroups(*operands, sizes)
        )
    tensors = {"gradient rowwise": (dy, dy_row), "gradient columnwise": (dy, dy_column)}
    found, _ = _measured(before.probe, measuring.PassTensors(tensors, gemms), rows_split, sizes)
    return before.probe.gradient(jax.tree.map(jnp.add, before.statistics, found))


def measured_weight(
    probe: probes.Probe,
    x: jax.Array,
    w: jax.Array,
    q: QuantizedArray,
    rows_split: bool = False,
    sizes: jax.Array | None = None,
) -> probes.Probe:
    """Measures a product whose weight alone is quantised: the cotangent of the probe."""
    fprop = _by_weight(Operand(x, None, -1), Operand(w, q, -2), rows_split, sizes)
    found, _ = _measured(
        probe, measuring.PassTensors({"weight columnwise": (w, q)}, {"fprop": fprop}, q), rows_split, sizes
    )
    return probe.gradient(found)


def _measured(
    probe: probes.Probe, seen: measuring.PassTensors, rows_split: bool, sizes: jax.Array | None
) -> tuple[dict[str, jax.Array], measuring.SampledLines]:
    """See `measuring.measure`."""

    def requantize(roles: Roles, name: str, x: jax.Array) -> Any:
        tensor, direction = name.split()
        gemms = Gemms(roles, None)
        row, column = {
            "input": (role_of(gemms.fprop, 0), role_of(gemms.wgrad, 0)),
            "weight": (role_of(gemms.dgrad, 1), role_of(gemms.fprop, 1)),
            "gradient": (role_of(gemms.dgrad, 0), role_of(gemms.wgrad, 1)),
        }[tensor]
        rowwise = direction == "rowwise"
        role = row if rowwise else column
        if role is None:
            return None
        words = jnp.zeros(2, jnp.uint32) if role.rounding == "eden" else None  # the same draw each time
        role = role if words is not None else dataclasses.replace(role, rounding="nearest")
        forms = (role, None) if rowwise else (None, role)
        if sizes is not None and tensor != "weight":
            words = words if words is None else jnp.broadcast_to(words, (*sizes.shape, 2))
            return groups_both_ways(x, sizes, *forms, words=words)[0 if rowwise else 1]
        split = rows_split and tensor != "weight"
        if gemms.requantizes(tensor) and rowwise == (tensor == "weight"):  # the backward pass's form
            read = (None, column) if rowwise else (row, None)
            x = both_ways(x, *read, rows_split=split)[1 if rowwise else 0].dequantize(jnp.bfloat16)
        signs = jnp.zeros(2, jnp.uint32)  # the same, too
        options: Any = {"words": words, "sign_key": signs, "row_sign_key": signs, "rows_split": split}
        return both_ways(x, *forms, **options)[0 if rowwise else 1]

    with in_profiles("telemetry"):
        return measuring.measure(probe, seen, requantize, sizes)


def _by_weight(a: Operand, b: Operand, rows_split: bool, sizes: jax.Array | None) -> Gemm | RowsByWeights:
    """The GEMM of rows by a weight."""
    return Gemm(a, b, "a" if rows_split else "") if sizes is None else RowsByWeights(a, b, sizes)
