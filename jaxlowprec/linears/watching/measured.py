"""What a layer's quantisation did to its tensors, for telemetry."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.linears.operands import Gemms, both_ways, role_of
from jaxlowprec.linears.residuals import in_profiles
from jaxlowprec.recipes.roles import Roles
from jaxlowprec.telemetry import probes


def measured(probe: probes.Probe, tensors: dict[str, tuple[Any, Any]], rows_split: bool = False) -> Any:
    """What quantisation did to tensors, an array and its quantised form each, by the names of `probes.TENSORS`.

    Arguments:
        rows_split: inputs and gradients are [..., S, T, K] for a weight without S.
    """

    def requantize(roles: Roles, name: str, x: jax.Array) -> QuantizedArray | None:
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
        role = dataclasses.replace(role, rounding="nearest")
        forms = (role, None) if rowwise else (None, role)
        return both_ways(x, *forms, rows_split=rows_split and tensor != "weight")[0 if rowwise else 1]

    with in_profiles("telemetry"):
        return probes.measure(probe, tensors, requantize)
