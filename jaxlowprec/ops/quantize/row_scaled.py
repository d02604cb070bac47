"""The op that quantises rows which are tensors of their own (numerics.md 2): a row's amax and its codes in one pass."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxlowprec import wiring
from jaxlowprec.arrays.quantized_array import by_tensor
from jaxlowprec.ops.amax import reference as amax_reference
from jaxlowprec.ops.amax.op import amax_op, largest_over
from jaxlowprec.ops.amax.wanted import Amaxes
from jaxlowprec.ops.implementation import Implementation, choose
from jaxlowprec.ops.quantize import reference
from jaxlowprec.ops.quantize.op import QuantizeSpec, quantize_op, rule_of, shapes


@functools.cache
def row_scaled_quantize_op(spec: QuantizeSpec, implementation: Implementation):
    """x [..., R, C] -> amaxes float32 [..., R], codes and scales.

    `spec` is of a row-scaled format, rowwise and to nearest. A matrix of one row has the same bytes by the format that
    is not row-scaled.
    """
    rule, of_matrix = rule_of(spec), dataclasses.replace(spec, format=by_tensor(spec.format))
    reductions = [] if spec.ragged_columns else ["c"]

    def outputs(x):
        return [(x.shape[:-1], jnp.float32), *shapes(spec, x)]

    def run_reference(x):
        rows = x[..., None, :]
        amax = amax_reference.amax(rows)
        data, scale = reference.quantize_rows(rows, of_matrix.format, amax)
        return [amax, data[..., 0, :], scale[..., 0, :]]

    def when_split(axes, x):
        """If rows are split, their amaxes come first, and then the codes of each part."""
        rows = x[..., None, :]
        (of_part,) = amax_op(Amaxes(), implementation)(rows)
        amax = largest_over(of_part, axes)
        data, scale = quantize_op(of_matrix, implementation)(rows, amax)
        return [amax, data[..., 0, :], scale[..., 0, :]]

    def run_native(x):
        results = [jax.ShapeDtypeStruct(*result) for result in outputs(x)]
        return jax.ffi.ffi_call("jaxlowprec_row_scaled_quantize", results)(x, format=spec.format.attributes)

    return wiring.define(
        "jaxlowprec_row_scaled_quantize",
        rule=rule.of_op([f"{rule.lines} {rule.columns}"], [rule.lines], reductions=reductions),
        outputs=outputs,
        reference=run_reference,
        native=run_native,
        when_split=when_split,
        **choose("quantize", implementation),
    )
