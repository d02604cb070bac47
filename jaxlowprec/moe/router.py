"""The choice of experts: its rules as data, and the best by a router's logits or the choice that a tape holds."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from jaxlowprec.arguments import a_flag, as_array, one_of, shown, whole_number
from jaxlowprec.moe.balancing import balance_loss, z_loss
from jaxlowprec.moe.tape_dtype import check_fits, is_tape_dtype, replayable, widened

Scoring = Literal["softmax", "softmax_of_chosen", "sigmoid", "sqrt_softplus"]
GroupScore = Literal["top2_sum", "max"]


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How a router's logits become a choice of experts, their weights, and losses.

    A token chooses the k experts with the highest logits, or, with groups or a selection bias, with the highest scores
    plus bias. Its weights are the scores of these experts without the bias. docs/how-to/moe.md has the fields of
    published models.

    Attributes:
        scoring: how logits become scores. "softmax" over all experts; "softmax_of_chosen": over the k chosen ones
            (gpt-oss), which is "softmax" and normalize=True without the rounding of small probabilities; "sigmoid" of
            each logit (DeepSeek-V3, arXiv 2412.19437, equation 15); "sqrt_softplus": the root of softplus
            (DeepSeek-V4). Hugging Face: `scoring_func`.
        normalize: whether a token's weights are scaled to sum to 1 after they are gathered; None: if k is 2 or more.
            With k = 1 the weight would be a constant and the router would get no gradient. Hugging Face:
            `norm_topk_prob`.
        scale: what the weights are multiplied by at the end. Hugging Face: `routed_scaling_factor`.
        groups: the number of groups of consecutive experts of the same size; 1: there are none. Hugging Face:
            `n_group`.
        groups_per_token: a token chooses its experts within this many best groups (DeepSeek-V2, arXiv 2405.04434,
            section 2.2.2). Hugging Face: `topk_group`.
        group_score: what makes a group good. "top2_sum": the sum of the two highest scores plus bias (DeepSeek-V3);
            "max": the highest one (DeepSeek-V2's `group_limited_greedy`).
        selection_bias: whether the choice follows scores plus a bias per expert, which no gradient reaches;
            `update_selection_bias` moves it (arXiv 2408.15664). `nnx.MoE` and `linen.MoE` then keep it, `route` takes
            it as an argument. Hugging Face: `e_score_correction_bias`.
        load_balance_coef: what the load-balance loss of a block is multiplied by (Switch Transformers, arXiv
            2101.03961, equation 4, over k choices).
        sequence_balance_coef: what the balance loss of each sequence is multiplied by (DeepSeek-V3, equations 17 to
            20).
        z_loss_coef: what the router's z-loss is multiplied by (ST-MoE, arXiv 2202.08906, equation 5).
        logit_bias: whether the layer `router` of `nnx.MoE` and `linen.MoE`, which computes the logits, has a bias
            (gpt-oss); `route` takes logits, and does not read it.

    >>> import jaxlowprec as jlp
    >>> deepseek_v3 = jlp.moe.RouterConfig(
    ...     scoring="sigmoid", scale=2.5, groups=8, groups_per_token=4, selection_bias=True,
    ...     load_balance_coef=0.0, sequence_balance_coef=1e-4,
    ... )
    >>> jlp.moe.RouterConfig(groups=8, groups_per_token=9)
    Traceback (most recent call last):
    ValueError: RouterConfig: groups_per_token=9 of groups=8; needs 1 to 8
    """

    scoring: Scoring = "softmax"
    normalize: bool | None = None
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    group_score: GroupScore = "top2_sum"
    selection_bias: bool = False
    load_balance_coef: float = 0.01
    sequence_balance_coef: float = 0.0
    z_loss_coef: float = 0.0
    logit_bias: bool = False

    def __post_init__(self) -> None:
        who = "RouterConfig"
        one_of(who, "scoring", self.scoring, "softmax", "softmax_of_chosen", "sigmoid", "sqrt_softplus")
        one_of(who, "group_score", self.group_score, "top2_sum", "max")
        a_flag(who, selection_bias=self.selection_bias, logit_bias=self.logit_bias)
        if self.normalize is not None:
            a_flag(who, normalize=self.normalize)
        if self.scoring == "softmax_of_chosen" and self.normalize is False:
            raise ValueError(
                f'{who}: normalize=False with scoring="softmax_of_chosen", whose weights sum to 1; needs '
                'scoring="softmax" for weights that do not'
            )
        groups = whole_number(who, "groups", self.groups, 1)
        if not 1 <= whole_number(who, "groups_per_token", self.groups_per_token) <= groups:
            raise ValueError(f"{who}: groups_per_token={self.groups_per_token} of groups={groups}; needs 1 to {groups}")
        if not _is_finite(self.scale) or not self.scale > 0:
            raise ValueError(f"{who}: scale={shown(self.scale)}; needs a finite number above 0")
        for name in ("load_balance_coef", "sequence_balance_coef", "z_loss_coef"):
            coefficient = getattr(self, name)
            if not _is_finite(coefficient):
                raise ValueError(f"{who}: {name}={shown(coefficient)}; needs a finite number, not an array")

    def check(self, who: str, experts: int, k: int) -> None:
        """Raises ValueError unless k of so many experts can be chosen like this."""
        groups, chosen = self.groups, self.groups_per_token
        if groups == 1:
            return
        size, rest = divmod(experts, groups)
        if rest or not size:
            raise ValueError(f"{who}: {experts} experts in groups={groups}; needs a multiple of {groups}")
        if self.group_score == "top2_sum" and size < 2:
            raise ValueError(
                f'{who}: {experts} experts in groups={groups} have one expert each; group_score="top2_sum" needs '
                'two or more: use fewer groups, or group_score="max"'
            )
        if k > chosen * size:
            raise ValueError(
                f"{who}: k={k} experts of groups_per_token={chosen} groups of {size}, which have {chosen * size}; "
                "needs a smaller k or more groups_per_token"
            )

    def normalizes(self, k: int) -> bool:
        """Whether the weights of k experts are scaled to sum to 1."""
        return k > 1 if self.normalize is None else self.normalize


