"""Measures how far two tapes agree, such as a rollout engine's choices and the trainer's."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxlowprec.moe.tape import RoutingTape, check_experts
from jaxlowprec.moe.tape_dtype import AFRESH, widened


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Overlap:
    """How far two tapes agree, per layer; NaN in a layer without a token to compare. A pytree.

    Attributes:
        tokens: int32 [layers]: the number of compared tokens, for which both tapes hold a choice.
        same_set: float32 [layers]: share of them with the same experts, in any order.
        same_order: float32 [layers]: share of them with the same experts in the same order.
        intersection: float32 [layers]: share of a token's k experts that both tapes have, on average.
    """

    tokens: Int32[Array, "L"]
    same_set: Float[Array, "L"]
    same_order: Float[Array, "L"]
    intersection: Float[Array, "L"]


def overlap(a: RoutingTape, b: RoutingTape) -> Overlap:
    """Compares the choices of two tapes of the same tokens. Works within jit.

    Raises:
        TypeError: an argument is not a tape.
        ValueError: tapes of different shapes.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> a = jlp.moe.RoutingTape(jnp.asarray([[[0, 1], [2, 3], [-1, -1]]], jnp.int32))
    >>> b = jlp.moe.RoutingTape(jnp.asarray([[[0, 1], [3, 4], [1, 2]]], jnp.int32))
    >>> found = jlp.moe.overlap(a, b)
    >>> found.tokens.tolist(), found.same_set.tolist(), found.same_order.tolist(), found.intersection.tolist()
    ([2], [0.5], [0.5], [0.75])
    """
    for tape in (a, b):
        if not isinstance(tape, RoutingTape):
            raise TypeError(f"overlap: needs two tapes; one is a {type(tape).__name__}: RoutingTape(experts) makes one")
    for tape in (a, b):
        check_experts("overlap", tape.experts)
    if a.experts.shape != b.experts.shape:
        raise ValueError(
            f"overlap: tapes of shapes {a.experts.shape} and {b.experts.shape}; needs the same layers, tokens and k"
        )
    layers, *tokens_axes, k = a.experts.shape
    first, second = (widened(tape.experts).reshape(layers, math.prod(tokens_axes), k) for tape in (a, b))
    compared = jnp.all(first != AFRESH, axis=-1) & jnp.all(second != AFRESH, axis=-1)
    common = jnp.sum(first[..., :, None] == second[..., None, :], axis=(-2, -1))
    same_order = jnp.all(first == second, axis=-1)
    tokens = jnp.sum(compared, axis=-1, dtype=jnp.int32)

    def share(values: Array) -> Array:
        return jnp.sum(jnp.where(compared, values.astype(jnp.float32), 0.0), axis=-1) / tokens.astype(jnp.float32)

    return Overlap(tokens, share(common == k), share(same_order), share(common) / k)
