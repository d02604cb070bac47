"""Rows in groups, quantised, and their products: each group is treated as a separate array."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxlowprec.arrays.formats import BLOCK, Format
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.arrays.quantized_array import QuantizedArray, by_tensor
from jaxlowprec.ops.checks import Implementation, checked_precision, wants_float32_sums
from jaxlowprec.ops.grouped_matmul.op import GroupedMatmulSpec, bias_of_rows, grouped_matmul_op, grouped_wgrad_op
from jaxlowprec.ops.grouped_matmul.quantize_op import GroupedQuantizeSpec, grouped_amax_op, grouped_quantize_op
from jaxlowprec.ops.quantize.api import quantize
from jaxlowprec.ops.quantize.op import amax_field
from jaxlowprec.ops.rounding import flush, rounded
from jaxlowprec.ops.scaled_matmul.api import check_integers, check_pair, check_rotations


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("data", "scale", "amax", "sizes"),
    meta_fields=("format", "rows", "columns", "columnwise", "hadamard"),
)
@dataclasses.dataclass(frozen=True)
class GroupedQuantizedArray:
    """Rows [..., T, C] in E groups, each quantised as a separate tensor.

        rowwise      data and scale as in a QuantizedArray, row by row
        columnwise   blocks run along the rows of a group, and begin with it; in slots (`groups.Slots`):
                     data [..., C, slots * block / 2], or [..., C, T] for 8-bit codes; scale [..., C, slots]
        amax         float32 [..., E], or None; the scale of Float8Tensor [..., E]; of row-scaled formats [..., T]
        lines        a scale each, of Float8Rows and Int8Rows: rowwise [..., T, 1], columnwise [..., E, C, 1]

    Rows in no group are zero bytes.

    Attributes:
        data, scale, amax: as above.
        sizes: int32 [..., E], of the groups.
        format: what it is quantised to.
        rows, columns: T and C.
        columnwise: along the rows instead of along the features.
        hadamard: the rotation applied along the quantised axis of each group, or None.
    """

    data: jax.Array
    scale: jax.Array
    amax: jax.Array | None
    sizes: jax.Array
    format: Any
    rows: int
    columns: int
    columnwise: bool
    hadamard: Hadamard | None


def group_amaxes(
    x: Float[Array, "*B T C"],
    sizes: Int[Array, "*B E"],
    plain: bool,
    hadamard: Hadamard | None,
    implementation: Implementation = None,
) -> list[Float[Array, "*B E"]]:
    """The largest magnitude of each group: `plain`, then after the rotation along the rows where there is one."""
    return list(grouped_amax_op(plain, hadamard, implementation)(jax.lax.stop_gradient(x), sizes))


def quantize_groups(
    x: Float[Array, "*B T C"],
    sizes: Int[Array, "*B E"],
    fmt: Format,
    *,
    rowwise: bool,
    columnwise: bool,
    hadamard: Hadamard | None = None,
    words: UInt32[Array, "*B E 2"] | None = None,
    amaxes: tuple[Any, Any] | None = None,
    implementation: Implementation = None,
    eden: bool = False,
    encode_scale: Float[Array, "*B E"] | None = None,
) -> tuple[GroupedQuantizedArray | None, GroupedQuantizedArray | None]:
    """Quantises the rows of each group, along the features, along the rows, or both in one pass.

    The bytes of group e are those of `quantize(x_e, fmt, key=words[e])`.

    Arguments:
        x: bfloat16, float16 or float32.
        sizes: of the groups, which lie one after the other.
        fmt: without square tiles. A row-scaled one only rowwise.
        rowwise, columnwise: the wanted directions.
        hadamard: the rotation of the columnwise array: NVFP4's, of size 16; or None.
        words: for stochastic rounding, the words of a key for each group.
        eden: with words: it is scales that are rounded so; see `quantize`.
        amaxes: [..., E] rowwise and columnwise, where they are known.
        implementation: None, "ffi", "portable" or "reference": see `quantize`.
        encode_scale: [..., E], for Float8Tensor: what to multiply each group by; see `quantize`.

    Returns:
        The rowwise and the columnwise array, None where not wanted.
    """
    x, columns = jax.lax.stop_gradient(x), x.shape[-1]
    if fmt.row_scaled:
        if columnwise:
            raise NotImplementedError(
                f"grouped_matmul: {fmt} along the rows of groups; only fprop's input can be row-scaled: give wgrad "
                "roles of its own"
            )
        return _quantize_rows(x, sizes, fmt, implementation), None
    hadamard = hadamard if columnwise else None
    stochastic, unit = words is not None, max(fmt.length, BLOCK if words is not None else 1)
    directions, given = (rowwise, columnwise), encode_scale is not None
    spec = GroupedQuantizeSpec(fmt, *directions, hadamard, stochastic, columns % unit != 0, eden, given)
    tensors: list[jax.Array] = []
    if encode_scale is not None:
        tensors = [encode_scale] * spec.directions
    elif fmt.has_tensor_scale:
        found = amaxes or group_amaxes(x, sizes, rowwise or hadamard is None, hadamard, implementation)
        tensors = [found[0]] * rowwise + [found[-1]] * columnwise
    random: list[Any] = [] if words is None else [words]
    if stochastic:
        draws = -(-columns // BLOCK), -(-x.shape[-2] // BLOCK)
        ids = [(x.shape[-2], draws[0])] * rowwise + [(columns, draws[1])] * columnwise
        random += [jnp.arange(n, dtype=jnp.uint32) for pair in ids for n in pair]
    results = grouped_quantize_op(spec, implementation)(x, sizes, *tensors, *random)

    def array(i: int, along_rows: bool) -> GroupedQuantizedArray:
        amax = amax_field(fmt, tensors[i], eden) if fmt.scaling == "two_level" else None
        rotation = hadamard if along_rows else None
        data, scale = results[2 * i : 2 * i + 2]
        rows, columns = x.shape[-2:]
        return GroupedQuantizedArray(data, scale, amax, sizes, fmt, rows, columns, along_rows, rotation)

    row = array(0, False) if rowwise else None
    return row, array(int(rowwise), True) if columnwise else None


def _quantize_rows(
    x: jax.Array, sizes: jax.Array, fmt: Format, implementation: Implementation
) -> GroupedQuantizedArray:
    """x [..., T, C] with an amax for each row, whatever its group."""
    rows, columns = x.shape[-2:]
    in_groups = bias_of_rows(jnp.ones((*sizes.shape, 1), bool), sizes, rows)
    q = quantize(jnp.where(in_groups, x, jnp.zeros((), x.dtype)), fmt, implementation=implementation)
    return GroupedQuantizedArray(q.data, q.scale, q.amax, sizes, fmt, rows, columns, False, None)


def multiply_groups(
    a: GroupedQuantizedArray,
    b: QuantizedArray,
    bias: Float[Array, "*B E N"] | None,
    out_dtype: jax.typing.DTypeLike,
    implementation: Implementation = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*B T N"]:
    """a rowwise [..., T, K] by the weight of each row's group, b [..., E, N, K] quantised along K.

    Rows in no group give zeros. The bias is added in float32, before the one rounding. For `precision` see
    `scaled_matmul`.
    """
    check_pair("grouped_matmul", a.format, b.format)
    if a.format.row_scaled:
        return _multiply_rows(a, b, bias, out_dtype, implementation, precision)
    columns, depth = b.matrix_shape
    fmt = b.format
    if a.format.element == "int8":
        check_integers("grouped_matmul", depth)
    ragged_depth = depth % max(a.format.length, fmt.length) != 0
    ragged_columns = fmt.tiles and columns % fmt.length != 0
    exact = wants_float32_sums(checked_precision("grouped_matmul", precision))
    spec = GroupedMatmulSpec(a.format, fmt, ragged_columns, ragged_depth, bias is not None, jnp.dtype(out_dtype), exact)
    amaxes = (a.amax, b.amax) if spec.two_level else ()
    extras = () if bias is None else (bias.astype(jnp.float32),)
    return grouped_matmul_op(spec, implementation)(a.data, a.scale, b.data, b.scale, a.sizes, *amaxes, *extras)[0]


def _multiply_rows(
    a: GroupedQuantizedArray,
    b: QuantizedArray,
    bias: Any,
    out_dtype: jax.typing.DTypeLike,
    implementation: Implementation,
    precision: jax.lax.PrecisionLike,
) -> jax.Array:
    """`multiply_groups` of rows with amaxes of their own, which multiply the sums before the bias is added."""
    of_rows, of_groups = a.amax, b.amax
    assert of_rows is not None and of_groups is not None
    plain = dataclasses.replace(a, format=by_tensor(a.format), amax=jnp.ones_like(of_groups))
    b = dataclasses.replace(b, amax=jnp.ones_like(of_groups))
    sums = multiply_groups(plain, b, None, jnp.float32, implementation, precision)
    factor = flush(of_rows[..., None] * bias_of_rows(of_groups[..., None], a.sizes, a.rows))
    y = rounded(sums * factor)
    if bias is not None:
        y = y + bias_of_rows(bias.astype(jnp.float32), a.sizes, a.rows)
    return y.astype(out_dtype)


def multiply_within_groups(
    a: GroupedQuantizedArray,
    b: GroupedQuantizedArray,
    out_dtype: jax.typing.DTypeLike,
    implementation: Implementation = None,
    precision: jax.lax.PrecisionLike = None,
    accumulate: Float[Array, "*B E M N"] | None = None,
) -> Float[Array, "*B E M N"]:
    """a columnwise, of [..., T, M], transposed @ b columnwise, of [..., T, N], within each group.

    `accumulate`: of `out_dtype`; it is added in float32, before the one rounding. A group without rows gives it as it
    is, or else zeros.
    """
    check_pair("grouped_matmul", a.format, b.format)
    if a.format.scaling != b.format.scaling:
        raise NotImplementedError(
            f"grouped_matmul: wgrad is of {a.format} by {b.format}; such pairs are of rows by weights: quantise both "
            "operands of wgrad alike, or leave it in high precision"
        )
    check_rotations("grouped_matmul", a.hadamard, b.hadamard)
    if a.format.element == "int8":
        check_integers("grouped_matmul: wgrad, where a group may have all rows", a.rows)
    exact = wants_float32_sums(checked_precision("grouped_matmul", precision))
    given = () if accumulate is None else (accumulate,)
    spec = GroupedMatmulSpec(a.format, b.format, False, False, False, jnp.dtype(out_dtype), exact, bool(given))
    amaxes = (a.amax, b.amax) if spec.two_level else ()
    operands = (a.data, a.scale, b.data, b.scale, a.sizes, *amaxes, *given)
    return grouped_wgrad_op(spec, a.rows, implementation)(*operands)[0]
