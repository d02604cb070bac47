"""The NVFP4 dequantise op, along rows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from jaxlowprec import wiring
from jaxlowprec.formats import BLOCK, Hadamard
from jaxlowprec.ops.dequantize import reference
from jaxlowprec.ops.implementation import Implementation, choose


@functools.cache
def dequantize_op(
    tiles: bool,
    ragged_rows: bool,
    ragged_columns: int | None,
    hadamard: Hadamard | None,
    dtype: Any,
    implementation: Implementation,
):
    """data uint8 [..., R, bytes], scale, amax [...] -> [..., R, C] of `dtype`.

    `ragged_columns` is C where it is no multiple of 16. `hadamard` is a rotation of size 16 to undo.
    """
    whole: list[str] = []
    row, scale_row = "r", "r"
    if tiles:
        row, scale_row, whole = ("r", "rblocks", ["r", "rblocks"]) if ragged_rows else ("(r k)", "r", [])
    if ragged_columns is None:
        code, scale, column = "(c h)", "c", "(c l)"
    else:
        code, scale, column = "cbytes", "cblocks", "c"
        whole += [code, scale, column]
    text = f"... {row} {code}, ... {scale_row} {scale}, ... -> ... {row} {column}"
    sizes: dict[str, Any] = {f: n for f, n in (("k", BLOCK), ("l", BLOCK), ("h", BLOCK // 2)) if f" {f})" in text}

    def columns(data):
        return data.shape[-1] * 2 if ragged_columns is None else ragged_columns

    def outputs(data, *_):
        return [((*data.shape[:-1], columns(data)), dtype)]

    def run_reference(data, scale, amax):
        return [reference.dequantize_rows(data, scale, amax, tiles, columns(data), hadamard, dtype)]

    def run_native(data, scale, amax):
        mask = np.uint32(hadamard.mask if hadamard else 0).view(np.int32)
        call = jax.ffi.ffi_call("jaxlowprec_dequantize", jax.ShapeDtypeStruct(*outputs(data)[0]))
        return [call(data, scale, amax, tiles=tiles, rotate=hadamard is not None, sign_mask=mask)]

    return wiring.define(
        "jaxlowprec_dequantize",
        rule=wiring.Rule(text, whole=whole, **sizes),
        outputs=outputs,
        reference=run_reference,
        native=run_native,
        **choose("dequantize", implementation),
    )
