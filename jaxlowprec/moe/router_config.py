"""How tokens choose their experts, as data: what DeepSeek, GLM, Kimi, Qwen and others differ in."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import numpy as np

from jaxlowprec.arguments import a_flag, one_of, shown, whole_number

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

    def __post_init__(self) -> None:
        who = "RouterConfig"
        one_of(who, "scoring", self.scoring, "softmax", "softmax_of_chosen", "sigmoid", "sqrt_softplus")
        one_of(who, "group_score", self.group_score, "top2_sum", "max")
        a_flag(who, selection_bias=self.selection_bias)
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
