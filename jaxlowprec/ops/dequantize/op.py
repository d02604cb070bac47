"""The dequantise op, along rows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from jaxlowprec import wiring
from jaxlowprec.arrays.formats import Format
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.ops.dequantize import reference
from jaxlowprec.ops.implementation import Implementation, choose


@functools.cache
def dequantize_op(
    fmt: Format,
    ragged_rows: bool,
    ragged_columns: int | None,
    hadamard: Hadamard | None,
    dtype: Any,
    implementation: Implementation,
):
    """data [..., R, C] (packed: bytes), scale, and for two-level formats amax [...] -> [..., R, C] of `dtype`.

    `ragged_columns`: C where it is not a multiple of the block, else None. `hadamard`: a rotation of size 16 to undo.
    """
    whole: list[str] = []
    sizes: dict[str, Any] = {"k": fmt.length, "h": fmt.length // 2}
    row, scale_row = "r", "r"
    if fmt.tiles:
        row, scale_row, whole = ("r", "rblocks", ["r", "rblocks"]) if ragged_rows else ("(r k)", "r", [])
    if ragged_columns is None:
        code, scale_column, column = f"(c {'h' if fmt.packed else 'k'})", "c", "(c k)"
    else:
        code, scale_column, column = "cbytes" if fmt.packed else "c", "cblocks", "c"
        whole += dict.fromkeys((code, scale_column, column))
    scale = f"... {scale_row} {scale_column}"
    if fmt.scaling == "tensor":
        code, scale, column, whole = "c", "...", "c", []
    amax = ", ..." if fmt.scaling == "two_level" else ""
    text = f"... {row} {code}, {scale}{amax} -> ... {row} {column}"
    sizes = {f: n for f, n in sizes.items() if f" {f})" in text}

    def columns(data):
        return data.shape[-1] * (1 + fmt.packed) if ragged_columns is None else ragged_columns

    def outputs(data, *_):
        return [((*data.shape[:-1], columns(data)), dtype)]

    def run_reference(data, scale, amax=None):
        return [reference.dequantize_rows(data, scale, amax, fmt, columns(data), hadamard, dtype)]

    def run_native(data, *operands):
        mask = np.uint32(hadamard.mask if hadamard else 0).view(np.int32)
        call = jax.ffi.ffi_call("jaxlowprec_dequantize", jax.ShapeDtypeStruct(*outputs(data)[0]))
        return [call(data, *operands, format=fmt.attributes, rotate=hadamard is not None, sign_mask=mask)]

    return wiring.define(
        "jaxlowprec_dequantize",
        rule=wiring.ShardingRule(text, whole=whole, **sizes),
        outputs=outputs,
        reference=run_reference,
        native=run_native,
        **choose("dequantize", implementation),
    )
