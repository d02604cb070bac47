"""The routers of published models, small: their configs, and NumPy's answer token by token."""

import jax
import numpy as np

import jaxlowprec as jlp

EXPERTS, TOKENS = 32, 48
Config = jlp.moe.RouterConfig

# A program for each kind of call: op by op it compiles a hundred.
route = jax.jit(jlp.moe.route, static_argnames=("k", "routing", "sequence_length"))

# name: config, k. The documentation's table has the same arguments with the sizes of the models.
MODELS = {
    "DeepSeek-V3": (Config("sigmoid", scale=2.5, groups=8, groups_per_token=4, selection_bias=True), 8),
    "GLM-4.5, Kimi-K2": (Config("sigmoid", scale=2.827, selection_bias=True), 8),
    "MiniMax-M2": (Config("sigmoid", selection_bias=True), 4),
    "DeepSeek-V2": (Config(normalize=False, scale=16.0, groups=8, groups_per_token=3, group_score="max"), 6),
    "DeepSeek-V4": (Config("sqrt_softplus", scale=1.5, selection_bias=True), 6),
    "Qwen3": (Config(), 8),
    "Qwen2": (Config(normalize=False), 4),
    "gpt-oss": (Config("softmax_of_chosen"), 4),
    "ERNIE-4.5": (Config(selection_bias=True), 6),
    "LongCat-Flash": (Config(normalize=False, scale=6.0, selection_bias=True), 12),
    "one choice by sigmoid": (Config("sigmoid"), 1),
}


def logits(seed=0, tokens=TOKENS):
    """Multiples of 2^-6 from -8 to 8, all different within a token: sigmoids of no two of them are rounded to one."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(1024)[:EXPERTS] for _ in range(tokens)]).astype(np.float32) / 64 - 8


def bias_for(config, seed=1):
    """A selection bias that changes choices, if the config has one."""
    drawn = np.random.default_rng(seed).normal(0, 0.2, EXPERTS).astype(np.float32)
    return drawn if config.selection_bias else None


def scores_of(logits, scoring):
    x = np.asarray(logits, np.float64)
    if scoring == "sigmoid":
        return 1 / (1 + np.exp(-x))
    if scoring == "sqrt_softplus":
        return np.sqrt(np.logaddexp(0, x))
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def best(values, k):
    """The indices of the k highest, best first; of equal ones the lower first."""
    return np.argsort(-values, kind="stable")[:k]


def chosen_by_hand(logits, k, config, bias=None):
    """The experts and weights of each token, in float64."""
    experts, weights = [], []
    for row, scores in zip(logits, scores_of(logits, config.scoring), strict=True):
        ranked = scores if bias is None else scores + bias
        if config.groups > 1:
            groups = ranked.reshape(config.groups, -1)
            worth = groups.max(-1) if config.group_score == "max" else np.sort(groups, -1)[:, -2:].sum(-1)
            kept = np.isin(np.arange(config.groups), best(worth, config.groups_per_token))
            ranked = np.where(np.repeat(kept, groups.shape[1]), ranked, -np.inf)
        chosen = best(ranked, k)
        weight = scores[chosen]
        if config.scoring == "softmax_of_chosen":
            weight = scores_of(row[chosen], "softmax")
        elif config.normalizes(k):
            weight = weight / weight.sum()
        experts.append(chosen)
        weights.append(weight * config.scale)
    return np.asarray(experts), np.asarray(weights)
