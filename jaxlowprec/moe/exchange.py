"""Rows that travel to the devices of their experts and back: dispatch and combine by all-to-all, in `jax.shard_map`.

Each device along the expert axis has tokens of its own and a part of the experts. Its rows are sorted by expert, so
those for one device lie together. A device sorts what it receives by expert, the rows of one expert in the order of
their devices: that is the order of all devices' tokens, so an expert sees the rows that it would see on one device.

Sizes are known on the device only, so buffers have a bound: `pair` rows from one device to another. No two experts of a
token are the same, so a device sends another at most min(k, its experts) rows for each token.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxlowprec import wiring
from jaxlowprec.arrays.formats import Format
from jaxlowprec.layers.shared_input import Layer
from jaxlowprec.moe.dispatching import Dispatch, combine, scatter_to_experts
from jaxlowprec.moe.wire import AS_THEY_ARE, Formats, Wire, formats_of, sent


class Plan(NamedTuple):
    """The destinations of rows. A pytree.

    Attributes:
        sent: int32 [n]: how many rows this device has for each.
        received: int32 [n, own experts]: how many come from each device, for each of this device's experts.
        starts_there: int32 [n]: where, among the rows that a device receives, those of this device begin.
        starts_back: int32 [n]: where, among the sorted rows of a device, those for this device's experts begin.
    """

    sent: Int32[Array, "n"]
    received: Int32[Array, "n E"]
    starts_there: Int32[Array, "n"]
    starts_back: Int32[Array, "n"]

    @property
    def group_sizes(self) -> Int32[Array, "E"]:
        """The rows of each of this device's experts."""
        return self.received.sum(axis=0)


def plan_of(where: Dispatch, axis: Any) -> Plan:
    """Tells all devices along the axis what the others have for them. Group sizes are those of all experts."""
    devices = jax.lax.axis_size(axis)
    of_experts = where.group_sizes.reshape(devices, -1)
    sent = of_experts.sum(axis=1)
    received = jax.lax.all_to_all(of_experts, axis, 0, 0, tiled=True)
    pairs = jax.lax.all_gather(sent, axis)  # [from, to]
    before = jnp.arange(devices) < jax.lax.axis_index(axis)
    starts_there = jnp.sum(jnp.where(before[:, None], pairs, 0), axis=0)
    starts_back = jnp.sum(jnp.where(before, pairs, 0), axis=1)
    return Plan(sent, received, *(s.astype(jnp.int32) for s in (starts_there, starts_back)))


def _starts(sizes: Array) -> Array:
    """The beginning of each part, of parts of these sizes one after the other along the last axis."""
    return jnp.cumsum(sizes, axis=-1) - sizes


def _found(sizes: Array, count: int) -> tuple[Array, Array, Array]:
    """The part of these sizes that each of `count` places is in, its place there, and whether it is in one."""
    place, ends = jnp.arange(count, dtype=jnp.int32), jnp.cumsum(sizes)
    part = jnp.minimum(jnp.searchsorted(ends, place, side="right"), sizes.shape[0] - 1).astype(jnp.int32)
    return part, place - (ends - sizes)[part], place < ends[-1]


def _taken(rows: Array, index: Array, valid: Array) -> Array:
    """rows[index] where that is valid, else zeros."""
    found = rows.at[jnp.where(valid, index, 0)].get(mode="promise_in_bounds")
    return jnp.where(jnp.expand_dims(valid, tuple(range(valid.ndim, found.ndim))), found, jnp.zeros((), rows.dtype))


@dataclasses.dataclass(frozen=True)
class Route:
    """The static description of an exchange.

    Attributes:
        axis: the mesh axis of the experts.
        devices: how many there are along it.
        pair: the most rows from one device to another.
        rows: those of this device, of all experts.
        form: "padded": an all-to-all of `pair` rows for each pair of devices. "ragged": only the rows that there are,
            by XLA's ragged-all-to-all, which CPUs lack. None: ragged where there is one.
        formats: in what rows travel.
    """

    axis: Any
    devices: int
    pair: int
    rows: int
    form: str | None = None
    formats: Formats = AS_THEY_ARE

    @property
    def most(self) -> int:
        """The most rows that a device receives."""
        return self.devices * self.pair

    def by_form(self, padded: Callable[..., Array], ragged: Callable[..., Array], *operands: Any) -> Array:
        """The result of one of two functions."""
        if self.form is None:
            return jax.lax.platform_dependent(*operands, cpu=padded, default=ragged)
        return (padded if self.form == "padded" else ragged)(*operands)


