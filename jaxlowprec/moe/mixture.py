"""The mixture-of-experts block for any router and experts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxlowprec.arguments import a_flag, array, one_of, shown, whole_number
from jaxlowprec.moe.dispatching import combine, dispatch, scatter_to_experts
from jaxlowprec.moe.router import Scoring, route
from jaxlowprec.ops.checks import mesh_axes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEAux:
    """The further results of a block of experts. A pytree.

    Attributes:
        load_balance_loss: float32, already times `load_balance_coef`: add it to the loss that is trained.
        tape: int32 [..., k], the experts that were used, for `RoutingTape` and replay.
        group_sizes: int32 [experts], the number of tokens that went to each.
    """

    load_balance_loss: Float[Array, ""]
    tape: Int32[Array, "*T k"]
    group_sizes: Int32[Array, "E"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a block routes; see `jaxlowprec.nnx.MoE`."""

    num_experts: int
    top_k: int
    normalize: bool | None
    scoring: Scoring
    load_balance_coef: float
    expert_axis: str | None


def mixture(
    who: str,
    x: Float[Array, "*T D"],
    tape: Int32[Array, "*T k"] | None,
    settings: Settings,
    router: Callable[[Array], Array],
    experts: Callable[[Array, Array], Array],
    shared: Callable[[Array], Array] | None,
) -> tuple[Float[Array, "*T D"], MoEAux]:
    """Routes tokens, computes their experts, and combines the results.

    Arguments:
        router: float32 tokens [..., D] to logits [..., experts].
        experts: takes rows sorted by expert, and group sizes; returns rows; see `GroupedLinear`.
        shared: processes every token; its result is added in float32, before the result is rounded once.
    """
    x = array(who, "x", x)
    if x.ndim < 1:
        raise ValueError(f"{who}: x is a scalar; needs tokens [..., D]")
    if tape is not None and tuple(getattr(tape, "shape", ())) != (*x.shape[:-1], settings.top_k):
        given = getattr(tape, "shape", None) or shown(tape)
        raise ValueError(
            f"{who}: x {x.shape} and tape {given}; needs a tape [..., k] of {(*x.shape[:-1], settings.top_k)}: one "
            "layer of a RoutingTape that was recorded for these tokens"
        )
    k, lead = settings.top_k, x.shape[:-1]
    tokens = math.prod(lead)
    logits = router(x.astype(jnp.float32)).reshape(tokens, settings.num_experts)
    routing = route(
        logits,
        k,
        tape=None if tape is None else tape.reshape(tokens, k),
        normalize=k > 1 if settings.normalize is None else settings.normalize,
        scoring=settings.scoring,
    )
    rows_of = _sharded_experts if settings.expert_axis is not None else _experts
    y, dtype = rows_of(x.reshape(tokens, x.shape[-1]), routing, experts, settings)
    y = y.reshape(*lead, y.shape[-1])
    if shared is not None:
        y = y + shared(x).astype(jnp.float32)
    loss = settings.load_balance_coef * routing.load_balance_loss
    return y.astype(dtype), MoEAux(loss, routing.experts.reshape(*lead, k), routing.group_sizes)


def _experts(x: Array, routing: Any, experts: Any, settings: Settings) -> tuple[Array, Any]:
    """The weighted sum of the experts' outputs in float32, and the dtype of these outputs."""
    where = dispatch(routing.experts, settings.num_experts)
    rows = experts(scatter_to_experts(x, where), where.group_sizes)
    return combine(rows, routing.weights, where), rows.dtype


def _sharded_experts(x: Array, routing: Any, experts: Any, settings: Settings) -> tuple[Array, Any]:
    """`_experts` within shard_map, where each device along the axis has a part of the experts.

    All devices along the axis have the same tokens. Each computes the rows of its own experts; the sum is in float32.
    """
    axis = settings.expert_axis
    mesh_axes("MoE", axis)
    local, rest = divmod(settings.num_experts, jax.lax.axis_size(axis))
    if rest:
        raise ValueError(
            f"MoE: {settings.num_experts} experts over expert_axis={axis!r} of {jax.lax.axis_size(axis)} devices; "
            "needs a multiple of them"
        )
    own = routing.experts - local * jax.lax.axis_index(axis).astype(jnp.int32)
    where = dispatch(own, local)
    rows = experts(scatter_to_experts(x, where), where.group_sizes)
    return jax.lax.psum(combine(rows, routing.weights, where), axis), rows.dtype


def check_block(who: str, settings: Settings, gated: Any, saved: Any) -> None:
    """Raises TypeError or ValueError if a block with these arguments cannot be made."""
    experts, k = settings.num_experts, settings.top_k
    for name, size in (("num_experts", experts), ("top_k", k)):
        whole_number(who, name, size)
    if experts < 1 or not 1 <= k <= experts:
        raise ValueError(f"{who}: top_k={k} of num_experts={experts}; needs 1 <= top_k <= num_experts")
    one_of(who, "scoring", settings.scoring, "softmax", "sigmoid")
    one_of(who, "saved", saved, "quantized", "8bit", "recompute")
    a_flag(who, gated=gated, **({} if settings.normalize is None else {"normalize": settings.normalize}))
    coefficient = settings.load_balance_coef
    number = isinstance(coefficient, int | float | np.number) and not isinstance(coefficient, bool)
    if not (number and math.isfinite(coefficient)) and not isinstance(coefficient, jax.Array):
        raise ValueError(f"{who}: load_balance_coef={shown(coefficient)}; needs a finite number")
    if not isinstance(settings.expert_axis, Hashable):
        raise TypeError(f"{who}: expert_axis={shown(settings.expert_axis)}; needs an axis of the mesh, or None")
