"""The op that quantises each row as a tensor of its own: amaxes of rows, codes and scales in one pass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec import wiring
from jaxlowprec.arrays.quantized_array import by_tensor
from jaxlowprec.ops import amax as amax_reference
from jaxlowprec.ops.amax import Amaxes, amax_op, largest_over
from jaxlowprec.ops.checks import Implementation, choose
from jaxlowprec.ops.quantize import reference
from jaxlowprec.ops.quantize.op import QuantizeSpec, quantize_op, rule_of, shapes


@functools.cache
def row_scaled_quantize_op(spec: QuantizeSpec, implementation: Implementation) -> wiring.Op:
    """x [..., R, C] -> amaxes float32 [..., R], codes and scales.

    `spec` is of a row-scaled format, rowwise and to nearest. A matrix of one row has the same bytes by the format that
    is not row-scaled.
    """
    rule, of_matrix = rule_of(spec), dataclasses.replace(spec, format=by_tensor(spec.format))
    reductions = [] if spec.ragged_columns else ["c"]

    def outputs(x: jax.Array) -> wiring.Shapes:
        return [(x.shape[:-1], jnp.float32), *shapes(spec, x)]

    def run_reference(x: jax.Array) -> Sequence[jax.Array]:
        rows = x[..., None, :]
        amax = amax_reference.amax_of_matrices(rows)
        data, scale = reference.quantize_rows(rows, of_matrix.format, amax)
        return [amax, data[..., 0, :], scale[..., 0, :]]

    def when_split(axes: Mapping[str, Any], x: jax.Array) -> Sequence[jax.Array]:
        """If rows are split, their amaxes come first, and then the codes of each part."""
        rows = x[..., None, :]
        (of_part,) = amax_op(Amaxes(), implementation)(rows)
        amax = largest_over(of_part, axes["c"])
        data, scale = quantize_op(of_matrix, implementation)(rows, amax)
        return [amax, data[..., 0, :], scale[..., 0, :]]

    def run_native(x: jax.Array) -> Sequence[jax.Array]:
        results = [jax.ShapeDtypeStruct(*result) for result in outputs(x)]
        return jax.ffi.ffi_call("jaxlowprec_row_scaled_quantize", results)(x, format=spec.format.attributes)

    return wiring.define(
        "jaxlowprec_row_scaled_quantize",
        rule=rule.of_op([f"{rule.lines} {rule.columns}"], [rule.lines], reductions=reductions),
        outputs=outputs,
        reference=run_reference,
        native=run_native,
        fenced=True,
        when_split=when_split,
        **choose("quantize", implementation),
    )