def _padded(route: Route, rows: Array, starts: Array, sizes: Array) -> Array:
    """[most, ...], `pair` rows of each device, of rows whose parts for each device begin at `starts`."""
    slot = jnp.arange(route.pair, dtype=jnp.int32)
    buffer = _taken(rows, starts[:, None] + slot, slot < sizes[:, None])
    received = jax.lax.all_to_all(buffer, route.axis, 0, 0, tiled=True)
    return received.reshape(route.most, *rows.shape[1:])


def _ragged(route: Route, rows: Array, count: int, *offsets: Array) -> Array:
    """[count, ...], the rows of each device one after the other. `offsets`: see `jax.lax.ragged_all_to_all`."""
    out = jnp.zeros((count, *rows.shape[1:]), rows.dtype)
    aligned = wiring.align_varying(rows, out, *offsets)
    return jax.lax.ragged_all_to_all(*aligned, axis_name=route.axis)


def _sorted_by_expert(received: Array, plan: Plan, starts: Array) -> Array:
    """Rows by expert, and within that by device, of rows by device; a device's begin at `starts`."""
    devices = plan.received.shape[0]
    cell, within, valid = _found(plan.received.T.reshape(-1), received.shape[0])
    expert, device = cell // devices, cell % devices
    return _taken(received, starts[device] + _starts(plan.received)[device, expert] + within, valid)


def _sorted_by_device(rows: Array, plan: Plan) -> Array:
    """The inverse: rows by device, one after the other."""
    experts = plan.received.shape[1]
    cell, within, valid = _found(plan.received.reshape(-1), rows.shape[0])
    device, expert = cell // experts, cell % experts
    starts = _starts(plan.received.T.reshape(-1)).reshape(plan.received.T.shape)
    return _taken(rows, starts[expert, device] + within, valid)


def rows_to_experts(route: Route, rows: Array, plan: Plan, fmt: Format | None) -> Array:
    """`to_experts` in a format of the caller, and without a gradient."""

    def padded(rows: Array, plan: Plan) -> Array:
        received = _padded(route, rows, _starts(plan.sent), plan.sent)
        starts = jnp.arange(route.devices, dtype=jnp.int32) * route.pair
        return _sorted_by_expert(received, plan, starts)

    def ragged(rows: Array, plan: Plan) -> Array:
        sizes = plan.received.sum(axis=1)
        offsets = _starts(plan.sent), plan.sent, plan.starts_there, sizes
        received = _ragged(route, rows, route.most, *offsets)
        return _sorted_by_expert(received, plan, _starts(sizes))

    return sent(rows, fmt, lambda rows: route.by_form(padded, ragged, rows, plan))


