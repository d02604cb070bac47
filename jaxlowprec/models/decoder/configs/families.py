"""The decoder that the config.json of each model family describes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxlowprec.models.decoder.configs.common import (
    ORIGINAL,
    CheckedConfig,
    require_silu,
    rope_from,
    rope_of,
    sizes_of,
    window_of,
    windows_of,
)
from jaxlowprec.models.decoder.configs.options import ClampedSwiGLU, Experts, Latent, Norms
from jaxlowprec.models.decoder.rope import Rope
from jaxlowprec.moe.router import RouterConfig


def llama(said: CheckedConfig) -> dict[str, Any]:
    """Llama 2 and 3."""
    require_silu(said)
    bias = said.flag("attention_bias")
    biases = {"qkv_bias": bias, "out_bias": bias, "mlp_bias": said.flag("mlp_bias")}
    return sizes_of(said) | biases | {"rope": rope_of(said)}


def mistral(said: CheckedConfig) -> dict[str, Any]:
    """Mistral, with a window in all layers."""
    require_silu(said)
    found = sizes_of(said)
    return found | {"rope": rope_of(said), "windows": (window_of(said, 4096),) * found["layers"]}


def mixtral(said: CheckedConfig) -> dict[str, Any]:
    """Mixtral, with experts in all layers."""
    require_silu(said)
    found = sizes_of(said, epsilon=1e-5)
    layers = found["layers"]
    number, width = said.size("num_local_experts", 8), said.size("intermediate_size")
    return found | {
        "rope": rope_of(said, theta=1e6),
        "windows": (window_of(said),) * layers,
        "sparse": (True,) * layers,
        "experts": Experts(number, per_token(said, number, 2), width, softmax_routing(said, True)),
    }


def per_token(said: CheckedConfig, number: int, default: int | None = None) -> int:
    """How many of the experts each token goes to."""
    chosen = said.size("num_experts_per_tok", default)
    if chosen > number:
        said.refuse("num_experts_per_tok", f"{number} or less, the number of experts")
    return chosen


def softmax_routing(said: CheckedConfig, normalize: bool) -> RouterConfig:
    """The router of Mixtral and Qwen."""
    return RouterConfig(normalize=normalize, load_balance_coef=float(said.get("router_aux_loss_coef", 0.001)))


def qwen2(said: CheckedConfig) -> dict[str, Any]:
    """Qwen2, with biases of queries, keys and values."""
    require_silu(said)
    found = sizes_of(said)
    return found | {"rope": rope_of(said), "qkv_bias": True, "windows": _qwen_windows(said, found["layers"])}


def qwen3(said: CheckedConfig) -> dict[str, Any]:
    """Qwen3, with norms of queries and keys."""
    require_silu(said)
    found, bias = sizes_of(said, head=128), said.flag("attention_bias")
    windows = _qwen_windows(said, found["layers"])
    return found | {"rope": rope_of(said), "qkv_bias": bias, "out_bias": bias, "query_norm": True, "windows": windows}


def qwen3_moe(said: CheckedConfig) -> dict[str, Any]:
    """Qwen3 with experts in some layers."""
    require_silu(said)
    found, bias = sizes_of(said), said.flag("attention_bias")
    layers = found["layers"]
    window = window_of(said) if said.flag("use_sliding_window") else None
    number = said.size("num_experts" if "num_experts" in said.content else "num_local_experts", 128)
    routing = softmax_routing(said, said.flag("norm_topk_prob"))
    experts = Experts(number, per_token(said, number, 8), said.size("moe_intermediate_size", 768), routing)
    dense, every = said.get("mlp_only_layers", ()), said.size("decoder_sparse_step", 1)
    return found | {
        "rope": rope_of(said),
        "qkv_bias": bias,
        "out_bias": bias,
        "query_norm": True,
        "windows": (window,) * layers,
        "experts": experts,
        "sparse": tuple(i not in dense and (i + 1) % every == 0 for i in range(layers)),
    }


def _qwen_windows(said: CheckedConfig, layers: int) -> tuple[int | None, ...]:
    """A window in the last layers, if it is switched on."""
    window = window_of(said) if said.flag("use_sliding_window") else None
    if window is None:
        return (None,) * layers
    full = min(said.size("max_window_layers", 28, least=0), layers)
    return windows_of(said, layers, window, ["full_attention"] * full + ["sliding_attention"] * (layers - full))


NORMS = Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
LONGEST = 131072
GELU = ("gelu_pytorch_tanh", "gelu_new")


def gemma2(said: CheckedConfig) -> dict[str, Any]:
    """Gemma 2: a window in every other layer, and soft caps."""
    found = _common(said, 8192)
    return found | {
        "rope": rope_of(said),
        "windows": _gemma_windows(said, found["layers"], 2),
        "score_cap": said.number_or_none("attn_logit_softcapping", 50.0),
        "logit_cap": said.number_or_none("final_logit_softcapping", 30.0),
    }


def gemma3(said: CheckedConfig) -> dict[str, Any]:
    """Gemma 3: norms of queries and keys, and another rotary embedding in the layers with a window."""
    found = _common(said, LONGEST)
    rope, local = _ropes(said)
    return found | {
        "rope": rope,
        "local_rope": local,
        "query_norm": True,
        "windows": _gemma_windows(said, found["layers"], said.size("sliding_window_pattern", 6)),
        "score_cap": said.number_or_none("attn_logit_softcapping"),
        "logit_cap": said.number_or_none("final_logit_softcapping"),
    }


def _common(said: CheckedConfig, longest: int) -> dict[str, Any]:
    if (activation := said.get("hidden_activation", GELU[0])) not in GELU:
        said.refuse("hidden_activation", f"{' or '.join(GELU)}, not {activation}")
    said.only("use_bidirectional_attention", False, "attention to earlier tokens only, false")
    found, bias = sizes_of(said, head=256, longest=longest), said.flag("attention_bias")
    return found | {
        "activation": "geglu",
        "norms": NORMS,
        "zero_centered": True,
        "embedding_scale": found["width"] ** 0.5,
        "score_scale": said.number("query_pre_attn_scalar", 256) ** -0.5,
        "tied": said.flag("tie_word_embeddings", True),
        "qkv_bias": bias,
        "out_bias": bias,
    }


def _gemma_windows(said: CheckedConfig, layers: int, every: int) -> tuple[int | None, ...]:
    """A window in all layers, except for one of each so many."""
    kinds = [("sliding" if (i + 1) % every else "full") + "_attention" for i in range(layers)]
    return windows_of(said, layers, said.size("sliding_window", 4096), kinds)


def _ropes(said: CheckedConfig) -> tuple[Rope, Rope]:
    """The rotary embeddings of layers without a window, and with one."""
    found, longest = said.get("rope_parameters", {}), said.size("max_position_embeddings", LONGEST)
    if not isinstance(found, Mapping):
        said.refuse("rope_parameters", "an object")
    made = []
    for kind, key, theta in (("full_attention", "rope_theta", 1e6), ("sliding_attention", "rope_local_base_freq", 1e4)):
        older = said.get("rope_scaling", {}) if kind == "full_attention" else {}
        own = {name: value for name, value in (found.get(kind) or {}).items() if value is not None}
        known = {"longest": longest, ORIGINAL: longest, "rope_theta": said.get(key, theta)}
        made.append(rope_from(said, "rope_parameters", known | own | older))
    return made[0], made[1]


def phi3(said: CheckedConfig) -> dict[str, Any]:
    """Phi-3 and Phi-4: Llama's layers, with rotary embeddings of a part of each head (Phi-4-mini)."""
    require_silu(said)
    found = sizes_of(said, epsilon=1e-5, longest=4096)
    rope = rope_of(said, partial=1.0, original=4096)
    if rope.kind not in ("default", "longrope"):
        said.refuse("rope_parameters" if said.get("rope_parameters") else "rope_scaling", "longrope or none for Phi")
    if rope.kind == "longrope" and any(
        len(factors) != rope.rotated_of(found["head"]) // 2 for factors in (rope.short, rope.long)
    ):
        raise ValueError(
            f"{said.where}: short_factor and long_factor have {len(rope.short)} and {len(rope.long)} numbers; a head "
            f"has {rope.rotated_of(found['head']) // 2} pairs that are rotated, which need one each"
        )
    return found | {"rope": rope, "windows": (window_of(said),) * found["layers"]}


YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def gpt_oss(said: CheckedConfig) -> dict[str, Any]:
    """GPT-OSS: attention sinks, a window in every other layer, and experts with biases and a clamped activation."""
    require_silu(said)
    found, bias = sizes_of(said, head=64, epsilon=1e-5, longest=131072), said.flag("attention_bias", True)
    layers, number = found["layers"], said.size("num_local_experts", 128)
    balance = float(said.get("router_aux_loss_coef", 0.001))
    given = any(said.get(key) for key in ("rope_parameters", "rope_scaling"))
    kinds = [("full" if i % 2 else "sliding") + "_attention" for i in range(layers)]
    return found | {
        "rope": rope_of(
            said if given else CheckedConfig({**said.content, "rope_parameters": YARN}, said.where), theta=150000.0
        ),
        "qkv_bias": bias,
        "out_bias": bias,
        "sinks": True,
        "windows": windows_of(said, layers, window_of(said, 128), kinds),
        "sparse": (True,) * layers,
        "experts": Experts(
            number,
            per_token(said, number, 4),
            found["hidden"],
            RouterConfig(scoring="softmax_of_chosen", load_balance_coef=balance),
            bias=True,
            clamped=ClampedSwiGLU(said.number("swiglu_alpha", 1.702), said.number("swiglu_limit", 7.0)),
        ),
    }


