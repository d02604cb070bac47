"""AdamW's and Lion's update in pure JAX: the bytes that every kernel gives (numerics.md 19)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxlowprec.ops.exact import quotient, root
from jaxlowprec.ops.optimizer_states import (
    BLOCK,
    EIGHTH,
    Coded,
    decode_relative,
    draws_at,
    encode_relative,
    join_weight,
    nearest_weight,
    split_weight,
    stored,
)
from jaxlowprec.ops.rounding import flush, widened

Rule = Literal["adamw", "lion"]
"""How moments and weights change."""
SCALARS: dict[Rule, int] = {"adamw": 9, "lion": 6}
"""The number of scalars that each rule takes. Kernels know the rules by their places here."""
Moment = jax.Array | Coded
"""A moment of each element: float32 [..., C], or codes and exponents."""


class Places(NamedTuple):
    """Where an array lies in the whole one, and the words of its draws.

    Attributes:
        words: uint32 [..., 2, 2]: those of the moments, and of the weights.
        rows: uint32 [..., of any axes before the columns], the numbers of rows.
        blocks: uint32 [ceil(C / 32)], the numbers of each 32 elements of a row.
    """

    words: jax.Array
    rows: jax.Array
    blocks: jax.Array

    def draws(self, which: int, columns: int) -> jax.Array:
        """uint32 [..., columns] below 2^16. `which`: 0 or 1, of the words."""
        each = BLOCK // EIGHTH
        eighths = (self.blocks[:, None] * jnp.uint32(each) + jnp.arange(each, dtype=jnp.uint32)).reshape(-1)
        words = _spread(self.words[..., which, :], self.rows.ndim + 1, 1)
        return draws_at(self.rows[..., None], eighths[: -(-columns // EIGHTH)], words, columns)


def optimizer_update(
    g: jax.Array,
    p: jax.Array,
    scalars: jax.Array,
    rest: jax.Array | None,
    mu: Moment,
    nu: Moment | None,
    places: Places | None,
    *,
    rule: Rule,
    stochastic: tuple[bool, bool],
    bits: int | None,
    is_update: bool,
) -> tuple[jax.Array, jax.Array | None, Moment, Moment | None]:
    """The new parameter or its update, the new remainder, and the new moments: see `api.optimizer_update`.

    Every operation is rounded on its own. `flush` keeps compilers from contracting a product with what it is added to:
    they do not see through what it selects.
    """
    columns, inner = g.shape[-1], g.ndim - scalars.ndim + 1
    b1, c1, b2, c2, *corrections, decay, minus_rate = (
        _spread(flush(scalars[..., i]), inner) for i in range(SCALARS[rule])
    )

    def drawn(which: int, is_drawn: bool) -> jax.Array | None:
        return places.draws(which, columns) if is_drawn and places is not None else None

    gradient, weight = flush(widened(g)), flush(join_weight(p, rest))
    before = [mu] if nu is None else [mu, nu]
    m, *others = (flush(s) if isinstance(s, jax.Array) else decode_relative(s, i == 0) for i, s in enumerate(before))
    if rule == "lion":
        u = _sign(_average(c1, gradient, b1, m))
        after = [_average(c2, gradient, b2, m)]
    else:
        k1, k2, epsilon = corrections
        m, v = after = [_average(c1, gradient, b1, m), _average(c2, flush(gradient * gradient), b2, *others)]
        # XLA makes one division by a product of two divisions in a row, unless it selects between them.
        u = flush(quotient(flush(quotient(m, k1)), flush(root(flush(quotient(v, k2))) + epsilon)))
    update = flush(minus_rate * flush(u + flush(decay * weight)))
    new_mu, *new_nu = (
        stored(new) if isinstance(old, jax.Array) else encode_relative(new, i == 0, drawn(0, stochastic[i]))
        for i, (old, new) in enumerate(zip(before, after, strict=True))
    )
    moments = new_mu, new_nu[0] if new_nu else None
    if p.dtype == jnp.float32:
        return stored(update if is_update else flush(weight + update)), None, *moments
    weight = flush(weight + update)
    if bits is None:
        new, rest = nearest_weight(weight), None
    else:
        new, rest = split_weight(weight, bits, drawn(1, bits == 16))
    return stored(flush(flush(widened(new)) - flush(widened(p)))) if is_update else new, rest, *moments


def _average(c: jax.Array, new: jax.Array, b: jax.Array, old: jax.Array) -> jax.Array:
    return flush(flush(c * new) + flush(b * old))


def _sign(x: jax.Array) -> jax.Array:
    """1 or -1; zero and NaN as they are."""
    return jnp.where((x == 0) | jnp.isnan(x), x, jnp.copysign(jnp.float32(1), x))


def _spread(x: jax.Array, axes: int, kept: int = 0) -> jax.Array:
    """x with so many axes of 1 before its last `kept`."""
    at = x.ndim - kept
    return x.reshape(*x.shape[:at], *[1] * axes, *x.shape[at:])
