"""Importance weights for answers that an engine drew with log-probabilities other than the trainer's.

An answer's tokens come from the engine's policy, and the gradient is wanted for the trainer's. The weight of a token is
the ratio of its two probabilities, kept within bounds, because a ratio far from 1 is rare and adds much variance.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxlowprec.arguments import array, one_of, shown

Per = Literal["token", "sequence", "sequence_mean"]


def truncated_weights(
    trainer: Float[Array, "*B T"],
    engine: Float[Array, "*B T"],
    mask: Bool[Array, "*B T"] | None = None,
    *,
    cap: float = 2.0,
    per: Per = "token",
) -> Float[Array, "*B T"]:
    """Truncated importance sampling (TIS): the smaller of a ratio of probabilities and `cap`. Works within jit.

    Arguments:
        trainer, engine: log-probabilities of the same tokens, by the policy that is trained and by the engine that drew
            them, both at the temperature at which they were drawn.
        mask: True where the engine wrote a token; None: everywhere.
        cap: the largest weight.
        per: "token": the ratio of a token. "sequence": the product of the ratios of a sequence, which is the last axis:
            without bias before it is truncated, but its variance grows with the length. "sequence_mean": their
            geometric mean. The weights of a sequence are the same at all its tokens.

    Returns:
        float32 weights to multiply the losses of tokens by: 0 where `mask` is False, and NaN where a log-probability is
        NaN or infinite (per sequence: in all of that sequence), except for the trainer's -inf: the weight is 0. No
        gradient flows through weights.

    Raises:
        TypeError: log-probabilities are not floating-point numbers, or the mask is not bool.
        ValueError: shapes differ, or an option is something else.

    Source: E. L. Ionides, "Truncated Importance Sampling", Journal of Computational and Graphical Statistics 17 (2008);
    for engines: F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).
    "sequence_mean" is the ratio of GSPO, arXiv 2507.18071.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> trainer, engine = jnp.log(jnp.asarray([0.5, 0.9, 0.2])), jnp.log(jnp.asarray([0.5, 0.1, 0.4]))
    >>> [round(weight, 3) for weight in jlp.rl.truncated_weights(trainer, engine, cap=2.0).tolist()]
    [1.0, 2.0, 0.5]
    """
    who = "truncated_weights"
    if not 0 < _number(who, "cap", cap) < math.inf:
        raise ValueError(f"{who}: cap={cap}; needs a number above 0")
    ratio, mask = _log_ratio(who, trainer, engine, mask, per)
    return jnp.where(mask, jnp.exp(jnp.minimum(ratio, math.log(cap))), 0.0)


def masked_weights(
    trainer: Float[Array, "*B T"],
    engine: Float[Array, "*B T"],
    mask: Bool[Array, "*B T"] | None = None,
    *,
    low: float = 0.5,
    high: float = 5.0,
    per: Per = "token",
) -> Float[Array, "*B T"]:
    """Masked importance sampling (MIS, IcePop): a ratio of probabilities, or 0 where it is outside of [low, high].

    Tokens outside contribute nothing, where `truncated_weights` lets them contribute with the largest weight. Divide a
    sum of losses by the number of all tokens, as IcePop does, or by those with a weight above 0; the second does not
    make an iteration's step smaller when many are left out. Works within jit.

    Arguments:
        low, high: the least and the largest ratio that is kept; low=0 leaves only large ones out. IcePop's are the
            default.
        trainer, engine, mask, per: see `truncated_weights`.

    Returns:
        float32 weights, like those of `truncated_weights`: NaN where they cannot be computed, without a gradient.

    Raises:
        TypeError, ValueError: see `truncated_weights`.

    Source: Ling Team, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model", arXiv
    2510.18855 (IcePop, per token); J. Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the
    Training-Inference Mismatch" (2025) (per sequence).

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> trainer, engine = jnp.log(jnp.asarray([0.5, 0.9, 0.3])), jnp.log(jnp.asarray([0.5, 0.1, 0.4]))
    >>> [round(weight, 3) for weight in jlp.rl.masked_weights(trainer, engine).tolist()]
    [1.0, 0.0, 0.75]
    """
    who = "masked_weights"
    if not 0 <= _number(who, "low", low) < _number(who, "high", high) < math.inf:
        raise ValueError(f"{who}: low={low}, high={high}; needs 0 <= low < high")
    ratio, mask = _log_ratio(who, trainer, engine, mask, per)
    least = math.log(low) if low > 0 else -math.inf
    outside = (ratio < least) | (ratio > math.log(high))  # False for NaN, which stays
    return jnp.where(mask & ~outside, jnp.exp(jnp.where(outside, 0.0, ratio)), 0.0)


def checked(who: str, trainer: Any, engine: Any, mask: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Two arrays of log-probabilities as float32 without a gradient, and the mask.

    Raises:
        TypeError: log-probabilities are not floating-point numbers, or the mask is not bool.
        ValueError: shapes differ.
    """
    trainer, engine = array(who, "trainer", trainer), array(who, "engine", engine)
    mask = jnp.ones(trainer.shape, bool) if mask is None else array(who, "mask", mask)
    for name, values in (("trainer", trainer), ("engine", engine)):
        if not jnp.issubdtype(values.dtype, jnp.floating):
            raise TypeError(f"{who}: {name} is {values.dtype}; needs log-probabilities in floating point")
    if mask.dtype != bool:
        raise TypeError(f"{who}: mask is {mask.dtype}; needs bool, True where the engine wrote a token")
    if not trainer.shape == engine.shape == mask.shape or not trainer.ndim:
        raise ValueError(
            f"{who}: trainer {trainer.shape}, engine {engine.shape}, mask {mask.shape}; needs one shape [..., tokens]"
        )
    trainer, engine = (jax.lax.stop_gradient(values.astype(jnp.float32)) for values in (trainer, engine))
    return trainer, engine, mask


def log_ratio(trainer: jax.Array, engine: jax.Array) -> jax.Array:
    """trainer - engine. NaN if either is NaN, the engine's is infinite, or the trainer's is +inf."""
    possible = jnp.isfinite(engine) & (trainer < jnp.inf)  # False for NaN
    return jnp.where(possible, trainer - jnp.where(possible, engine, 0.0), jnp.nan)


def _log_ratio(who: str, trainer: Any, engine: Any, mask: Any, per: Per) -> tuple[jax.Array, jax.Array]:
    """The logarithm of each token's ratio, or of its sequence's, and the mask."""
    one_of(who, "per", per, "token", "sequence", "sequence_mean")
    trainer, engine, mask = checked(who, trainer, engine, mask)
    ratio = jnp.where(mask, log_ratio(trainer, engine), 0.0)
    if per == "token":
        return ratio, mask
    total = jnp.sum(ratio, axis=-1, keepdims=True)
    if per == "sequence_mean":
        total = total / jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1)
    return jnp.broadcast_to(total, ratio.shape), mask


def _number(who: str, name: str, value: Any) -> float:
    """The value as a Python number, which a bound has to be: it is part of the program."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{who}: {name}={shown(value)}; needs a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{who}: {name}={shown(value)}; needs a number that float64 has") from None
