"""The mixture-of-experts block for any router and experts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from jaxlowprec.arguments import a_flag, array, one_of, shown, whole_number
from jaxlowprec.moe.deduplicated import DeduplicatedAllToAll
from jaxlowprec.moe.dispatching import dispatch
from jaxlowprec.moe.exchange import AllToAll, Combined, InPlace
from jaxlowprec.moe.router import RouterConfig, Routing, check_config, route
from jaxlowprec.moe.tape_dtype import fetched, narrowed
from jaxlowprec.moe.wire import WIRES, Wire
from jaxlowprec.ops.checks import mesh_axes

ExchangeKind = Literal["sum", "all_to_all", "deduplicated"]
Groups = InPlace | AllToAll | DeduplicatedAllToAll


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
class Exchange:
    """How tokens get to experts on other devices, and their results back. No token is dropped.

    Attributes:
        axis: the mesh axis in shard_map along which the experts' kernels are split, see docs/how-to/moe.md.
        kind: "sum": all devices along the axis have the same tokens, and their results are added up. "all_to_all": each
            has tokens of its own, and rows are sent to their experts and back. "deduplicated": the same, but a token is
            sent once to each device that has experts of it, which sends back the sum of their results.
        buffer_factor: where each device has tokens of its own: buffers are for so many times the mean rows. A step in
            which any device has more uses larger buffers and recomputes the experts in its backward pass: the same
            result, slower.
        wire: in what rows travel then. "rows": as they are. "codes": rows, and the gradient of the experts' results,
            are quantised before they travel to experts. "codes_both_ways": so are results, and the gradient of rows, on
            the way back. See docs/how-to/moe.md for the bytes and the error of each.

    >>> import jaxlowprec as jlp
    >>> jlp.moe.Exchange("experts", kind="all_to_all", wire="codes")
    Exchange(axis='experts', kind='all_to_all', buffer_factor=2.0, wire='codes')
    >>> jlp.moe.Exchange("experts", wire="codes")
    Traceback (most recent call last):
    ValueError: Exchange: wire="codes" and kind="sum"; needs kind="all_to_all" or "deduplicated"
    """

    axis: Hashable
    kind: ExchangeKind = "sum"
    buffer_factor: float = 2.0
    wire: Wire = "rows"

    def __post_init__(self) -> None:
        who = "Exchange"
        if self.axis is None or not isinstance(self.axis, Hashable):
            raise TypeError(f"{who}: axis={shown(self.axis)}; needs the mesh axis of the experts")
        one_of(who, "kind", self.kind, *get_args(ExchangeKind))
        one_of(who, "wire", self.wire, *WIRES)
        if self.wire != "rows" and self.kind == "sum":
            raise ValueError(f'{who}: wire="{self.wire}" and kind="sum"; needs kind="all_to_all" or "deduplicated"')
        factor: Any = self.buffer_factor
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
            raise ValueError(f"{who}: buffer_factor={shown(factor)}; needs a number above 0, such as 2.0")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a block routes, and where its experts are; see `jaxlowprec.nnx.MoE`."""

    num_experts: int
    top_k: int
    routing: RouterConfig
    exchange: Exchange | None


def mixture(
    who: str,
    x: Float[Array, "*T D"],
    tape: Int[Array, "*T k"] | None,
    settings: Settings,
    router: Callable[[Array], Array],
    experts: Callable[[Array, Groups], Combined],
    shared: Callable[[Array], Array] | None,
    *,
    bias: Float[Array, "E"] | None,
) -> tuple[Float[Array, "*T D"], MoEAux]:
    """Routes tokens, computes their experts, and combines the results.

    Arguments:
        router: float32 tokens [..., D] to logits [..., experts].
        experts: takes tokens, and what runs their experts.
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
    y, like = _combined(x.reshape(tokens, x.shape[-1]), routing, experts, settings)
    y = y.reshape(*lead, y.shape[-1])
    if shared is not None:
        y = y + shared(x).astype(jnp.float32)
    used = routing.experts.reshape(*lead, k)
    if tape is not None:
        used = narrowed(used, tape.dtype, settings.num_experts)
    return y.astype(like.dtype), MoEAux(*_losses(routing, settings.routing), used, routing.group_sizes)


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


def _combined(x: Array, routing: Routing, experts: Callable[[Array, Groups], Combined], settings: Settings) -> Combined:
    """The weighted sum of the experts' outputs."""
    exchange, experts_in_all = settings.exchange, settings.num_experts
    if exchange is None:
        return experts(x, InPlace(dispatch(routing.experts, experts_in_all), routing.weights))
    own, axis = own_experts(exchange, experts_in_all), exchange.axis
    if exchange.kind == "sum":  # all devices along the axis have the same tokens
        chosen = routing.experts - own * jax.lax.axis_index(axis).astype(jnp.int32)
        y, like = experts(x, InPlace(dispatch(chosen, own), routing.weights))
        return jax.lax.psum(y, axis), like
    how: Any = {"axis": axis, "factor": exchange.buffer_factor, "wire": exchange.wire}
    if exchange.kind == "deduplicated":
        return experts(x, DeduplicatedAllToAll(routing, **how))
    return experts(x, AllToAll(dispatch(routing.experts, experts_in_all), routing.weights, **how))


def own_experts(exchange: Exchange, num_experts: int) -> int:
    """How many experts each device along the axis has."""
    axis = exchange.axis
    mesh_axes("MoE", axis)
    local, rest = divmod(num_experts, jax.lax.axis_size(axis))
    if rest:
        raise ValueError(
            f"MoE: {num_experts} experts over the {jax.lax.axis_size(axis)} devices of Exchange(axis={axis!r}); needs "
            "a multiple of them"
        )
    return local


def check_block(who: str, settings: Settings, gated: Any, saved: Any, **flags: Any) -> None:
    """Raises TypeError or ValueError if a block with these arguments cannot be made."""
    experts, k = settings.num_experts, settings.top_k
    for name, size in (("num_experts", experts), ("top_k", k)):
        whole_number(who, name, size)
    if experts < 1 or not 1 <= k <= experts:
        raise ValueError(f"{who}: top_k={k} of num_experts={experts}; needs 1 <= top_k <= num_experts")
    check_config(who, settings.routing).check(who, experts, k)
    one_of(who, "saved", saved, "quantized", "8bit", "recompute")
    if gated != "joint":
        a_flag(who, gated=gated)
    a_flag(who, **flags)
    if settings.exchange is not None and not isinstance(settings.exchange, Exchange):
        raise TypeError(f"{who}: exchange={shown(settings.exchange)}; needs a jaxlowprec.moe.Exchange, or None")
