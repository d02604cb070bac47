"""DeepSeek V2 and V3, and Kimi K2: latent attention, and experts after dense layers."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxlowprec.models.decoder.configs.llama import per_token
from jaxlowprec.models.decoder.configs.options import Experts, Latent
from jaxlowprec.models.decoder.configs.plain import require_silu, sizes_of
from jaxlowprec.models.decoder.configs.ropes import rope_of
from jaxlowprec.models.decoder.configs.said import Said
from jaxlowprec.moe.router_config import RouterConfig


def deepseek_v2(said: Said) -> dict[str, Any]:
    """DeepSeek V2: the weights of experts are their shares of all experts' softmax."""
    said.only("mlp_bias", False, "layers without biases, false")
    said.only("norm_topk_prob", False, "weights that are not scaled to sum to 1, false")
    said.only("scoring_func", "softmax", "softmax")
    method = said.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        said.refuse("topk_method", "greedy or group_limited_greedy")
    limited = method != "greedy"
    routing = RouterConfig(
        normalize=False,
        scale=said.number("routed_scaling_factor", 1.0),
        groups=said.size("n_group") if limited else 1,
        groups_per_token=said.size("topk_group") if limited else 1,
        group_score="max",
        **_balance(said),
    )
    found = _latent(said)
    return found | {
        "rope": dataclasses.replace(found["rope"], interleaved=True),
        "experts": _experts(said, routing, None, 2),
        "sparse": dense_first(said, found["layers"], 0),
    }


def deepseek_v3(said: Said) -> dict[str, Any]:
    """DeepSeek V3 and Kimi K2: sigmoid scores, and a bias that helps to choose."""
    found = _latent(said)
    interleaved = said.flag("rope_interleave", True)
    return found | {
        "rope": dataclasses.replace(found["rope"], interleaved=interleaved),
        "experts": biased_experts(said, scale=2.5, groups=(8, 4)),
        "sparse": dense_first(said, found["layers"], 3),
    }


def biased_experts(said: Said, *, scale: float, groups: tuple[int, int]) -> Experts:
    """Experts by sigmoid scores plus a bias. The arguments are the family's, if the file has none."""
    said.only("scoring_func", "sigmoid", "sigmoid")
    said.only("topk_method", "noaux_tc", "noaux_tc")
    routing = RouterConfig(
        scoring="sigmoid",
        normalize=said.flag("norm_topk_prob", True),
        scale=said.number("routed_scaling_factor", scale),
        groups=said.size("n_group", groups[0]),
        groups_per_token=said.size("topk_group", groups[1]),
        selection_bias=True,
        **_balance(said),
    )
    return _experts(said, routing, 8, 1)


def dense_first(said: Said, layers: int, default: int) -> tuple[bool, ...]:
    """Which layers have experts: those after the first ones."""
    said.only("moe_layer_freq", 1, "experts in every layer after the dense ones, 1")
    first = said.size("first_k_dense_replace", default, least=0)
    return tuple(i >= first for i in range(layers))


def _balance(said: Said) -> dict[str, Any]:
    """The coefficients of the balance losses."""
    coefficient, by_sequence = float(said.get("aux_loss_alpha", 0.0)), said.flag("seq_aux", True)
    return {
        "load_balance_coef": 0.0 if by_sequence else coefficient,
        "sequence_balance_coef": coefficient if by_sequence else 0.0,
    }


def _experts(said: Said, routing: RouterConfig, chosen: int | None, shared: int) -> Experts:
    """Experts with so many for each token, and for every token, if the file does not say it."""
    number, width = said.size("n_routed_experts"), said.size("moe_intermediate_size")
    own = said.size("n_shared_experts", shared, least=0) * width
    return Experts(number, per_token(said, number, chosen), width, routing, shared=own)


def _latent(said: Said) -> dict[str, Any]:
    """Sizes of latent attention. The rotary embedding's scaling is also the scores'."""
    require_silu(said)
    rank = said.content.get("q_lora_rank", 1536)
    latent = Latent(
        query_rank=None if rank is None else said.size("q_lora_rank", 1536),
        rank=said.size("kv_lora_rank", 512),
        plain=said.size("qk_nope_head_dim", 128),
        rotated=said.size("qk_rope_head_dim", 64),
        value=said.size("v_head_dim", 128),
    )
    if latent.rotated % 2:
        said.refuse("qk_rope_head_dim", "an even number")
    content = {key: value for key, value in said.content.items() if key not in ("head_dim", "num_key_value_heads")}
    found, rope, bias = sizes_of(Said(content, said.where)), rope_of(said), said.flag("attention_bias")
    head = latent.plain + latent.rotated
    scales = {"head": head, "score_scale": head**-0.5 * rope.score_factor}
    return found | scales | {"rope": rope, "latent": latent, "qkv_bias": bias, "out_bias": bias}
