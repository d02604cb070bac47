"""Which variant of the quantise op an array needs, its operands, and QuantizedArrays of its results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.formats import BLOCK, Format
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.ops.quantize.op import QuantizeSpec, unit
from jaxlowprec.ops.rounding import MAX_FINITE, flush


def rotates_in_pass(fmt: Format, rotation: Hadamard) -> bool:
    """Whether the kernel rotates columns itself."""
    return fmt.scaling == "two_level" and not fmt.tiles and rotation.in_pass


def amax_field(fmt: Format, tensor: Any, eden: bool = False) -> Any:
    """The `amax` of a QuantizedArray whose tensor has that amax: more where scales have room: numerics.md 13, 14."""
    if not (fmt.chooses_scales or eden):
        return tensor
    return jnp.where(jnp.isfinite(tensor), jnp.minimum(flush(tensor) * 1.75, MAX_FINITE), tensor)


def spec_of(
    x: Any,
    fmt: Any,
    directions: tuple[bool, bool],
    hadamard: Hadamard | None,
    stochastic: bool,
    *,
    encode_scale_given: bool = False,
    rows_split: bool = False,
    eden: bool = False,
) -> QuantizeSpec:
    """The variant that quantises x [..., R, C] rowwise, columnwise or both; see `QuantizeSpec`."""
    rowwise, columnwise = directions
    rows, columns = x.shape[-2:]
    ragged = rows % unit(fmt, columnwise, stochastic) != 0, columns % unit(fmt, rowwise, stochastic) != 0
    return QuantizeSpec(fmt, *directions, hadamard, stochastic, encode_scale_given, *ragged, rows_split, eden)


def random_operands(
    spec: QuantizeSpec, x: Any, words: jax.Array | None, offset: tuple[Any, Any] | None = None
) -> list[jax.Array]:
    """The op's operands for random bits, made beside the op, so that they are split as x is.

    Arguments:
        words: of the key, uint32 [..., 2]; None: to nearest.
        offset: row and column of x's first element, uint32; None: x begins the array.
    """
    if words is None:
        return []
    rows, columns = x.shape[-2:]
    parts = x.shape[-3:-2] if spec.rows_split else ()
    row, column = offset or (None, None)
    row_sixteen, column_sixteen = (None if first is None else first // BLOCK for first in (row, column))

    def indices(first, count, *lead):
        index = jax.lax.iota(jnp.uint32, math.prod((*lead, count)))
        index = index.reshape(*lead, count) if lead else index
        return index if first is None else index + first

    operands = [words]
    if spec.rowwise:
        operands += [indices(row, rows, *parts), indices(column_sixteen, -(-columns // BLOCK))]
    if spec.columnwise:
        operands += [indices(column, columns), indices(row_sixteen, -(-rows // BLOCK), *parts)]
    return operands


def quantized_array(
    codes_and_scale: Sequence[jax.Array],
    tensor: jax.Array | None,
    spec: QuantizeSpec,
    like: tuple[tuple[int, ...], Any],
    along: tuple[int, Hadamard | None, jax.Array | None],
) -> QuantizedArray:
    """From the op's results for a direction; per-tensor numbers are broadcast to every slice.

    Arguments:
        tensor: its amax or encode scale, if there is one.
        like: shape and dtype of what was quantised.
        along: the quantised axis, the rotation along it, and its signs if they are drawn.
    """
    (data, scale), fmt, (shape, dtype) = codes_and_scale, spec.format, like

    def with_each(number):
        return jnp.broadcast_to(number[..., None], shape[:-2]) if spec.rows_split else number

    scale = with_each(scale) if fmt.scaling == "tensor" else scale
    amax = with_each(amax_field(fmt, tensor, spec.eden)) if fmt.scaling == "two_level" else None
    return QuantizedArray(data, scale, amax, None, fmt, shape[-2:], dtype, *along)


def quantized_arrays(
    results: Sequence[jax.Array], tensors: Sequence[jax.Array], spec: QuantizeSpec, like: Any
) -> list[QuantizedArray]:
    """From all results of the op: those of each direction that the spec wants, rotated as it says.

    Arguments:
        tensors: an amax or encode scale for each of them, or none.
        like: what was quantised.
    """
    along: list[Any] = [(-1, None, None)] * spec.rowwise + [(-2, spec.hadamard, None)] * spec.columnwise
    of_each: Sequence[Any] = tensors or [None] * len(along)
    each = zip(results[0::2], results[1::2], of_each, along, strict=True)
    shape = like.shape, like.dtype
    return [quantized_array((data, scale), tensor, spec, shape, own) for data, scale, tensor, own in each]
