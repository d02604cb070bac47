"""Checks of the arguments of `quantize` and `quantize_both`."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.arguments import a_flag, array, as_int, one_of, shown
from jaxlowprec.arrays.formats import BLOCK, Format
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.ops.checks import check_implementation, float_array
from jaxlowprec.ops.quantize.op import unit

Rounding = Literal["nearest", "stochastic", "eden"]
ROUNDINGS = get_args(Rounding)


def quantizable(who: str, x: Any, fmt: Any) -> jax.Array:
    """x as an array, checked together with the format."""
    if not isinstance(fmt, Format):
        raise TypeError(f"{who}: fmt={shown(fmt)}; needs a format such as jaxlowprec.NVFP4()")
    x = float_array(who, "x", x)
    if x.ndim == 0:
        raise ValueError(f"{who}: x is a scalar; needs one dimension or more")
    return x


def checked_options(
    who: str, axes: tuple[int, ...], rounding: Any, offset: Any, axis_name: Any, rows_split: Any, implementation: Any
) -> tuple[Any, Any] | None:
    """Raises for invalid options; returns the row and column of `offset`; None if both are 0."""
    one_of(who, "rounding", rounding, *ROUNDINGS)
    a_flag(who, rows_split=rows_split)
    check_implementation(who, implementation)
    if axis_name is not None and not isinstance(axis_name, Hashable):
        raise TypeError(f"{who}: axis_name={shown(axis_name)}; needs an axis of the mesh, or a tuple of them")
    if not isinstance(offset, tuple | list) or len(offset) != 2:
        raise TypeError(f"{who}: offset={shown(offset)}; needs a pair of ints, the row and the column")
    row, column = (
        _index(who, offset, axis, o, BLOCK if axis in axes else 1) for axis, o in zip((-2, -1), offset, strict=True)
    )
    known = not isinstance(row, jax.Array) and not isinstance(column, jax.Array)
    return None if known and row == column == 0 else (row, column)


def _index(who: str, offset: Any, axis: int, index: Any, unit: int) -> Any:
    """The row or column of `offset` as uint32; along a quantised axis it is a multiple of `unit`."""
    if isinstance(index, jax.Array):
        if index.shape != () or not jnp.issubdtype(index.dtype, jnp.integer):
            raise TypeError(
                f"{who}: offset has {index.dtype}{list(index.shape)} along axis {axis}; needs an integer scalar"
            )
        return index.astype(jnp.uint32)
    try:
        number = as_int(index)
    except TypeError:
        raise TypeError(f"{who}: offset={shown(offset)}; needs a pair of ints, the row and the column") from None
    if not 0 <= number < 2**32 or number % unit:
        limit = "" if number < 2**32 else " and below 2^32"
        raise ValueError(
            f"{who}: offset={shown(offset)}; along axis {axis} it needs a multiple of {unit} from 0 on{limit}"
        )
    return np.uint32(number)


def tensor_batch(
    who: str, x: jax.Array, fmt: Format, axes: tuple[int, ...], rotation: Any, rounding: str, rows_split: bool
) -> tuple[int, ...]:
    """The batch axes; each slice along them is a tensor."""
    if not rows_split:
        return x.shape[:-2]
    if x.ndim < 3:
        raise ValueError(f"{who}: rows_split=True and x has shape {x.shape}; needs three dimensions or more")
    needs = part_unit(fmt, rotation if -2 in axes else None, rounding, -2 in axes)
    if x.shape[-2] % needs:
        raise ValueError(
            f"{who}: rows_split=True and x has {x.shape[-2]} rows in each part; needs a multiple of {needs}, or "
            "x.reshape(-1, x.shape[-1]) without rows_split="
        )
    return x.shape[:-3]


def part_unit(fmt: Format, rotation: Hadamard | None, rounding: str, columnwise: bool) -> int:
    """The rows of a part are a multiple of this number, so that no block and no draw lies on two parts."""
    return math.lcm(unit(fmt, columnwise, draws_bits(rounding)), rotation.size if rotation else 1)


def check_length(who: str, x: jax.Array, fmt: Format, axis: int) -> None:
    """Raises ValueError if the quantised axis does not end with a whole block, unless the format pads."""
    if not fmt.pad and (length := x.shape[axis]) % fmt.length:
        named, remedy = str(fmt), ""
        if fmt.weight_only:
            named, remedy = f"{type(fmt).__name__}(group_size={fmt.length})", ", or pad=True"
        raise ValueError(
            f"{who}: x has {length} elements along axis {axis}; {named} needs a multiple of {fmt.length}{remedy}"
        )


def check_holds(who: str, x: jax.Array, fmt: Format) -> None:
    """Raises TypeError if x's dtype cannot hold the decoded numbers."""
    if (served := fmt.served_dtype) is not None and x.dtype not in (jnp.float32, jnp.dtype(served)):
        raise TypeError(
            f"{who}: x is {x.dtype}, which cannot hold the {served} numbers that {fmt} decodes to; cast x to {served} "
            f'or float32, or use scale_dtype="{x.dtype}"'
        )


