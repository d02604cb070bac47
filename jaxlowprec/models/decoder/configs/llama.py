"""Llama, Mistral and Mixtral."""

from __future__ import annotations

from typing import Any

from jaxlowprec.models.decoder.configs.options import Experts
from jaxlowprec.models.decoder.configs.plain import require_silu, sizes_of, window_of
from jaxlowprec.models.decoder.configs.ropes import rope_of
from jaxlowprec.models.decoder.configs.said import Said
from jaxlowprec.moe.router_config import RouterConfig


def llama(said: Said) -> dict[str, Any]:
    """Llama 2 and 3."""
    require_silu(said)
    bias = said.flag("attention_bias")
    biases = {"qkv_bias": bias, "out_bias": bias, "mlp_bias": said.flag("mlp_bias")}
    return sizes_of(said) | biases | {"rope": rope_of(said)}


def mistral(said: Said) -> dict[str, Any]:
    """Mistral, with a window in all layers."""
    require_silu(said)
    found = sizes_of(said)
    return found | {"rope": rope_of(said), "windows": (window_of(said, 4096),) * found["layers"]}


def mixtral(said: Said) -> dict[str, Any]:
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


def per_token(said: Said, number: int, default: int | None = None) -> int:
    """How many of the experts each token goes to."""
    chosen = said.size("num_experts_per_tok", default)
    if chosen > number:
        said.refuse("num_experts_per_tok", f"{number} or less, the number of experts")
    return chosen


def softmax_routing(said: Said, normalize: bool) -> RouterConfig:
    """The router of Mixtral and Qwen."""
    return RouterConfig(normalize=normalize, load_balance_coef=float(said.get("router_aux_loss_coef", 0.001)))
