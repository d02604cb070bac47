"""Sends tokens to their experts and back: sorted by expert, without capacity, padding or one-hot matrices.

    x [T, D]  -> rows [T*k, D], sorted by expert, each expert's tokens in their order     scatter_to_experts
    rows [T*k, N], weights [T, k] -> y [T, N], summed over k in float32, first to last     combine

Both are gathers in the forward and the backward pass, so no sum depends on how other tokens are routed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxlowprec import wiring
from jaxlowprec.arguments import array, as_array, shown, whole_number
from jaxlowprec.moe.router import in_order
from jaxlowprec.ops.rounding import rounded


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dispatch:
    """The places of each token's k rows in the sorted rows. A pytree.

    Attributes:
        order: int32 [T*k]: for each place, the choice that is there: token * k + the choice's index in the token's row.
            Shorter, if the last places, which belong to no expert, were cut.
        places: int32 [T, k]: the place of each choice; the inverse of `order`.
        group_sizes: int32 [experts]: rows of each expert. Rows past their sum belong to no expert.
    """

    order: Int32[Array, "T*k"]
    places: Int32[Array, "T k"]
    group_sizes: Int32[Array, "E"]


def dispatch(experts: Int32[Array, "T k"], num_experts: int) -> Dispatch:
    """Sorts the tokens' choices by expert, stably.

    Arguments:
        experts: int32 [tokens, k]. Values outside [0, num_experts) come last and belong to no expert.
        num_experts: the number of experts.

    Raises:
        TypeError, ValueError: experts is not int32 [tokens, k].

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> found = jlp.moe.dispatch(jnp.asarray([[2, 0], [0, 1]], jnp.int32), 3)
    >>> found.order.tolist(), found.places.tolist(), found.group_sizes.tolist()
    ([1, 2, 3, 0], [[3, 0], [1, 2]], [2, 1, 1])
    """
    if not isinstance(experts, jax.Array | np.ndarray):
        raise TypeError(f"dispatch: experts={shown(experts)}; needs int32 [tokens, k]")
    num_experts = whole_number("dispatch", "num_experts", num_experts, 0)
    if experts.ndim != 2 or experts.dtype != jnp.int32:
        raise (ValueError if experts.ndim != 2 else TypeError)(
            f"dispatch: experts are {experts.dtype}{list(experts.shape)}; needs int32 [tokens, k]"
        )
    flat = as_array(experts).reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    places = jnp.argsort(order, stable=True).astype(jnp.int32).reshape(experts.shape)
    # Under shard_map argsort's type does not say that places differ from device to device; then the gradients of rows
    # would be added up before they go back to their tokens.
    _, order, places = wiring.align_varying(flat, order, places)
    group_sizes = jnp.zeros(num_experts, jnp.int32).at[flat].add(1, mode="drop")
    return Dispatch(order, places, group_sizes)


def first_places(where: Dispatch, count: int) -> Dispatch:
    """The dispatch without places after the first `count`, which must be at least the sum of the group sizes."""
    return dataclasses.replace(where, order=where.order[:count])


def scatter_to_experts(x: Float[Array, "T D"], where: Dispatch) -> Float[Array, "T*k D"]:
    """Each token's row k times, sorted by expert. The gradient of x is summed in float32, in the order of the k.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> found = jlp.moe.dispatch(jnp.asarray([[2, 0], [0, 1]], jnp.int32), 3)
    >>> jlp.moe.scatter_to_experts(jnp.asarray([[1.0], [2.0]]), found).ravel().tolist()
    [1.0, 2.0, 2.0, 1.0]
    """
    who = "scatter_to_experts"
    tokens, _ = _places(who, where)
    x = array(who, "x", x)
    if x.ndim < 1 or x.shape[0] != tokens:
        raise ValueError(f"{who}: x has shape {x.shape} and where {tokens} tokens; needs x [tokens, D]")
    return _scatter(*wiring.align_varying(x, where.order, where.places))


def _places(who: str, where: Any) -> tuple[int, int]:
    """The tokens and the k of a dispatch. Raises if it is not one."""
    if not isinstance(where, Dispatch):
        raise TypeError(f"{who}: where={shown(where)}; needs a Dispatch, as jaxlowprec.moe.dispatch returns")
    shape = jnp.shape(where.places)
    order = jnp.shape(where.order)
    if len(shape) != 2 or len(order) != 1 or order[0] > shape[0] * shape[1]:
        raise ValueError(f"{who}: where has places {shape} and order {order}; needs [tokens, k] and [tokens * k]")
    return shape


def _rows(x: Array, indices: Array) -> Array:
    """x[indices], which come from sorting and are in bounds."""
    return x.at[indices].get(mode="promise_in_bounds")


def _rows_at(x: Array, places: Array) -> Array:
    """x[places]; zeros for places that were cut."""
    if x.shape[0] == places.size:
        return _rows(x, places)
    return x.at[places].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _scatter(x: Array, order: Array, places: Array) -> Array:
    return _rows(x, order // places.shape[1])


def _scatter_fwd(x: Array, order: Array, places: Array) -> tuple[Array, Array]:
    return _scatter(x, order, places), places


def _scatter_bwd(places: Array, gradient: Array) -> tuple[Array, None, None]:
    return in_order(_rows_at(gradient, places).astype(jnp.float32)).astype(gradient.dtype), None, None


_scatter.defvjp(_scatter_fwd, _scatter_bwd)


def combine(rows: Float[Array, "T*k N"], weights: Float[Array, "T k"], where: Dispatch) -> Float[Array, "T N"]:
    """Brings the experts' rows back to their tokens: weighted and summed in float32, in the order of the k.

    The result is float32, so that more can be added before it is rounded. Gradients of rows have their dtype.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> found = jlp.moe.dispatch(jnp.asarray([[2, 0], [0, 1]], jnp.int32), 3)
    >>> rows = jlp.moe.scatter_to_experts(jnp.asarray([[1.0], [2.0]]), found)
    >>> jlp.moe.combine(rows, jnp.asarray([[0.5, 0.25], [1.0, 0.0]]), found).tolist()
    [[0.75], [2.0]]
    """
    who = "combine"
    places = _places(who, where)
    rows, weights = array(who, "rows", rows), array(who, "weights", weights)
    if rows.ndim != 2 or rows.shape[0] != jnp.shape(where.order)[0] or weights.shape != places:
        raise ValueError(
            f"{who}: rows {rows.shape} and weights {weights.shape} of a dispatch of {places}; needs rows "
            "[tokens * k, N] and weights [tokens, k]"
        )
    return _combine(*wiring.align_varying(rows, weights, where.order, where.places))


@jax.custom_vjp
def _combine(rows: Array, weights: Array, order: Array, places: Array) -> Array:
    return in_order(rounded(_rows_at(rows, places).astype(jnp.float32) * weights[..., None]))


def _combine_fwd(rows: Array, weights: Array, order: Array, places: Array) -> tuple[Array, tuple[Array, ...]]:
    return _combine(rows, weights, order, places), (rows, weights, order, places)


def _combine_bwd(saved: tuple[Array, ...], gradient: Array) -> tuple[Array, Array, None, None]:
    rows, weights, order, places = saved
    of_rows = _rows(gradient, order // places.shape[1]) * _rows(weights.reshape(-1), order)[:, None]
    of_weights = jnp.sum(_rows_at(rows, places).astype(jnp.float32) * gradient[:, None, :], axis=-1)
    return of_rows.astype(rows.dtype), of_weights, None, None


_combine.defvjp(_combine_fwd, _combine_bwd)
