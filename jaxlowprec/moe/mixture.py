"""The mixture-of-experts block for any router and experts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from jaxlowprec.arguments import a_flag, array, one_of, shown, whole_number
from jaxlowprec.moe.dispatching import combine, dispatch, scatter_to_experts
from jaxlowprec.moe.exchange import AllToAll, InPlace
from jaxlowprec.moe.router import Routing, route
from jaxlowprec.moe.router_config import RouterConfig, check_config
from jaxlowprec.moe.tape_dtype import fetched, narrowed
from jaxlowprec.moe.wire import Wire
from jaxlowprec.ops.checks import mesh_axes

Exchange = Literal["sum", "all_to_all"]
Groups = InPlace | AllToAll


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEAux:
    """The further results of a block of experts. A pytree.

    Attributes:
        load_balance_loss: float32, already times `load_balance_coef`.
        sequence_balance_loss: float32, already times `sequence_balance_coef`; 0 if that is 0.
        z_loss: float32, already times `z_loss_coef`; 0 if that is 0.
        tape: [..., k], the experts that were used, for `RoutingTape` and replay; of the dtype of the tape that was
            given, int32 without one.
        group_sizes: int32 [experts], the number of tokens that went to each; `update_selection_bias` takes them.
    """

    load_balance_loss: Float[Array, ""]
    sequence_balance_loss: Float[Array, ""]
    z_loss: Float[Array, ""]
    tape: Int[Array, "*T k"]
    group_sizes: Int32[Array, "E"]

    @property
    def loss(self) -> Float[Array, ""]:
        """The sum of the losses: add it to the loss that is trained."""
        return self.load_balance_loss + self.sequence_balance_loss + self.z_loss


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a block routes, and where its experts are; see `jaxlowprec.nnx.MoE`."""

    num_experts: int
    top_k: int
    routing: RouterConfig
    expert_axis: str | None
    exchange: Exchange = "sum"
    buffer_factor: float = 2.0
    wire: Wire = "rows"


def mixture(
    who: str,
    x: Float[Array, "*T D"],
    tape: Int[Array, "*T k"] | None,
    settings: Settings,
    router: Callable[[Array], Array],
    experts: Callable[[Array, Groups], Array],
    shared: Callable[[Array], Array] | None,
    *,
    bias: Float[Array, "E"] | None,
) -> tuple[Float[Array, "*T D"], MoEAux]:
    """Routes tokens, computes their experts, and combines the results.

    Arguments:
        router: float32 tokens [..., D] to logits [..., experts].
        experts: takes rows sorted by expert, and what runs them; returns rows; see `GroupedLinear`.
        shared: processes every token; its result is added in float32, before the result is rounded once.
        bias: the selection bias, if `settings.routing` has one.
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
        settings.routing,
        tape=None if tape is None else fetched(tape).reshape(tokens, k),
        bias=bias,
        sequence_length=lead[-1] if lead and tokens else None,
    )
    same_tokens = settings.expert_axis is not None and settings.exchange == "sum"
    rows_of = _sharded_experts if same_tokens else _experts
    y, dtype = rows_of(x.reshape(tokens, x.shape[-1]), routing, experts, settings)
    y = y.reshape(*lead, y.shape[-1])
    if shared is not None:
        y = y + shared(x).astype(jnp.float32)
    used = routing.experts.reshape(*lead, k)
    if tape is not None:
        used = narrowed(used, tape.dtype, settings.num_experts)
    return y.astype(dtype), MoEAux(*_losses(routing, settings.routing), used, routing.group_sizes)


def _losses(routing: Routing, config: RouterConfig) -> tuple[Array, Array, Array]:
    """The three losses times their coefficients."""
    balance = config.load_balance_coef * routing.load_balance_loss
    of_sequences, of_logits = (
        coefficient * loss if coefficient else jnp.zeros_like(loss)  # no cost where it is not asked for
        for coefficient, loss in (
            (config.sequence_balance_coef, routing.sequence_balance_loss),
            (config.z_loss_coef, routing.z_loss),
        )
    )
    return balance, of_sequences, of_logits


def _experts(x: Array, routing: Routing, experts: Any, settings: Settings) -> tuple[Array, Any]:
    """The weighted sum of the experts' outputs in float32, and the dtype of these outputs."""
    where = dispatch(routing.experts, settings.num_experts)
    groups: Groups = InPlace(where.group_sizes)
    if settings.exchange == "all_to_all":  # each device has tokens of its own and a part of the experts
        _own_experts(settings)
        groups = AllToAll(where, settings.expert_axis, settings.buffer_factor, wire=settings.wire)
    rows = experts(scatter_to_experts(x, where), groups)
    return combine(rows, routing.weights, where), rows.dtype


def _own_experts(settings: Settings) -> int:
    """How many experts each device along the axis has."""
    axis = settings.expert_axis
    mesh_axes("MoE", axis)
    local, rest = divmod(settings.num_experts, jax.lax.axis_size(axis))
    if rest:
        raise ValueError(
            f"MoE: {settings.num_experts} experts over expert_axis={axis!r} of {jax.lax.axis_size(axis)} devices; "
            "needs a multiple of them"
        )
    return local


def _sharded_experts(x: Array, routing: Routing, experts: Any, settings: Settings) -> tuple[Array, Any]:
    """`_experts` within shard_map, where each device along the axis has a part of the experts.

    All devices along the axis have the same tokens. Each computes the rows of its own experts; the sum is in float32.
    """
    local, axis = _own_experts(settings), settings.expert_axis
    own = routing.experts - local * jax.lax.axis_index(axis).astype(jnp.int32)
    where = dispatch(own, local)
    rows = experts(scatter_to_experts(x, where), InPlace(where.group_sizes))
    return jax.lax.psum(combine(rows, routing.weights, where), axis), rows.dtype


def check_block(who: str, settings: Settings, gated: Any, saved: Any) -> None:
    """Raises TypeError or ValueError if a block with these arguments cannot be made."""
    experts, k = settings.num_experts, settings.top_k
    for name, size in (("num_experts", experts), ("top_k", k)):
        whole_number(who, name, size)
    if experts < 1 or not 1 <= k <= experts:
        raise ValueError(f"{who}: top_k={k} of num_experts={experts}; needs 1 <= top_k <= num_experts")
    check_config(who, settings.routing).check(who, experts, k)
    one_of(who, "saved", saved, "quantized", "8bit", "recompute")
    a_flag(who, gated=gated)
    one_of(who, "exchange", settings.exchange, "sum", "all_to_all")
    if settings.exchange == "all_to_all" and settings.expert_axis is None:
        raise ValueError(f'{who}: exchange="all_to_all" and no expert_axis; needs the mesh axis of the experts')
    one_of(who, "wire", settings.wire, "rows", "codes")
    if settings.wire == "codes" and settings.exchange != "all_to_all":
        raise ValueError(f'{who}: wire="codes" and exchange={settings.exchange!r}; needs exchange="all_to_all"')
    factor: Any = settings.buffer_factor
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
        raise ValueError(f"{who}: buffer_factor={shown(factor)}; needs a number above 0, such as 2.0")
    if not isinstance(settings.expert_axis, Hashable):
        raise TypeError(f"{who}: expert_axis={shown(settings.expert_axis)}; needs an axis of the mesh, or None")
