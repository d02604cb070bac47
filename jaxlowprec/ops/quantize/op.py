"""The NVFP4 quantise op: rowwise, columnwise, or both in one pass."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec import wiring
from jaxlowprec.formats import BLOCK, Hadamard
from jaxlowprec.ops.hadamard.reference import rotate_padded
from jaxlowprec.ops.implementation import Implementation, choose
from jaxlowprec.ops.quantize import reference


@dataclasses.dataclass(frozen=True)
class QuantizeSpec:
    """One variant of the op.

    Attributes:
        rowwise, columnwise: the wanted directions.
        tiles: 16x16 blocks instead of 1x16.
        hadamard: a rotation of size 16 along axis -2 for the columnwise direction; not with tiles.
        stochastic: rounding of the codes.
        ragged_rows, ragged_columns: R or C is no multiple of 16.
    """

    rowwise: bool
    columnwise: bool
    tiles: bool
    hadamard: Hadamard | None
    stochastic: bool
    ragged_rows: bool
    ragged_columns: bool


def _rule(spec: QuantizeSpec) -> wiring.Rule:
    """x is [..., R, C]. An axis that blocks run along splits into whole blocks, or not at all where it is ragged."""
    block_rows, block_columns = spec.columnwise or spec.tiles, spec.rowwise or spec.tiles
    whole: list[str] = []
    names: dict[str, tuple[str, str, str]] = {}  # of an axis: elements, blocks, bytes of codes
    for axis, blocked, ragged in (("r", block_rows, spec.ragged_rows), ("c", block_columns, spec.ragged_columns)):
        if not blocked:
            names[axis] = (axis, axis, axis)
        elif ragged:
            names[axis] = (axis, f"{axis}blocks", f"{axis}bytes")
            whole += names[axis]
        else:
            names[axis] = (f"({axis} k)", axis, f"({axis} h)")
    (row, row_blocks, row_bytes), (column, column_blocks, column_bytes) = names["r"], names["c"]
    operands, results = [f"... {row} {column}"], []
    operands += ["..."] * (spec.rowwise + spec.columnwise) + ["... w"] * spec.stochastic
    if spec.rowwise:
        operands += [row, column_blocks] * spec.stochastic
        results += [f"... {row} {column_bytes}", f"... {row_blocks if spec.tiles else row} {column_blocks}"]
    if spec.columnwise:
        operands += [column, row_blocks] * spec.stochastic
        results += [f"... {column} {row_bytes}", f"... {column_blocks if spec.tiles else column} {row_blocks}"]
    text = f"{', '.join(operands)} -> {', '.join(results)}"
    sizes: dict[str, Any] = {f: n for f, n in (("k", BLOCK), ("h", BLOCK // 2), ("w", 2)) if f" {f}" in text}
    return wiring.Rule(text, whole=[f for f in whole if f in re.findall(r"\w+", text)], **sizes)


@functools.cache
def quantize_op(spec: QuantizeSpec, implementation: Implementation):
    """x, an amax [...] a direction, then if stochastic a key [..., 2] and line and block indices a direction
    -> codes and scales a direction."""
    directions = spec.rowwise + spec.columnwise

    def outputs(x, *_):
        *batch, rows, columns = x.shape
        lines = [(rows, columns)] * spec.rowwise + [(columns, rows)] * spec.columnwise
        shapes = []
        for line, length in lines:
            blocks = -(-length // BLOCK)
            scale_lines = -(-line // BLOCK) if spec.tiles else line
            shapes += [
                ((*batch, line, blocks * BLOCK // 2), jnp.uint8),
                ((*batch, scale_lines, blocks), jnp.float8_e4m3fn),
            ]
        return shapes

    def run_reference(x, *operands):
        amaxes, random = operands[:directions], operands[directions:]
        out = []
        for i in range(directions):
            columnwise = i == 1 or not spec.rowwise
            values = jnp.swapaxes(x, -1, -2) if columnwise else x
            if columnwise and spec.hadamard:
                values = rotate_padded(values, spec.hadamard)
            stochastic = (random[0], random[1 + 2 * i], random[2 + 2 * i], int(columnwise)) if random else ()
            out += reference.quantize_rows(values, amaxes[i], spec.tiles, *stochastic)
        return out

    def run_native(x, *operands):
        results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs(x)]
        return jax.ffi.ffi_call("jaxlowprec_quantize", results)(
            x,
            *operands,
            rowwise=spec.rowwise,
            columnwise=spec.columnwise,
            tiles=spec.tiles,
            rotate_columns=spec.hadamard is not None,
            stochastic=spec.stochastic,
            sign_mask=np.uint32(spec.hadamard.mask if spec.hadamard else 0).view(np.int32),
        )

    return wiring.define(
        "jaxlowprec_quantize",
        rule=_rule(spec),
        outputs=outputs,
        reference=run_reference,
        native=run_native,
        **choose("quantize", implementation),
    )