def _to_tokens(route: Route, rows: Array, plan: Plan, fmt: Format | None) -> Array:
    def padded(rows: Array, plan: Plan) -> Array:
        sizes = plan.received.sum(axis=1)
        received = _padded(route, _sorted_by_device(rows, plan), _starts(sizes), sizes)
        device, within, valid = _found(plan.sent, route.rows)
        return _taken(received, device * route.pair + within, valid)

    def ragged(rows: Array, plan: Plan) -> Array:
        sizes = plan.received.sum(axis=1)
        offsets = _starts(sizes), sizes, plan.starts_back, plan.sent
        return _ragged(route, _sorted_by_device(rows, plan), route.rows, *offsets)

    return sent(rows, fmt, lambda rows: route.by_form(padded, ragged, rows, plan))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def to_experts(route: Route, rows: Float[Array, "T*k *D"], plan: Plan) -> Float[Array, "R *D"]:
    """Rows sorted by expert, of all experts, to rows of this device's experts, sorted likewise; zeros after the last.

    The inverse of `to_tokens`, and the gradient of each is the other. Quantising, where rows travel in codes, counts as
    the identity.
    """
    return rows_to_experts(route, rows, plan, route.formats.rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def to_tokens(route: Route, rows: Float[Array, "R *D"], plan: Plan) -> Float[Array, "T*k *D"]:
    """Rows of this device's experts back to the devices that sent them, in the order that they had there."""
    return _to_tokens(route, rows, plan, route.formats.back)


to_experts.defvjp(
    lambda route, rows, plan: (rows_to_experts(route, rows, plan, route.formats.rows), plan),
    lambda route, plan, gradient: (_to_tokens(route, gradient, plan, route.formats.back), None),
)
to_tokens.defvjp(
    lambda route, rows, plan: (_to_tokens(route, rows, plan, route.formats.back), plan),
    lambda route, plan, gradient: (rows_to_experts(route, gradient, plan, route.formats.gradient), None),
)


Compute = Callable[[Array, Array], Array]
"""Rows sorted by expert, and group sizes, to the experts' rows."""

Combined = tuple[Array, Array]
"""The weighted sum of the experts' results, float32 [tokens, N], and a scalar of the dtype of these results."""


@dataclasses.dataclass(frozen=True)
class InPlace:
    """Experts that are where the tokens are.

    Attributes:
        where: the places of the tokens' rows.
        weights: float32 [tokens, k].
    """

    where: Dispatch
    weights: Float[Array, "T k"]

    def run(self, compute: Compute, x: Array, layers: Sequence[Layer] | None = None) -> Combined:
        """The tokens' experts, by `compute`."""
        del layers
        rows = compute(scatter_to_experts(x, self.where), self.where.group_sizes)
        return combine(rows, self.weights, self.where), jnp.zeros((), rows.dtype)


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """Experts on other devices, to which rows travel.

    Attributes:
        where: the rows' places; group sizes are those of all experts.
        weights: float32 [tokens, k].
        axis: the mesh axis of the experts.
        factor: buffers are for so many times the mean rows of a pair of devices. Where any pair has more, all devices
            use buffers that are large enough in any case.
        form: see `Route`.
        wire: in what rows travel, see `formats_of`.
    """

    where: Dispatch
    weights: Float[Array, "T k"]
    axis: Any
    factor: float
    form: str | None = None
    wire: Wire = "rows"

    def run(self, compute: Compute, x: Array, layers: Sequence[Layer] | None = None) -> Combined:
        """The tokens' experts, by `compute` on the devices that have them.

        Arguments:
            x: [tokens, D], those of this device.
            layers: what `compute` computes, down's last, if it only reads what it has captured, so that it may be
                traced twice, in branches. None: anything.
        """
        formats = formats_of("MoE", layers, x.dtype, self.wire)
        tokens, k = self.where.places.shape
        devices = jax.lax.axis_size(self.axis)
        plan = plan_of(self.where, self.axis)
        most = tokens * min(k, plan.received.shape[1])
        usual = min(most, math.ceil(self.factor * tokens * k / devices))

        def with_buffers(pair: int) -> Callable[[Array], Array]:
            route = Route(self.axis, devices, pair, tokens * k, self.form, formats)
            return lambda rows: to_tokens(route, compute(to_experts(route, rows, plan), plan.group_sizes), plan)

        fits = None
        if usual < most and layers is not None:
            fits = on_all_devices(plan.sent.max() <= usual, self.axis)
        rows = with_usual_buffers(fits, with_buffers(usual), with_buffers(most), scatter_to_experts(x, self.where))
        return combine(rows, self.weights, self.where), jnp.zeros((), rows.dtype)


def on_all_devices(fits: Array, axis: Any) -> Array:
    """Whether that is so on all devices: those along the axis, and those with other tokens. They take the same branch,
    in which kernels and states of delayed scaling are reduced over all of them."""
    axes = {*(axis if isinstance(axis, tuple) else (axis,)), *wiring.varying_axes(fits)}
    return jax.lax.pmin(fits.astype(jnp.int32), tuple(sorted(axes, key=str))) == 1


def with_usual_buffers(
    fits: Array | None, usual: Callable[..., Any], most: Callable[..., Any], *operands: Array
) -> Any:
    """The result of the function whose buffers are large enough; `fits`: whether the usual ones are, if that may be."""
    if fits is None:
        return most(*operands)
    # The large buffers are for the exception: nothing of their size is kept for the backward pass.
    return jax.lax.cond(fits, usual, jax.checkpoint(most), *operands)