def check_plain(who: str, fmt: Format, rotation: Hadamard | None, rounding: str) -> None:
    """Raises ValueError for options that a format does not have."""
    check_rounding(who, fmt, rounding)
    check_eden(who, fmt, rotation, rounding)
    if not fmt.nearest_only:
        return
    if rotation:
        what = "arrays" if fmt.row_scaled else "weights"
        raise ValueError(f"{who}: hadamard={rotation} was given, but {fmt} {what} are not rotated; leave it out")
    if rounding == "stochastic":
        raise ValueError(nearest_only(who, fmt, rounding))


def nearest_only(who: str, fmt: Format, rounding: str) -> str:
    """The message for a format that only rounds to nearest."""
    return f'{who}: rounding="{rounding}" was given, but {fmt} only rounds to nearest; leave it out'


def draws_bits(rounding: str) -> bool:
    """Whether a rounding needs random bits."""
    return rounding != "nearest"


def checked_roundings(who: str, fmt: Format, rotation: Hadamard | None, rounding: Any) -> tuple[Rounding, Rounding]:
    """`rounding` of `quantize_both`, one for both directions or a pair, as a pair. `rotation`: of the columns."""
    pair = rounding if isinstance(rounding, tuple) else (rounding, rounding)
    if len(pair) != 2:
        raise TypeError(f"{who}: rounding={shown(rounding)}; needs one rounding, or that of rows and that of columns")
    for one in pair:
        one_of(who, "rounding", one, *ROUNDINGS)
        check_rounding(who, fmt, one)
    row, column = pair
    check_eden(who, fmt, rotation, column)
    if row == "eden":
        raise ValueError(
            f'{who}: rounding="eden" of the rowwise result, which is not rotated; pass a pair such as '
            '("nearest", "eden"), or call quantize(x, fmt, axis=-1, ...) and quantize(x, fmt, axis=-2, ...)'
        )
    return row, column


def check_eden(who: str, fmt: Format, rotation: Hadamard | None, rounding: str) -> None:
    """Raises ValueError for MS-EDEN of what it is not made for (numerics.md 14)."""
    if rounding != "eden":
        return
    if fmt.nearest_only:
        raise ValueError(nearest_only(who, fmt, rounding))
    if fmt.scaling != "two_level" or fmt.tiles:
        raise ValueError(
            f'{who}: rounding="eden" and fmt={fmt}; it corrects the E4M3 scale of each 16 elements: use NVFP4 with '
            'block=(1, 16), or rounding="stochastic"'
        )
    if rotation is None:
        raise ValueError(
            f'{who}: rounding="eden" without hadamard=; codes round to nearest, and only a rotation keeps their errors '
            "from adding up: pass hadamard= for both operands of the GEMM"
        )


def check_rounding(who: str, fmt: Format, rounding: str) -> None:
    """Raises ValueError for stochastic rounding by scales that are chosen for the least error."""
    if fmt.chooses_scales and rounding == "stochastic":
        raise ValueError(
            f'{who}: rounding="stochastic" and scale_rule={shown(fmt.scale_rule)}; to choose among '
            'random outcomes biases them: use rounding="nearest", or scale_rule="six"'
        )


def given_tensor(who: str, fmt: Format, amax: Any, encode_scale: Any, batch: tuple[int, ...]) -> jax.Array | None:
    """The checked `amax=` or `encode_scale=`, one number per slice; None if neither is given."""
    if amax is not None and encode_scale is not None:
        raise ValueError(f"{who}: amax= and encode_scale= were given; pass one of them")
    name, value = ("amax", amax) if encode_scale is None else ("encode_scale", encode_scale)
    if value is None:
        return None
    if not fmt.has_tensor_scale:
        raise ValueError(f"{who}: {name}= was given, but {fmt} scales each block by its own amax; leave it out")
    if name == "encode_scale" and fmt.scaling != "tensor":
        raise ValueError(
            f"{who}: encode_scale= was given, but {fmt} has two levels of scales; pass amax=, or Float8Tensor"
        )
    given, value = value, array(who, name, value)
    if value.dtype != jnp.float32 or value.shape not in ((), batch):
        raise ValueError(
            f"{who}: {name} has dtype {value.dtype} and shape {value.shape}; needs float32 and the batch axes {batch}"
        )
    if name == "amax" and not isinstance(given, jax.Array) and np.min(given, initial=0) < 0:
        raise ValueError(f"{who}: amax={shown(given)}; needs magnitudes, 0 or more")
    return jax.lax.stop_gradient(jnp.broadcast_to(value, batch))
