"""GPT-OSS."""

from __future__ import annotations

from typing import Any

from jaxlowprec.models.decoder.configs.llama import per_token
from jaxlowprec.models.decoder.configs.options import Clamped, Experts
from jaxlowprec.models.decoder.configs.plain import require_silu, sizes_of, window_of, windows_of
from jaxlowprec.models.decoder.configs.ropes import rope_of
from jaxlowprec.models.decoder.configs.said import Said
from jaxlowprec.moe.router_config import RouterConfig

YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def gpt_oss(said: Said) -> dict[str, Any]:
    """GPT-OSS: attention sinks, a window in every other layer, and experts with biases and a clamped activation."""
    require_silu(said)
    found, bias = sizes_of(said, head=64, epsilon=1e-5, longest=131072), said.flag("attention_bias", True)
    layers, number = found["layers"], said.size("num_local_experts", 128)
    balance = float(said.get("router_aux_loss_coef", 0.001))
    given = any(said.get(key) for key in ("rope_parameters", "rope_scaling"))
    kinds = [("full" if i % 2 else "sliding") + "_attention" for i in range(layers)]
    return found | {
        "rope": rope_of(said if given else Said({**said.content, "rope_parameters": YARN}, said.where), theta=150000.0),
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
            clamped=Clamped(said.number("swiglu_alpha", 1.702), said.number("swiglu_limit", 7.0)),
        ),
    }
