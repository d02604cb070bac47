"""The form of rows on the way to experts on other devices: as they are, or the codes and scales that experts read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.formats import MXFP8, Format
from jaxlowprec.layers.shared_input import Layer
from jaxlowprec.moe.grouped_linear import MODULE_TYPE
from jaxlowprec.ops.dequantize import dequantize
from jaxlowprec.ops.quantize.api import quantize
from jaxlowprec.recipes.autocast import resolve
from jaxlowprec.recipes.roles import Recipe, Role
from jaxlowprec.wiring import as_bytes, from_bytes

Wire = Literal["rows", "codes", "codes_both_ways"]
WIRES = get_args(Wire)


class Formats(NamedTuple):
    """The roles by which rows are quantised before they travel. None: they travel as they are.

    Attributes:
        rows: of the rows on their way to experts.
        gradient: of the gradient of the experts' results, on its way to experts.
        back: of the experts' results, and of the gradient of their rows, on the way back.
    """

    rows: Format | None = None
    gradient: Format | None = None
    back: Format | None = None


AS_THEY_ARE = Formats()


def is_kept(fmt: Format) -> bool:
    """Whether a row that was decoded, and is quantised again, has the same numbers: blocks of a row, powers of two.

    The first scale is a power of two, and so is the second, which is the first, or half of it where codes have room for
    twice their value.
    """
    return not fmt.tiles and (fmt.scaling == "e8m0" or (fmt.scaling == "float32" and fmt.power_of_two))


def formats_of(who: str, layers: Sequence[Layer] | None, dtype: Any, wire: Wire) -> Formats:
    """The formats of rows and gradients on their way: those that the experts' layers read, where a decoded row keeps
    its numbers, and otherwise MXFP8. Tensors that no layer quantises travel as they are.

    Arguments:
        layers: those of the experts, down's last; None: they are not one function.
        dtype: of the rows.

    Raises:
        TypeError: rows of a dtype that does not hold all decoded numbers.
        ValueError: rows are to be quantised for layers that are not known.
    """
    if wire == "rows":
        return AS_THEY_ARE
    if layers is None:
        raise ValueError(
            f'{who}: wire="{wire}" and experts that are not one function; needs layers of GroupedLinear or '
            'GroupedDense, and an activation without arrays of its own: or take wire="rows"'
        )
    *hidden, down = (resolve(who, layer.recipe, layer.name) for layer in layers)
    *names, name_of_down = (layer.name for layer in layers)
    inputs = {_role(recipe, name, "fprop") for recipe, name in zip(hidden, names, strict=True)}
    (role,) = inputs if len(inputs) == 1 else (None,)
    found = Formats(_travelling(role), _travelling(_role(down, name_of_down, "dgrad")))
    if found == AS_THEY_ARE:
        return found
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        raise TypeError(
            f'{who}: wire="{wire}" and rows of {jnp.dtype(dtype)}, which does not hold all numbers that '
            f'{found.rows or found.gradient} stands for; needs bfloat16 or float32, or wire="rows"'
        )
    return found._replace(back=MXFP8()) if wire == "codes_both_ways" else found


def _travelling(role: Role | None) -> Format | None:
    """The format in which the operand of a role travels."""
    if role is None:
        return None
    as_read = is_kept(role.format) and role.rounding == "nearest" and role.hadamard is None
    return role.format if as_read else MXFP8()


def _role(recipe: Recipe | None, name: str, gemm: str) -> Role | None:
    """The role of a GEMM's first operand, or None if it is not quantised."""
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
    return dequantize(dataclasses.replace(q, data=data, scale=scale, matrix_shape=shape), dtype=rows.dtype)


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