def deepseek_v2(said: CheckedConfig) -> dict[str, Any]:
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


def deepseek_v3(said: CheckedConfig) -> dict[str, Any]:
    """DeepSeek V3 and Kimi K2: sigmoid scores, and a bias that helps to choose."""
    found = _latent(said)
    interleaved = said.flag("rope_interleave", True)
    return found | {
        "rope": dataclasses.replace(found["rope"], interleaved=interleaved),
        "experts": biased_experts(said, scale=2.5, groups=(8, 4)),
        "sparse": dense_first(said, found["layers"], 3),
    }


def biased_experts(said: CheckedConfig, *, scale: float, groups: tuple[int, int]) -> Experts:
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


def dense_first(said: CheckedConfig, layers: int, default: int) -> tuple[bool, ...]:
    """Whether each layer has experts: those after the first dense ones have."""
    said.only("moe_layer_freq", 1, "experts in every layer after the dense ones, 1")
    first = said.size("first_k_dense_replace", default, least=0)
    return tuple(i >= first for i in range(layers))


def _balance(said: CheckedConfig) -> dict[str, Any]:
    """The coefficients of the balance losses."""
    coefficient, by_sequence = float(said.get("aux_loss_alpha", 0.0)), said.flag("seq_aux", True)
    return {
        "load_balance_coef": 0.0 if by_sequence else coefficient,
        "sequence_balance_coef": coefficient if by_sequence else 0.0,
    }


def _experts(said: CheckedConfig, routing: RouterConfig, chosen: int | None, shared: int) -> Experts:
    """Experts with so many for each token, and for every token, if the file does not say it."""
    number, width = said.size("n_routed_experts"), said.size("moe_intermediate_size")
    own = said.size("n_shared_experts", shared, least=0) * width
    return Experts(number, per_token(said, number, chosen), width, routing, shared=own)


def _latent(said: CheckedConfig) -> dict[str, Any]:
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
    found, rope, bias = sizes_of(CheckedConfig(content, said.where)), rope_of(said), said.flag("attention_bias")
    head = latent.plain + latent.rotated
    scales = {"head": head, "score_scale": head**-0.5 * rope.score_factor}
    return found | scales | {"rope": rope, "latent": latent, "qkv_bias": bias, "out_bias": bias}


SANDWICH = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def glm(said: CheckedConfig) -> dict[str, Any]:
    """The first GLM-4: neighbouring features are rotated as pairs, in half of each head."""
    require_silu(said)
    rope = dataclasses.replace(rope_of(said, partial=0.5), interleaved=True)
    found = sizes_of(said, head=128, epsilon=1.5625e-7, longest=131072)
    return found | {"rope": rope, "qkv_bias": said.flag("attention_bias", True)}


def glm4(said: CheckedConfig) -> dict[str, Any]:
    """GLM-4-0414: the same, with norms of the results of attention and MLP."""
    return glm(said) | {"norms": SANDWICH}


def glm4_moe(said: CheckedConfig) -> dict[str, Any]:
    """GLM-4.5 and 4.6: experts that a bias helps to choose, after dense layers."""
    require_silu(said)
    found = sizes_of(said, epsilon=1e-5, longest=131072)
    return found | {
        "rope": rope_of(said, partial=0.5),
        "qkv_bias": said.flag("attention_bias"),
        "query_norm": said.flag("use_qk_norm"),
        "experts": biased_experts(said, scale=1.0, groups=(1, 1)),
        "sparse": dense_first(said, found["layers"], 1),
    }
