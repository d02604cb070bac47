"""Qwen2, Qwen2.5 and Qwen3, dense and with experts."""

from __future__ import annotations

from typing import Any

from jaxlowprec.models.decoder.configs.llama import per_token, softmax_routing
from jaxlowprec.models.decoder.configs.options import Experts
from jaxlowprec.models.decoder.configs.plain import require_silu, sizes_of, window_of, windows_of
from jaxlowprec.models.decoder.configs.ropes import rope_of
from jaxlowprec.models.decoder.configs.said import Said


def qwen2(said: Said) -> dict[str, Any]:
    """Qwen2, with biases of queries, keys and values."""
    require_silu(said)
    found = sizes_of(said)
    return found | {"rope": rope_of(said), "qkv_bias": True, "windows": _windows(said, found["layers"])}


def qwen3(said: Said) -> dict[str, Any]:
    """Qwen3, with norms of queries and keys."""
    require_silu(said)
    found, bias = sizes_of(said, head=128), said.flag("attention_bias")
    windows = _windows(said, found["layers"])
    return found | {"rope": rope_of(said), "qkv_bias": bias, "out_bias": bias, "query_norm": True, "windows": windows}


def qwen3_moe(said: Said) -> dict[str, Any]:
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


def _windows(said: Said, layers: int) -> tuple[int | None, ...]:
    """A window in the last layers, if it is switched on."""
    window = window_of(said) if said.flag("use_sliding_window") else None
    if window is None:
        return (None,) * layers
    full = min(said.size("max_window_layers", 28, least=0), layers)
    return windows_of(said, layers, window, ["full_attention"] * full + ["sliding_attention"] * (layers - full))
