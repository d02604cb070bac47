"""In what rows travel to experts on other devices: as they are, or as the codes and scales that the experts read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.formats import Format
from jaxlowprec.layers.fused.shared_input import Layer
from jaxlowprec.moe.grouped_linear import MODULE_TYPE
from jaxlowprec.ops.dequantize.api import dequantize
from jaxlowprec.ops.quantize.api import quantize
from jaxlowprec.recipes.autocast import resolve
from jaxlowprec.recipes.roles import Recipe, Role
from jaxlowprec.wiring import as_bytes, from_bytes

Wire = Literal["rows", "codes"]


class Formats(NamedTuple):
    """What rows are quantised to before they travel. None: they travel as they are.

    Attributes:
        rows: of the rows on their way to experts.
        gradient: of the gradient of the experts' results, on its way to experts.
    """

    rows: Format | None = None
    gradient: Format | None = None


AS_THEY_ARE = Formats()


def is_kept(fmt: Format) -> bool:
    """Whether a row that was decoded, and is quantised again, has the same numbers: blocks of a row, powers of two.

    The first scale is a power of two, and so is the second, which is the first, or half of it where codes have room for
    twice their value.
    """
    return not fmt.tiles and (fmt.scaling == "e8m0" or (fmt.scaling == "float32" and fmt.power_of_two))


def formats_of(who: str, layers: Sequence[Layer], dtype: Any) -> Formats:
    """What experts' layers, down's last, quantise their rows and the gradient of their results to.

    Arguments:
        dtype: of the rows.

    Raises:
        TypeError: rows of a dtype that does not hold all decoded numbers.
        ValueError: a format in which rows cannot travel.
    """
    *hidden, down = (resolve(who, layer.recipe, layer.name) for layer in layers)
    *names, name_of_down = (layer.name for layer in layers)
    inputs = {_role(recipe, name, "fprop") for recipe, name in zip(hidden, names, strict=True)}
    (role,) = inputs if len(inputs) == 1 else (None,)
    of_gradient = _role(down, name_of_down, "dgrad")
    if of_gradient is not None and (of_gradient.rounding != "nearest" or of_gradient.hadamard is not None):
        of_gradient = None
    found = Formats(*(None if r is None else r.format for r in (role, of_gradient)))
    for fmt in found:
        if fmt is not None and not is_kept(fmt):
            raise ValueError(
                f'{who}: wire="codes" and experts that read {fmt}; needs formats with a power of two for each block of '
                'a row, such as MXFP8 or Float8Block(power_of_two=True): take wire="rows" or another recipe'
            )
    if found != AS_THEY_ARE and jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        raise TypeError(
            f'{who}: wire="codes" and rows of {jnp.dtype(dtype)}, which does not hold all numbers that '
            f'{found.rows or found.gradient} stands for; needs bfloat16 or float32, or wire="rows"'
        )
    return found


def _role(recipe: Recipe | None, name: str, gemm: str) -> Role | None:
    """That of a GEMM's first operand, or None if it is not quantised."""
    if recipe is None:
        return None
    roles = recipe.roles(MODULE_TYPE, name)
    operands = "high_precision" if roles.ste is not None else roles.operands(gemm, recipe.backward_override)
    return operands[0] if isinstance(operands, tuple) else None


def sent(rows: jax.Array, fmt: Format | None, move: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """move(rows), with rows that travel in a format: codes and scales of a row lie together, as bytes."""
    if fmt is None:
        return move(rows)
    q = quantize(rows, fmt)
    codes, scales = _bytes_of(q.data), _bytes_of(q.scale)
    moved = move(jnp.concatenate([codes, scales], axis=1))
    parts = moved[:, : codes.shape[1]], moved[:, codes.shape[1] :]
    data, scale = (_from_bytes(part, like) for part, like in zip(parts, (q.data, q.scale), strict=True))
    shape = moved.shape[0], rows.shape[1]
    return dequantize(dataclasses.replace(q, data=data, scale=scale, matrix_shape=shape), rows.dtype)


def _bytes_of(x: jax.Array) -> jax.Array:
    """A matrix as uint8, with the same number of rows."""
    if x.dtype.itemsize == 1:
        return as_bytes(x)
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(x.shape[0], x.shape[1] * x.dtype.itemsize)


def _from_bytes(x: jax.Array, like: jax.Array) -> jax.Array:
    """The inverse of `_bytes_of`, for matrices of another one's dtype."""
    size = like.dtype.itemsize
    if size == 1:
        return from_bytes([x], [like.dtype])[0]
    return jax.lax.bitcast_convert_type(x.reshape(x.shape[0], x.shape[1] // size, size), like.dtype)
