"""Sketches of each layer's tensors and of their gradients, small enough to keep and to compare.

A sketch of x is a product of x by a fixed matrix of random signs, so that norm(sketch(x) - sketch(y)) is near
norm(x - y). It leaves a step as telemetry's statistics do: as the gradient of a state.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec import wiring
from jaxlowprec.telemetry.scopes import Scope
from jaxlowprec.wiring.defining import further_axes

TENSORS = ("input", "weight", "result")
SKETCH = 1024
"""Numbers in a sketch: relative errors come out within some 4 % of themselves."""

COUNTS = 3
"""The numbers before a sketch: elements that are infinite or NaN, the calls that have some, and all calls."""

LENGTH = COUNTS + SKETCH


class Taps(Scope):
    """Hands a state to the layers, or finds out which layers there are.

    Attributes:
        state: by name, float32 [*stack, len(TENSORS), 2, LENGTH]: of each tensor and of its gradient. None while the
            layers are looked for.
        high_precision: whether layers compute without their recipes.
        shapes: those of the states of the layers that were called.
        called: the layers, in the order of their calls, each with its place in a stack.
    """

    def __init__(self, state: Mapping[str, Any] | None, high_precision: bool = False):
        self.state, self.high_precision = state, high_precision
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.called: list[tuple[str, tuple[Any, int] | None]] = []

    def layer(self, name: str) -> jax.Array | None:
        """The state of the layer of that name; None while layers are looked for."""
        if self.state is None:
            self.shapes.setdefault(name, (*self.stack, len(TENSORS), 2, LENGTH))
            self.called.append((name, self.place))
            return None
        return self.placed(self.state[name])

    def order(self) -> list[tuple[str, int | None]]:
        """The layers in the order in which they compute, each with its index in a stack.

        The layers of a loop's body, which have one traced index, take turns.
        """
        order: dict[tuple[str, int | None], None] = {}
        for name, place in self.called:
            if place is None:
                order[name, None] = None
            elif isinstance(place[0], jax.core.Tracer):
                body = dict.fromkeys(n for n, other in self.called if other is not None and other[0] is place[0])
                order |= dict.fromkeys((n, i) for i in range(place[1]) for n in body)
            else:
                order[name, int(place[0]) % place[1]] = None
        return list(order)


@jax.custom_vjp
def tap(x: jax.Array, state: jax.Array) -> jax.Array:
    """x; the gradient of the state, float32 [2, LENGTH], is what was seen of x and of its gradient."""
    del state
    return x


def _forward(x, state):
    return x, (_seen(x, state), state)


def _backward(residuals, dx):
    of_x, state = residuals
    return dx, jnp.stack([of_x, _seen(dx, state)])


tap.defvjp(_forward, _backward)


@functools.partial(jax.jit, inline=True)
def sketch(x: jax.Array) -> jax.Array:
    """x, of any shape -> float32 [LENGTH]."""
    finite = jnp.isfinite(x)
    flat = jnp.where(finite, x, 0).astype(jnp.float32).reshape(-1)
    lines = -(-max(flat.size, 1) // SKETCH)
    numbers = jax.lax.iota(jnp.uint32, lines * SKETCH)
    signed = jnp.where(_mixed(numbers) & 1, -1.0, 1.0) * jnp.pad(flat, (0, lines * SKETCH - flat.size))
    bad = (~finite).sum(dtype=jnp.float32)
    counts = jnp.stack([bad, jnp.sign(bad), jnp.float32(1)])
    return jnp.concatenate([counts, signed.reshape(lines, SKETCH).sum(axis=0)])


def _mixed(numbers: jax.Array) -> jax.Array:
    """Hashes of numbers below 2^32: the finaliser of MurmurHash3."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        numbers = (numbers ^ (numbers >> shift)) * jnp.uint32(factor)
    return numbers ^ (numbers >> 16)


def _seen(x: jax.Array, state: jax.Array) -> jax.Array:
    """The sketch of the whole array, with the type that the state's gradient needs."""
    found = sketch(x)
    split = further_axes(x, state)
    if split:  # one call on all devices
        found = jax.lax.psum(found, split)
        found = found.at[1:COUNTS].set(jnp.minimum(found[1:COUNTS], 1))
    return wiring.align_varying(found, state)[0]
