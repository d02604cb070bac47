"""Layouts that other libraries use for the scales and data of a QuantizedArray, and their inverses.

A QuantizedArray keeps its scales logical: one per block, rows by blocks, no padding. Tensor cores read them in another
order (`gemm_scales`), and an array quantised columnwise can be stored in its original orientation (`to_compact`). All
of these are permutations, padded with zeros; each has an inverse.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxlowprec.arguments import a_dtype, array, is_one_of, shown, whole_number
from jaxlowprec.arrays.formats import Format
from jaxlowprec.arrays.quantized_array import QuantizedArray, check_quantized


def swizzle(scale: Array) -> Array:
    """The order in which block-scaled tensor cores read 1-byte scales: tiles of 128 rows by 4 blocks, 512 bytes each.

    Scale (i, j) goes to `((i/128) * T + j/4) * 512 + (i%32) * 16 + ((i%128)/32) * 4 + j%4` with T = ceil(C/4).

    Arguments:
        scale: [..., R, C], one byte each.

    Returns:
        [..., ceil(R/128) * ceil(C/4) * 512] of the same dtype, with zeros where R and C do not fill the tiles.

    Raises:
        ValueError: fewer than two axes, or scales of more than a byte.

    Source: numerics.md 6; cuBLAS documentation, "1D block scaling factors layout".

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> jlp.layouts.swizzle(jnp.zeros((130, 5), jnp.uint8)).shape
    (2048,)
    """
    scale = _array("swizzle", "scale", scale)
    if scale.ndim < 2 or scale.dtype == jnp.bool or jax.dtypes.itemsize_bits(scale.dtype) != 8:
        raise ValueError(
            f"swizzle: scale has shape {scale.shape} and dtype {scale.dtype}; needs [..., R, C] of one byte"
        )
    padded = pad_to_multiples(scale, 128, 4)
    *batch, rows, columns = padded.shape
    tiles = padded.reshape(*batch, rows // 128, 4, 32, columns // 4, 4)
    return jnp.moveaxis(tiles, (-5, -2, -3, -4, -1), (-5, -4, -3, -2, -1)).reshape(*batch, rows * columns)


def unswizzle(swizzled: Array, *, rows: int, columns: int) -> Array:
    """The inverse of `swizzle`: the [..., rows, columns] scales without padding.

    Raises:
        ValueError: a length that does not follow from rows and columns.
    """
    rows, columns = _sizes("unswizzle", rows, columns)
    return _unswizzled("unswizzle", _array("unswizzle", "swizzled", swizzled), rows, columns)


def _unswizzled(who: str, swizzled: Array, rows: int, columns: int) -> Array:
    down, across = -(-rows // 128), -(-columns // 4)
    if swizzled.ndim < 1 or swizzled.shape[-1] != down * across * 512:
        raise ValueError(
            f"{who}: the array of scales has shape {swizzled.shape}; {rows}x{columns} scales need "
            f"[..., {down * across * 512}]"
        )
    batch = swizzled.shape[:-1]
    tiles = swizzled.reshape(*batch, down, across, 32, 4, 4)
    ordered = jnp.moveaxis(tiles, (-5, -4, -3, -2, -1), (-5, -2, -3, -4, -1))
    return ordered.reshape(*batch, down * 128, across * 4)[..., :rows, :columns]


def gemm_scales(q: QuantizedArray) -> Array:
    """The scales of `q` as cuBLASLt's block-scaled GEMMs read them.

    | format | layout |
    |---|---|
    | NVFP4, MXFP8, MXFP4 | `swizzle`; those of square tiles are repeated for each row first |
    | Float8Block 1x128 | transposed, rows padded to a multiple of 4: [..., ceil(C/128), roundup(R, 4)] |
    | Float8Block 128x128 | blocks padded to a multiple of 4: [..., ceil(R/128), roundup(ceil(C/128), 4)] |
    | Float8Tensor, Float8Rows, Int8Rows | as it is |

    R is the number of lines, C the contracted length: for a columnwise array the logical sizes swapped.

    Raises:
        ValueError: a vector.
    """
    rows, _ = _lines(q, "gemm_scales")
    _check_format("gemm_scales", q.format)
    fmt, scale = q.format, q.scale
    if fmt.scaling in ("tensor", "rows"):
        return scale
    if fmt.scaling == "float32":
        return pad_to_multiples(scale if fmt.tiles else jnp.swapaxes(scale, -1, -2), 1, 4)
    return swizzle(jnp.repeat(scale, fmt.length, axis=-2)[..., :rows, :] if fmt.tiles else scale)


def logical_scales(scales: Array, fmt: Format, *, rows: int, columns: int) -> Array:
    """The inverse of `gemm_scales`, for `rows` lines of contracted length `columns`.

    Raises:
        ValueError: a shape that does not follow from rows and columns.
    """
    who = "logical_scales"
    _check_format(who, fmt)
    rows, columns = _sizes(who, rows, columns)
    scales = _array(who, "scales", scales)
    if fmt.scaling in ("tensor", "rows"):
        return scales
    lines, blocks = -(-rows // fmt.length) if fmt.tiles else rows, -(-columns // fmt.length)
    if fmt.scaling == "float32":
        expected = (lines, _up(blocks, 4)) if fmt.tiles else (blocks, _up(lines, 4))
        if scales.shape[-2:] != expected:
            raise ValueError(
                f"logical_scales: scales have shape {scales.shape}; {fmt} of {rows}x{columns} needs [..., {expected}]"
            )
        return (scales if fmt.tiles else jnp.swapaxes(scales, -1, -2))[..., :lines, :blocks]
    ordered = _unswizzled(who, scales, rows, blocks)
    return ordered[..., :: fmt.length, :] if fmt.tiles else ordered


def to_compact(q: QuantizedArray) -> tuple[Array, Array]:
    """Data and scales of a columnwise 8-bit array in the original orientation.

    Data is [..., M, K], scale [..., ceil(M/b), K] (square tiles: [..., ceil(M/b), ceil(K/b)]). A rowwise array is
    compact already.

    Raises:
        ValueError: packed 4-bit codes, whose bytes cannot be transposed, or a vector.
    """
    _lines(q, "to_compact")
    if q.format.packed:
        raise ValueError(f"to_compact: {q.format} packs two codes of a line in a byte; there is no compact form")
    if q.axis == -1:
        return q.data, q.scale
    data = jnp.swapaxes(q.data, -1, -2)
    return data, q.scale if q.format.scaling == "tensor" else jnp.swapaxes(q.scale, -1, -2)


def from_compact(
    data: Array, scale: Array, fmt: Format, *, axis: int = -1, dtype: jax.typing.DTypeLike = jnp.bfloat16
) -> QuantizedArray:
    """The inverse of `to_compact`, for an array that was not rotated.

    Arguments:
        data: [..., M, K] codes.
        scale: as `to_compact` gives it.
        fmt, axis, dtype: of the QuantizedArray.

    Raises:
        ValueError: packed 4-bit codes, another axis than -1 or -2, or scales that do not fit.
    """
    who = "from_compact"
    _check_format(who, fmt)
    data, scale = _array(who, "data", data), _array(who, "scale", scale)
    if fmt.packed or data.ndim < 2 or not is_one_of(axis, (-1, -2)):
        raise ValueError(
            f"{who}: {fmt}, data {data.shape}, axis={shown(axis)}; needs 8-bit codes [..., M, K], axis -1 or -2"
        )
    dtype = a_dtype(who, "dtype", dtype)
    matrix = data.shape[-2:]
    if axis == -2:
        data = jnp.swapaxes(data, -1, -2)
        scale = scale if fmt.scaling == "tensor" else jnp.swapaxes(scale, -1, -2)
    lines, length = data.shape[-2:]
    blocks = (-(-lines // fmt.length) if fmt.tiles else lines, fmt.blocks(length))
    expected = (*data.shape[:-2], *(() if fmt.scaling == "tensor" else blocks))
    if scale.shape != expected:
        raise ValueError(f"{who}: scales have shape {scale.shape}, their lines first; {fmt} needs {expected}")
    if (data.dtype, scale.dtype) != (fmt.data_dtype, fmt.scale_dtype):
        needs = f"{jnp.dtype(fmt.data_dtype)} and {jnp.dtype(fmt.scale_dtype)}"
        raise ValueError(f"{who}: data is {data.dtype} and scale {scale.dtype}; {fmt} needs {needs}")
    return QuantizedArray(data, scale, None, None, fmt, matrix, dtype, axis, None)


def _array(who: str, name: str, x: Any) -> Array:
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"{who}: {name}={shown(x)}; needs an array")
    return array(who, name, x)


def _sizes(who: str, rows: Any, columns: Any) -> tuple[int, int]:
    return whole_number(who, "rows", rows, 0), whole_number(who, "columns", columns, 0)


def _check_format(who: str, fmt: Any) -> None:
    if not isinstance(fmt, Format) or fmt.scaling == "float16":
        raise TypeError(f"{who}: fmt={shown(fmt)}; needs a format of floats such as MXFP8()")


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def pad_to_multiples(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """x with zeros up to multiples of `rows` and `columns` along its last two axes.

    Padded as bytes: float8_e8m0fnu cannot represent zero, so XLA does not pad it.
    """
    padding = [(0, 0)] * (x.ndim - 2) + [(0, -x.shape[-2] % rows), (0, -x.shape[-1] % columns)]
    if x.dtype.itemsize > 1:
        return jnp.pad(x, padding)
    padded = jnp.pad(jax.lax.bitcast_convert_type(x, jnp.uint8), padding)
    return jax.lax.bitcast_convert_type(padded, x.dtype)


def _lines(q: QuantizedArray, who: str) -> tuple[int, int]:
    """The number of lines that blocks run along, and their length."""
    check_quantized(who, "q", q)
    if len(q.matrix_shape) != 2:
        raise ValueError(f"{who}: shape {q.shape} is a vector; needs two dimensions or more")
    rows, columns = q.matrix_shape if q.axis == -1 else q.matrix_shape[::-1]
    return rows, columns