def check_config(who: str, config: Any) -> RouterConfig:
    """The config. Raises TypeError if it is none."""
    if not isinstance(config, RouterConfig):
        raise TypeError(f"{who}: routing={shown(config)}; needs a jaxlowprec.moe.RouterConfig")
    return config


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and math.isfinite(value)


_DEFAULT = RouterConfig()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """The experts of each token, their weights, and the losses of the router. A pytree.

    Attributes:
        experts: int32 [tokens, k], the experts that are used: a tape for the next pass. Never out of range.
        weights: float32 [tokens, k], in the order of `experts`; differentiable in the logits.
        group_sizes: int32 [experts], the tokens of each expert; they sum to tokens x k.
        load_balance_loss: float32, 1 if experts are used equally, up to the number of experts if one gets all tokens.
        sequence_balance_loss: float32, the mean of the same loss of each sequence.
        z_loss: float32, the mean square of the logarithm of the sum of the logits' exponentials.
    """

    experts: Int32[Array, "T k"]
    weights: Float[Array, "T k"]
    group_sizes: Int32[Array, "E"]
    load_balance_loss: Float[Array, ""]
    sequence_balance_loss: Float[Array, ""]
    z_loss: Float[Array, ""]


def route(
    logits: Float[Array, "T E"],
    k: int,
    routing: RouterConfig = _DEFAULT,
    *,
    tape: Int[Array, "T k"] | None = None,
    bias: Float[Array, "E"] | None = None,
    sequence_length: int | None = None,
) -> Routing:
    """Sends each token to k experts: the best ones of its logits, or those of the tape.

    A tape freezes only the choice: weights are recomputed from these logits, gradients flow through them, and the
    losses and the group sizes follow the experts that are used. The order of a row is kept, so that the output, a sum
    over k, has the same bits. Fresh choices are in descending order; of equal experts or groups the lower one comes
    first. NaN counts as the highest score, so that it reaches the output.

    An invalid row of the tape (an expert out of range or twice, -1 beside others) cannot raise within jit. Instead, the
    token's weights, and with them its output, and the balance losses become NaN, and the token is routed by its logits.
    `RoutingTape.check` finds such a row beforehand.

    The probabilities in the balance losses are a token's scores divided by their sum over all experts. With a selection
    bias these losses count the k experts that the scores choose without bias and groups, as in
    DeepSeek-V3's equation 18, because the bias levels the use of experts and not their scores. Tokens of the tape count
    with the tape's experts.

    Arguments:
        logits: float32 [tokens, experts], computed in float32.
        k: experts per token.
        routing: how logits become a choice and weights.
        tape: int32, int16 or uint8 [tokens, k]; a row of -1 (of 255 in uint8) chooses afresh. None: all tokens do.
        bias: float32 [experts], if `routing.selection_bias`. It gets no gradient.
        sequence_length: tokens of a sequence, for `sequence_balance_loss`; None: all tokens are one sequence.

    Raises:
        TypeError: logits or bias are not float32 arrays, or the tape is not of a tape's dtype.
        ValueError: shapes do not fit, k is out of range, k of these groups cannot be chosen, or a bias is given without
            `routing.selection_bias` or missing with it.

    Source: arXiv 2412.19437, section 2.1.2; replay: arXiv 2507.18071 and 2510.11370.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> logits = jnp.log(jnp.asarray([[1.0, 6.0, 2.0, 1.0]]))
    >>> routing = jlp.moe.route(logits, 2)
    >>> routing.experts.tolist(), [f"{weight:.3f}" for weight in routing.weights[0]]
    ([[1, 2]], ['0.750', '0.250'])
    >>> jlp.moe.route(-logits, 2, tape=routing.experts).experts.tolist()
    [[1, 2]]
    >>> by_bias = jlp.moe.RouterConfig(selection_bias=True)
    >>> jlp.moe.route(logits, 2, by_bias, bias=jnp.asarray([0.0, 0.0, 0.0, 1.0])).experts.tolist()
    [[3, 1]]
    """
    _check(logits, k, routing, tape, bias, sequence_length)
    logits, k = as_array(logits), int(k)
    tokens, experts = logits.shape
    scores = _scores(logits, routing)
    fixed = jax.lax.stop_gradient((logits, scores, bias))
    chosen = counted = _choice(*fixed, k, routing)
    if bias is not None:
        counted = jax.lax.top_k(fixed[0], k)[1]
    valid = jnp.ones((tokens,), bool)
    if tape is not None:
        tape = widened(tape)
        replayed, afresh = replayable(tape, experts)
        valid = replayed | afresh
        chosen, counted = (jnp.where(replayed[:, None], tape, fresh) for fresh in (chosen, counted))
    weights = jnp.where(valid[:, None], _weights(logits, scores, chosen, routing), jnp.nan)
    group_sizes = jnp.zeros(experts, jnp.int32).at[chosen.reshape(-1)].add(1)
    probabilities = scores
    if routing.scoring in ("sigmoid", "sqrt_softplus"):
        probabilities = _shares(scores, functools.partial(jnp.sum, axis=-1))
    of_batch, of_sequences = (
        jnp.where(jnp.all(valid), balance_loss(probabilities, counted, sequences), jnp.nan)
        for sequences in (1, 1 if sequence_length is None else tokens // int(sequence_length))
    )
    return Routing(chosen, weights, group_sizes, of_batch, of_sequences, z_loss(logits))


def in_order(terms: Float[Array, "T k *N"]) -> Float[Array, "T *N"]:
    """The sum over k, from first to last: its bits depend on nothing else."""
    total = terms[:, 0]
    for i in range(1, terms.shape[1]):
        total = total + terms[:, i]
    return total


def _scores(logits: Array, routing: RouterConfig) -> Array:
    """The score of every expert, before and without the bias."""
    if routing.scoring == "sigmoid":
        return jax.nn.sigmoid(logits)
    if routing.scoring == "sqrt_softplus":
        # Below -20 softplus is exp to float32's precision. As it is, its root has no gradient where exp is 0.
        low = logits < -20
        root = jnp.sqrt(jax.nn.softplus(jnp.where(low, 0.0, logits)))
        return jnp.where(low, jnp.exp(jnp.where(low, logits, 0.0) / 2), root)
    return jax.nn.softmax(logits, axis=-1)


def _choice(logits: Array, scores: Array, bias: Array | None, k: int, routing: RouterConfig) -> Array:
    """The k experts of each token, best first."""
    tokens, experts = logits.shape
    ranked = scores if bias is None else scores + bias
    if bias is None and routing.groups == 1:
        ranked = logits  # in the order of the scores, some of which are rounded to the same number
    ranked = jnp.where(jnp.isnan(ranked), jnp.inf, ranked)  # top_k has some NaNs last, where they would be lost
    if routing.groups > 1:
        grouped = ranked.reshape(tokens, routing.groups, experts // routing.groups)
        if routing.group_score == "max":
            group_scores = jnp.max(grouped, axis=-1)
        else:
            group_scores = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
        best = jax.lax.top_k(group_scores, routing.groups_per_token)[1]
        kept = jnp.any(best[:, :, None] == jnp.arange(routing.groups), axis=1)
        ranked = jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(tokens, experts)
    return jax.lax.top_k(ranked, k)[1]


def _weights(logits: Array, scores: Array, chosen: Array, routing: RouterConfig) -> Array:
    """The weights of the chosen experts."""
    if routing.scoring == "softmax_of_chosen":
        weights = jax.nn.softmax(jnp.take_along_axis(logits, chosen, axis=-1), axis=-1)
    else:
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if routing.normalizes(chosen.shape[1]):
            weights = _shares(weights, in_order)
    return weights if routing.scale == 1 else weights * jnp.float32(routing.scale)


def _shares(scores: Array, summed: Callable[[Array], Array]) -> Array:
    """Scores of 0 or more divided by their sum over the last axis; 0 if all are 0.

    They are divided by a power of two before, which changes no bits: the gradient squares the divisor, and the square
    of a small sum is 0.
    """
    highest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    exponent = jax.lax.bitcast_convert_type(highest, jnp.int32) & 0x7F800000
    power = jax.lax.bitcast_convert_type(exponent, jnp.float32)
    scaled = scores / jnp.maximum(power, jnp.finfo(jnp.float32).tiny)
    total = summed(scaled)[:, None]
    return scaled / jnp.where(total == 0, 1.0, total)


def _check(logits: Any, k: Any, routing: Any, tape: Any, bias: Any, sequence_length: Any) -> None:
    if not isinstance(logits, jax.Array | np.ndarray):
        raise TypeError(f"route: logits={shown(logits)}; needs a float32 array [tokens, experts]")
    if logits.dtype != jnp.float32:
        raise TypeError(f"route: logits are {logits.dtype}; needs float32: compute the router's product in it")
    if logits.ndim != 2:
        raise ValueError(f"route: logits have shape {logits.shape}; needs [tokens, experts]: flatten the leading axes")
    tokens, experts = logits.shape
    if not 1 <= whole_number("route", "k", k) <= experts:
        raise ValueError(f"route: k is {k} with {experts} experts; needs 1 to {experts}")
    check_config("route", routing).check("route", experts, int(k))
    if (bias is not None) != routing.selection_bias:
        given = "None" if bias is None else shown(bias)
        raise ValueError(
            f"route: bias={given} with selection_bias={routing.selection_bias}; needs both or neither: a float32 array "
            "[experts] and RouterConfig(selection_bias=True)"
        )
    if bias is not None:
        if not isinstance(bias, jax.Array | np.ndarray) or bias.dtype != jnp.float32:
            raise TypeError(f"route: bias={shown(bias)}; needs a float32 array [experts]")
        if bias.shape != (experts,):
            raise ValueError(f"route: bias has shape {bias.shape}; needs {(experts,)}, one number for each expert")
    if sequence_length is not None:
        length = whole_number("route", "sequence_length", sequence_length, 1)
        if tokens % length:
            raise ValueError(f"route: {tokens} tokens in sequences of sequence_length={length}; needs a multiple of it")
    if tape is None:
        return
    if not isinstance(tape, jax.Array | np.ndarray) or not is_tape_dtype(tape.dtype):
        given = getattr(tape, "dtype", type(tape).__name__)
        raise TypeError(
            f"route: tape is {given}; needs an int32, int16 or uint8 array: pass a layer of a RoutingTape's experts"
        )
    if tape.shape != (tokens, k):
        raise ValueError(
            f"route: tape has shape {tape.shape}; needs {(tokens, k)}, tokens x k: pass one layer of it, recorded for "
            "these tokens and this k"
        )
    check_fits("route", tape.dtype, experts, int(k))
