"""What each layer computed, small enough to keep and to compare: sketches of its tensors and of their gradients.

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

LENGTH = 1 + SKETCH
"""How many elements are infinite or NaN; the sketch of the others."""


class Taps(Scope):
    """Hands a state to the layers, or finds out which layers there are.

    Attributes:
        state: by name, float32 [*stack, len(TENSORS), 2, LENGTH]: of each tensor and of its gradient. None while the
            layers are looked for.
        high_precision: whether layers compute without their recipes.
        found: the shapes of the states of the layers that were called, in that order.
    """

    def __init__(self, state: Mapping[str, Any] | None, high_precision: bool = False):
        self.state, self.high_precision = state, high_precision
        self.found: dict[str, tuple[int, ...]] = {}

    def layer(self, name: str) -> jax.Array | None:
        """The state of the layer of that name; None while layers are looked for."""
        if self.state is None:
            self.found.setdefault(name, (*self.stack, len(TENSORS), 2, LENGTH))
            return None
        return self.placed(self.state[name])


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
    return jnp.concatenate([(~finite).sum(dtype=jnp.float32)[None], signed.reshape(lines, SKETCH).sum(axis=0)])


def _mixed(numbers: jax.Array) -> jax.Array:
    """Hashes of numbers below 2^32: the finaliser of MurmurHash3."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        numbers = (numbers ^ (numbers >> shift)) * jnp.uint32(factor)
    return numbers ^ (numbers >> 16)


def _seen(x: jax.Array, state: jax.Array) -> jax.Array:
    """The sketch of the whole array, with the type that the state's gradient needs."""
    found = sketch(x)
    split = further_axes(x, state)
    found = jax.lax.psum(found, split) if split else found
    return wiring.align_varying(found, state)[0]
