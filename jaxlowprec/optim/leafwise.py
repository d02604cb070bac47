"""One pass over each leaf: how a wrapper hands arrays to its inner transformation as they are kept.

A wrapper around any transformation decodes what it keeps, updates it and encodes it: three passes, and float32 arrays
between them. A transformation whose `update` is a `Leafwise` also takes arrays in the form in which they are kept, and
returns them so. A wrapper around such a transformation is one, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.ops.optimizer_update import StateRounding
from jaxlowprec.optim.codes import Coded
from jaxlowprec.optim.wrapping import check_transformation


@dataclasses.dataclass(frozen=True)
class HeldMoment:
    """A moment [..., C] in 8 bits; not a pytree, so it stands for a leaf.

    Attributes:
        coded: codes and exponents; or float32 [..., C].
        rounding: "nearest" or "stochastic"; None for float32.
        words: uint32 [2], for stochastic rounding; else None.
    """

    coded: Coded | jax.Array
    rounding: StateRounding
    words: Any


@dataclasses.dataclass(frozen=True)
class HeldWeight:
    """A float32 weight [..., C] as a parameter and a remainder; not a pytree, so it stands for a leaf.

    Attributes:
        parameter: bfloat16 [..., C]; or, after a step, the update that leads to it, float32.
        rest: int16, int8 or None.
        bits: 32, 24 or 16; None: the weight is the parameter.
        words: uint32 [2], for 16 bits; else None.
    """

    parameter: Any
    rest: Any
    bits: int | None
    words: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.parameter.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the weight."""
        return jnp.dtype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Leafwise:
    """The `update` of a transformation that can also update arrays as they are kept, in one pass.

    Attributes:
        one_pass: a function of gradients, state, params, result and readable. A leaf of the state may be a
            `HeldMoment` where `signs` says so, and a parameter a `HeldWeight`. `result` is "parameter" or "update".
            Everything becomes NaN unless `readable`, bool [], holds. It returns new parameters, or updates, and the
            state, in the forms that were given.
        signs: a function of the state, that gives a tree of its structure: "signed" or "unsigned" for a leaf that may
            be kept by such a `RelativeCode`, and "" for the others.
    """

    one_pass: Callable[[Any, Any, Any, str, Any], tuple[Any, Any]]
    signs: Callable[[Any], Any]

    def __call__(self, gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        """The update, as optax calls it."""
        return self.one_pass(gradients, state, params, "update", True)


def leafwise(tx: Any) -> Leafwise | None:
    """The update in one pass of a transformation that has one."""
    return tx.update if isinstance(tx.update, Leafwise) else None


def signs_of(tx: Any, state: Any) -> list[str]:
    """For each leaf of its state, the sign that a transformation says."""
    return jax.tree.leaves(tx.update.signs(state) if leafwise(tx) else no_signs(state))


def no_signs(state: Any) -> Any:
    """No leaf of the state may be kept in a code."""
    return jax.tree.map(lambda _: "", state)


def apply_gradients(tx: Any, gradients: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
    """Updates the parameters: in one pass over each, if the transformation can.

    `jlp.optim.adamw` and `lion`, also within `quantized_state` and `master_weights`, write the new parameter. Any other
    transformation updates, and `optax.apply_updates` adds. Donated parameters and states are updated in place.

    Arguments:
        tx: an `optax.GradientTransformation`.
        gradients, params: trees of the same structure.
        state: that of `tx`.
        extra: further arguments of the update; `jlp.optim.adamw` and `lion` need none.

    Returns:
        The new parameters and the new state. They are those that `tx.update` and `optax.apply_updates` give, except
        where a master weight loses all but its last bits (numerics.md 19).

    Raises:
        TypeError: `tx` is no transformation. Else, what the update raises.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> tx = jlp.optim.master_weights(jlp.optim.quantized_state(jlp.optim.adamw(1e-3)))
    >>> params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    >>> params, state = jlp.optim.apply_gradients(tx, params, tx.init(params), params)
    >>> params["w"].dtype.name, state.inner.codes[0].nu["w"].dtype.name
    ('bfloat16', 'uint8')
    """
    check_transformation("apply_gradients", "tx", tx)
    if inner := leafwise(tx):
        return inner.one_pass(gradients, state, params, "parameter", True)
    import optax

    updates, state = tx.update(gradients, state, params, **extra)
    return optax.apply_updates(params, updates), state
