"""GLM-4, and GLM-4.5 and 4.6, which have experts."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxlowprec.models.decoder.configs.deepseek import biased_experts, dense_first
from jaxlowprec.models.decoder.configs.options import Norms
from jaxlowprec.models.decoder.configs.plain import require_silu, sizes_of
from jaxlowprec.models.decoder.configs.ropes import rope_of
from jaxlowprec.models.decoder.configs.said import Said

SANDWICH = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def glm(said: Said) -> dict[str, Any]:
    """The first GLM-4: neighbouring features are rotated as pairs, in half of each head."""
    require_silu(said)
    rope = dataclasses.replace(rope_of(said, partial=0.5), interleaved=True)
    found = sizes_of(said, head=128, epsilon=1.5625e-7, longest=131072)
    return found | {"rope": rope, "qkv_bias": said.flag("attention_bias", True)}


def glm4(said: Said) -> dict[str, Any]:
    """GLM-4-0414: the same, with norms of the results of attention and MLP."""
    return glm(said) | {"norms": SANDWICH}


def glm4_moe(said: Said) -> dict[str, Any]:
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
