"""The choice of experts: the top k of a router's logits, or the choice that a tape holds."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxlowprec.arguments import a_flag, one_of, shown, whole_number

AFRESH = -1
"""In a tape: this token chooses its experts afresh. Either all of a row is AFRESH, or nothing of it."""

Scoring = Literal["softmax", "sigmoid"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Which experts each token goes to, and their weights. A pytree.

    Attributes:
        experts: int32 [tokens, k], the experts that are used: a tape for the next pass. Never out of range.
        weights: float32 [tokens, k], in the order of `experts`; differentiable in the logits.
        group_sizes: int32 [experts], the tokens of each expert; they sum to tokens x k.
        load_balance_loss: float32, 1 if experts are used equally, up to the number of experts if one gets all tokens.
    """

    experts: Int32[Array, "T k"]
    weights: Float[Array, "T k"]
    group_sizes: Int32[Array, "E"]
    load_balance_loss: Float[Array, ""]


def route(
    logits: Float[Array, "T E"],
    k: int,
    *,
    tape: Int32[Array, "T k"] | None = None,
    normalize: bool = True,
    scoring: Scoring = "softmax",
) -> Routing:
    """Sends each token to k experts: those with the highest logits, or those of the tape.

    A tape freezes only the choice: weights are recomputed from these logits, gradients flow through them, and the loss
    and the group sizes follow the experts that are used. The order of a row is kept, so that the output, a sum over k,
    has the same bits. Fresh choices are in descending order; of equal logits the lower expert comes first.

    An invalid row of the tape (an expert out of range or twice, -1 beside others) cannot raise within jit. Instead, the
    token's weights, and with them its output, and the loss become NaN, and the token is routed by its logits.
    `RoutingTape.check` finds such a row beforehand.

    Arguments:
        logits: float32 [tokens, experts], computed in float32.
        k: experts per token.
        tape: int32 [tokens, k]; a row of -1 chooses afresh. None: all tokens do.
        normalize: whether a token's weights are scaled to sum to 1 after they are gathered. With k = 1 the weight is
            then constant, so the router gets no gradient.
        scoring: how logits become weights: "softmax" over all experts, or "sigmoid" of each.

    Raises:
        TypeError: logits is not a float32 array, or the tape not an int32 array.
        ValueError: shapes do not fit, k is out of range, or the scoring is unknown.

    Source: load balance: "Switch Transformers", arXiv 2101.03961, equation 4, over k choices; replay: arXiv 2507.18071
    and 2510.11370.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> logits = jnp.log(jnp.asarray([[1.0, 6.0, 2.0, 1.0]]))
    >>> routing = jlp.moe.route(logits, 2)
    >>> routing.experts.tolist(), [f"{weight:.3f}" for weight in routing.weights[0]]
    ([[1, 2]], ['0.750', '0.250'])
    >>> jlp.moe.route(-logits, 2, tape=routing.experts).experts.tolist()
    [[1, 2]]
    """
    _check(logits, k, tape, normalize, scoring)
    logits, k = jnp.asarray(logits), int(k)
    experts = logits.shape[-1]
    scores = jax.nn.softmax(logits, axis=-1) if scoring == "softmax" else jax.nn.sigmoid(logits)
    chosen = jax.lax.top_k(jax.lax.stop_gradient(logits), k)[1]
    valid = jnp.ones(logits.shape[:1], bool)
    if tape is not None:
        replayed, afresh = replayable(tape, experts)
        valid = replayed | afresh
        chosen = jnp.where(replayed[:, None], tape, chosen)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if normalize:
        weights = weights / jnp.maximum(in_order(weights), jnp.finfo(jnp.float32).tiny)[:, None]
    weights = jnp.where(valid[:, None], weights, jnp.nan)
    group_sizes = jnp.zeros(experts, jnp.int32).at[chosen.reshape(-1)].add(1)
    loss = jnp.where(jnp.all(valid), _load_balance_loss(scores, group_sizes, scoring), jnp.nan)
    return Routing(chosen, weights, group_sizes, loss)


def replayable(tape: Int32[Array, "*T k"], experts: int) -> tuple[Array, Array]:
    """Which rows of a tape are a choice of experts, and which choose afresh; all other rows are errors."""
    afresh = jnp.all(tape == AFRESH, axis=-1)
    in_range = jnp.all((tape >= 0) & (tape < experts), axis=-1)
    ordered = jnp.sort(tape, axis=-1)
    return in_range & jnp.all(ordered[..., 1:] != ordered[..., :-1], axis=-1), afresh


def in_order(terms: Float[Array, "T k *N"]) -> Float[Array, "T *N"]:
    """The sum over k, from first to last: its bits depend on nothing else."""
    total = terms[:, 0]
    for i in range(1, terms.shape[1]):
        total = total + terms[:, i]
    return total


def _load_balance_loss(scores: Array, group_sizes: Array, scoring: Scoring) -> Array:
    """The number of experts times the sum over experts of (share of the choices) times (mean probability)."""
    if scoring == "sigmoid":
        scores = scores / jnp.sum(scores, axis=-1, keepdims=True)
    tokens, experts = scores.shape
    share = group_sizes / jnp.maximum(1, jnp.sum(group_sizes))
    return experts * jnp.sum(share * jnp.sum(scores, axis=0)) / max(1, tokens)


def _check(logits: Any, k: Any, tape: Any, normalize: Any, scoring: Any) -> None:
    if not isinstance(logits, jax.Array | np.ndarray):
        raise TypeError(f"route: logits={shown(logits)}; needs a float32 array [tokens, experts]")
    if logits.dtype != jnp.float32:
        raise TypeError(f"route: logits are {logits.dtype}; needs float32: compute the router's product in it")
    if logits.ndim != 2:
        raise ValueError(f"route: logits have shape {logits.shape}; needs [tokens, experts]: flatten the leading axes")
    tokens, experts = logits.shape
    if not 1 <= whole_number("route", "k", k) <= experts:
        raise ValueError(f"route: k is {k} with {experts} experts; needs 1 to {experts}")
    a_flag("route", normalize=normalize)
    one_of("route", "scoring", scoring, "softmax", "sigmoid")
    if tape is None:
        return
    if not isinstance(tape, jax.Array | np.ndarray) or tape.dtype != jnp.int32:
        given = getattr(tape, "dtype", type(tape).__name__)
        raise TypeError(f"route: tape is {given}; needs an int32 array: pass a layer of a RoutingTape's experts")
    if tape.shape != (tokens, k):
        raise ValueError(
            f"route: tape has shape {tape.shape}; needs {(tokens, k)}, tokens x k: pass one layer of it, recorded for "
            "these tokens and this k"
        )
