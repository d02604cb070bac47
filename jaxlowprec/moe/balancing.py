"""Load balancing of experts: losses of the router, and the update of the selection bias."""

from __future__ import annotations

import math
from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxlowprec.arguments import array, shown
from jaxlowprec.ops.checks import mesh_axes


def update_selection_bias(
    bias: Float[Array, "*L E"],
    group_sizes: Int32[Array, "*L E"],
    *,
    rate: float | Float[Array, ""],
    axis_name: Hashable | tuple[Hashable, ...] | None = None,
) -> Float[Array, "*L E"]:
    """The selection bias after a step: raised by `rate` for experts below the mean load, lowered for those above.

    Call it once per optimizer step, with the counts of the whole batch: add up those of microbatches first. No gradient
    goes through it.

    Arguments:
        bias: float32 [..., experts]; leading axes are those of layers.
        group_sizes: int32 [..., experts], the tokens of each expert, as `MoEAux.group_sizes` has them.
        rate: the step; DeepSeek-V3 trained with 0.001, and 0 at the end.
        axis_name: within shard_map, the mesh axes over which tokens are split; counts are summed over them. Otherwise
            None: the counts are those of all devices already.

    Raises:
        TypeError: bias is not float32, or group_sizes are not integers.
        ValueError: shapes differ, the rate is not a finite number of 0 or more, or the axis is not one of the mesh.

    Source: "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", arXiv 2408.15664, algorithm 1.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> bias, counts = jnp.zeros(4), jnp.asarray([5, 1, 2, 0], jnp.int32)
    >>> jlp.moe.update_selection_bias(bias, counts, rate=0.5).tolist()
    [-0.5, 0.5, 0.0, 0.5]
    """
    who = "update_selection_bias"
    bias, group_sizes = array(who, "bias", bias), array(who, "group_sizes", group_sizes)
    if bias.dtype != jnp.float32:
        raise TypeError(f"{who}: bias is {bias.dtype}; needs float32: smaller types lose steps of {shown(rate)}")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(f"{who}: group_sizes are {group_sizes.dtype}; needs integers, the tokens of each expert")
    if bias.ndim < 1 or bias.shape != group_sizes.shape:
        raise ValueError(
            f"{who}: bias has shape {bias.shape} and group_sizes {group_sizes.shape}; needs the same [..., experts]"
        )
    if isinstance(rate, jax.Array):
        fits = rate.ndim == 0 and jnp.issubdtype(rate.dtype, jnp.floating)
    else:
        number = isinstance(rate, int | float | np.number) and not isinstance(rate, bool)
        fits = number and math.isfinite(rate) and rate >= 0
    if not fits:
        raise ValueError(f"{who}: rate={shown(rate)}; needs a finite number of 0 or more")
    group_sizes = group_sizes.astype(jnp.int32)
    if axis_name is not None:
        mesh_axes(who, axis_name)
        group_sizes = jax.lax.psum(group_sizes, axis_name)
    # In integers, as a mean in float32 would move experts of exactly the mean load.
    mean, rest = jnp.divmod(jnp.sum(group_sizes, axis=-1, keepdims=True), group_sizes.shape[-1])
    direction = jnp.where(group_sizes == mean, jnp.sign(rest), jnp.sign(mean - group_sizes))
    step = jnp.asarray(rate, jnp.float32) * direction.astype(jnp.float32)
    return jax.lax.stop_gradient(bias + step)


def balance_loss(probabilities: Float[Array, "T E"], counted: Int32[Array, "T k"], sequences: int) -> Float[Array, ""]:
    """1 if each sequence uses its experts equally, up to the number of experts; the mean over sequences.

    Of a sequence: the number of experts times the sum over experts of (share of the choices) times (mean probability).

    Arguments:
        probabilities: of each expert; they sum to 1.
        counted: the experts that are counted as choices.
        sequences: into how many sequences of equal length the tokens fall.
    """
    tokens, experts = probabilities.shape
    length = tokens // max(1, sequences)
    row = jnp.arange(tokens, dtype=jnp.int32) // max(1, length)
    counts = jnp.zeros((sequences, experts), jnp.int32).at[row[:, None], counted].add(1)
    share = counts / max(1, length * counted.shape[1])
    total = jnp.sum(probabilities.reshape(sequences, length, experts), axis=1)
    return experts * jnp.sum(share * total) / max(1, length) / max(1, sequences)


def z_loss(logits: Float[Array, "T E"]) -> Float[Array, ""]:
    """The mean over tokens of the square of the logarithm of the softmax's denominator."""
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1) ** 2) / max(1, logits.shape[0])
