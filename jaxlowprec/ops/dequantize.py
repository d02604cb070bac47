"""Decoding of a QuantizedArray (numerics.md 2 and 5 to 7): the function, its op along rows, and pure JAX."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlowprec import wiring
from jaxlowprec.arrays.formats import SYMMETRIC_ZERO, Format
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.arrays.quantized_array import QuantizedArray, as_matrices, check_quantized
from jaxlowprec.ops.checks import Implementation, check_implementation, choose, float_dtype
from jaxlowprec.ops.exact import e2m1_value
from jaxlowprec.ops.hadamard import hadamard_transform, rotate_float32
from jaxlowprec.ops.int4.op import dequantize_int4
from jaxlowprec.ops.quantize.reference import E8M0_NAN, NVFP4_MAX
from jaxlowprec.ops.rounding import flush, from_bits


def dequantize(
    q: QuantizedArray, *, dtype: jax.typing.DTypeLike | None = None, implementation: Implementation = None
) -> Float[Array, "..."]:
    """The array that q approximates: its logical shape and original orientation, the rotation undone.

    Codes are decoded (and rotated back) in float32, then rounded once. Int4 is decoded as it is served: rounded once to
    its scale_dtype, then converted to `dtype`, which is exact for float32 and for the scale_dtype.

    Arguments:
        q: a quantised array.
        dtype: of the result: bfloat16, float16 or float32. None: the dtype q was quantised from.
        implementation: None, "ffi", "portable" or "reference": see `quantize`.

    Raises:
        TypeError: q is not a QuantizedArray, or another dtype than those.
        ValueError: its arrays are not those of its format and shape.
        NotImplementedError: `implementation="ffi"` where there is no kernel.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> x = jnp.array([[0.5, 1.0, 2.0, 3.0] * 4])
    >>> jlp.dequantize(jlp.quantize(x, jlp.NVFP4()))[0, :4]
    Array([0.5, 1. , 2. , 3. ], dtype=float32)
    """
    who = "dequantize"
    check_quantized(who, "q", q)
    check_implementation(who, implementation)
    dtype = float_dtype(who, "dtype", q.dtype if dtype is None else dtype)
    if q.format.scaling == "float16":
        return dequantize_int4(q, dtype, implementation)
    if q.format.row_scaled and len(q.matrix_shape) == 2:
        values = _dequantize(as_matrices(q), dtype, implementation)[..., 0, :]
        return jnp.swapaxes(values, -1, -2) if q.axis == -2 else values
    return _dequantize(q, dtype, implementation)


@functools.partial(jax.jit, static_argnames=("dtype", "implementation"))
def _dequantize(q: QuantizedArray, dtype: jax.typing.DTypeLike, implementation: Implementation) -> jax.Array:
    vector, fmt = len(q.matrix_shape) == 1, q.format
    data = q.data[..., None, :] if vector else q.data
    scale = q.scale[..., None, :] if vector and fmt.scaling != "tensor" else q.scale
    rows, columns = (1, *q.matrix_shape) if vector else (q.matrix_shape if q.axis == -1 else q.matrix_shape[::-1])
    operands = jax.lax.stop_gradient((data, scale) if q.amax is None else (data, scale, q.amax))

    def decode(columns: int, rotation: Hadamard | None, dtype: jax.typing.DTypeLike) -> jax.Array:
        ragged_columns = columns if columns % fmt.length else None
        ragged_rows = fmt.tiles and rows % fmt.length != 0
        op = dequantize_op(fmt, ragged_rows, ragged_columns, rotation, jnp.dtype(dtype), implementation)
        return op(*operands)[0]

    if q.hadamard is None or (fmt.scaling == "two_level" and q.hadamard.in_pass):
        values = decode(columns, q.hadamard, dtype)
    else:  # decoded in float32 with its padding to whole transforms, then rotated back
        size, signs = q.hadamard.size, q.hadamard.signs
        values = decode(-(-columns // size) * size, None, jnp.float32)
        options: Any = {"inverse": True, "implementation": implementation, "sign_key": q.signs}
        values = hadamard_transform(values, axis=-1, size=size, signs=signs, **options)
        values = values[..., :columns].astype(dtype)
    if vector:
        return values[..., 0, :]
    return jnp.swapaxes(values, -1, -2) if q.axis == -2 else values


@functools.cache
def dequantize_op(
    fmt: Format,
    ragged_rows: bool,
    ragged_columns: int | None,
    hadamard: Hadamard | None,
    dtype: jax.typing.DTypeLike,
    implementation: Implementation,
) -> wiring.Op:
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
    if fmt.scaling in ("tensor", "rows"):
        code = column = "c"
        scale, whole = ("...", []) if fmt.scaling == "tensor" else ("... r one", ["one"])
    amax = ", ..." if fmt.scaling == "two_level" else ""
    text = f"... {row} {code}, {scale}{amax} -> ... {row} {column}"
    sizes = {f: n for f, n in sizes.items() if f" {f})" in text}

    def columns(data: jax.Array) -> int:
        return data.shape[-1] * (1 + fmt.packed) if ragged_columns is None else ragged_columns

    def outputs(data: jax.Array, *_: jax.Array) -> wiring.Shapes:
        return [((*data.shape[:-1], columns(data)), dtype)]

    def run_reference(data: jax.Array, scale: jax.Array, amax: jax.Array | None = None) -> Sequence[jax.Array]:
        return [dequantize_rows(data, scale, amax, fmt, columns(data), hadamard, dtype)]

    def run_native(data: jax.Array, *operands: jax.Array) -> Sequence[jax.Array]:
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


def code_values(data: jax.Array, fmt: Format) -> jax.Array:
    """Codes as float32: packed ones [..., n] -> [..., 2n]. Those of Int4 are symmetric."""
    if not fmt.packed:
        return data.astype(jnp.float32)
    codes = jnp.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], 2 * data.shape[-1])
    return codes.astype(jnp.float32) - SYMMETRIC_ZERO if fmt.element == "int4" else e2m1_value(codes)


def scale_values(scale: jax.Array, fmt: Format, rows: int) -> jax.Array:
    """Scales as float32, one per row and block [..., rows, blocks]: scales of tiles are repeated over the tile's rows.

    A tensor's [...] becomes [..., 1, 1], those of rows stay [..., rows, 1].
    """
    if fmt.scaling == "tensor":
        return scale[..., None, None]
    if fmt.scaling == "e8m0":  # 2^-127, of zero blocks, is subnormal
        exponent = jax.lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.uint32)
        scale = jnp.where(exponent == E8M0_NAN, jnp.nan, from_bits(exponent << 23))
    scale = scale.astype(jnp.float32)
    return jnp.repeat(scale, fmt.length, axis=-2)[..., :rows, :] if fmt.tiles else scale


def dequantize_rows(
    data: jax.Array,
    scale: jax.Array,
    amax: jax.Array | None,
    fmt: Format,
    columns: int,
    hadamard: Hadamard | None,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Codes [..., R, bytes] -> [..., R, columns] of `dtype`: decoded and rotated back in float32, rounded once."""
    codes, scales = code_values(data, fmt), scale_values(scale, fmt, data.shape[-2])
    if fmt.scaling not in ("tensor", "rows"):
        scales = jnp.repeat(scales, fmt.length, axis=-1)[..., : codes.shape[-1]]
    values = flush(codes * scales)
    if amax is not None:
        values = flush(flush(values * amax[..., None, None]) * jnp.float32(1 / NVFP4_MAX))
    if hadamard:
        values = rotate_float32(values, hadamard, inverse=True)
    return values[..., :columns].astype(dtype)
