"""Tokens that travel once to each device that has experts of theirs, where these experts' results are added up.

A token whose k experts are on fewer than k devices travels fewer than k times, there and back. What comes back is a sum
over a device's experts, in the dtype of their results, so the order of the sum over k is that of devices first.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxlowprec.layers.shared_input import Layer
from jaxlowprec.moe.dispatching import Dispatch, combine, dispatch, first_places, scatter_to_experts
from jaxlowprec.moe.exchange import (
    Combined,
    Compute,
    Plan,
    Route,
    on_all_devices,
    plan_of,
    rows_to_experts,
    to_experts,
    to_tokens,
    with_usual_buffers,
)
from jaxlowprec.moe.router import Routing
from jaxlowprec.moe.wire import AS_THEY_ARE, Wire, formats_of


def to_devices(experts: Int32[Array, "T k"], own: int, devices: int) -> Dispatch:
    """Sorts tokens by the devices of their experts; each device has `own`. A device has a token once."""
    homes = experts // own
    again = (homes[:, :, None] == homes[:, None, :]) & jnp.tri(homes.shape[1], k=-1, dtype=bool)
    where = dispatch(jnp.where(again.any(axis=2), devices, homes).astype(jnp.int32), devices)
    return first_places(where, homes.shape[0] * min(homes.shape[1], devices))


@dataclasses.dataclass(frozen=True)
class DeduplicatedAllToAll:
    """Experts on other devices, to which tokens travel.

    Attributes:
        routing: of this device's tokens; group sizes are those of all experts.
        axis: the mesh axis of the experts.
        factor: buffers are for so many times the mean number of rows. Where any device has more, all devices use
            buffers that are large enough in any case.
        form: see `Route`.
        wire: in what tokens and results travel, see `formats_of`.
    """

    routing: Routing
    axis: Any
    factor: float
    form: str | None = None
    wire: Wire = "rows"

    def run(self, compute: Compute, x: Array, layers: Sequence[Layer] | None = None) -> Combined:
        """The tokens' experts, by `compute` on the devices that have them; see `AllToAll.run`."""
        formats = formats_of("MoE", layers, x.dtype, self.wire)
        experts, weights = self.routing.experts, self.routing.weights
        tokens, k = experts.shape
        devices = jax.lax.axis_size(self.axis)
        own = self.routing.group_sizes.shape[0] // devices
        where = to_devices(experts, own, devices)
        plan = plan_of(where, self.axis)
        most = tokens, devices * tokens * min(k, own)
        wanted = self.factor * tokens * min(1.0, k / devices), self.factor * tokens * k
        usual = tuple(min(bound, math.ceil(number)) for bound, number in zip(most, wanted, strict=True))

        def with_buffers(pair: int, rows: int) -> Callable[[Array, Array], Combined]:
            route = Route(self.axis, devices, pair, where.order.shape[0], self.form, formats)
            there = _There(route, rows, plan, where, own)
            return functools.partial(there.run, compute, experts)

        fits = None
        if usual != most and layers is not None:
            of_devices = jax.lax.psum(self.routing.group_sizes, self.axis).reshape(devices, own).sum(axis=1)
            fits = on_all_devices((plan.sent.max() <= usual[0]) & (of_devices.max() <= usual[1]), self.axis)
        return with_usual_buffers(fits, with_buffers(*usual), with_buffers(*most), x, weights)


@dataclasses.dataclass(frozen=True)
class _There:
    """Experts in buffers of one size.

    Attributes:
        route: of tokens.
        rows: the most rows of this device's experts.
        plan, where: of tokens to devices.
        own: the number of this device's experts.
    """

    route: Route
    rows: int
    plan: Plan
    where: Dispatch
    own: int

    def run(self, compute: Compute, experts: Array, x: Array, weights: Array) -> Combined:
        """`DeduplicatedAllToAll.run`."""
        as_they_are = dataclasses.replace(self.route, formats=AS_THEY_ARE)
        tokens = to_experts(self.route, scatter_to_experts(x, self.where), self.plan)
        weights = to_experts(as_they_are, scatter_to_experts(weights, self.where), self.plan)
        chosen = rows_to_experts(as_they_are, self._numbers(experts), self.plan, None)
        all_rows = dispatch(chosen.astype(jnp.int32) - 1, self.own)
        where = first_places(all_rows, self.rows)
        rows = compute(scatter_to_experts(tokens, where), where.group_sizes)
        summed = combine(rows, weights, where).astype(rows.dtype)
        returned = to_tokens(self.route, summed, self.plan)
        once = jnp.ones(self.where.places.shape, jnp.float32)
        return combine(returned, once, self.where), jnp.zeros((), rows.dtype)

    def _numbers(self, experts: Array) -> Array:
        """[rows, k]: what each expert of a row's token is called on the row's device, from 1; 0: it is not there.

        Rows after the last are zeros there, too.
        """
        token = self.where.order // experts.shape[1]
        device = jnp.searchsorted(jnp.cumsum(self.where.group_sizes), jnp.arange(token.shape[0]), side="right")
        home, number = jnp.divmod(experts[token], self.own)
        dtype = next(t for t in (jnp.uint8, jnp.uint16, jnp.uint32) if self.own <= jnp.iinfo(t).max)
        return jnp.where(home == device[:, None], number + 1, 0).astype(dtype)
