"""What linears read, summed up: a block that sees the inputs of each layer as they are computed."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlowprec.telemetry.scopes import Scope


class Inputs(NamedTuple):
    """What a layer read.

    Attributes:
        squares: the sum of x^T x, float32 [K, K]; of rows in groups [E, K, K].
        rows: their number, float32 []; of rows in groups [E].
        amax: the largest magnitude, float32 []; of rows in groups that of all.
    """

    squares: jax.Array
    rows: jax.Array
    amax: jax.Array


class SecondMoments(Scope):
    """Adds up x^T x of each layer's inputs. The function that is called must return what was found, if it is jitted.

    Attributes:
        found: by the layer's name.
    """

    def __init__(self) -> None:
        self.found: dict[str, Inputs] = {}

    def see(self, name: str, x: jax.Array, sizes: jax.Array | None) -> None:
        """The inputs [..., K] of a layer, or rows [T, K] in groups of these sizes [E]."""
        rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        if sizes is None:
            new = Inputs(_squared(rows), jnp.float32(len(rows)), jnp.abs(rows).max())
        else:
            ends = jnp.cumsum(sizes)
            number = jnp.arange(len(rows))
            rows = jnp.where((number < ends[-1])[:, None], rows, 0)

            def of_group(bounds: tuple[jax.Array, jax.Array]) -> jax.Array:
                inside = (number >= bounds[0]) & (number < bounds[1])
                return _squared(jnp.where(inside[:, None], rows, 0))

            squares = jax.lax.map(of_group, (ends - sizes, ends))
            new = Inputs(squares, sizes.astype(jnp.float32), jnp.abs(rows).max())
        before = self.found.get(name)
        self.found[name] = new if before is None else added(before, new)


def added(a: Inputs, b: Inputs) -> Inputs:
    """What a layer read in two calls; arrays of JAX or numpy."""
    largest = jnp.maximum(a.amax, b.amax)
    return Inputs(a.squares + b.squares, a.rows + b.rows, largest)


def _squared(rows: jax.Array) -> jax.Array:
    return jnp.matmul(rows.T, rows, precision="highest")
