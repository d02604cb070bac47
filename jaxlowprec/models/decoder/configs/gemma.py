"""Gemma 2 and the text models of Gemma 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxlowprec.models.decoder.configs.options import Norms
from jaxlowprec.models.decoder.configs.plain import sizes_of, windows_of
from jaxlowprec.models.decoder.configs.ropes import ORIGINAL, rope_from, rope_of
from jaxlowprec.models.decoder.configs.said import Said
from jaxlowprec.models.decoder.rope import Rope

NORMS = Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
LONGEST = 131072
GELU = ("gelu_pytorch_tanh", "gelu_new")


def gemma2(said: Said) -> dict[str, Any]:
    """Gemma 2: a window in every other layer, and soft caps."""
    found = _common(said, 8192)
    return found | {
        "rope": rope_of(said),
        "windows": _windows(said, found["layers"], 2),
        "score_cap": said.number_or_none("attn_logit_softcapping", 50.0),
        "logit_cap": said.number_or_none("final_logit_softcapping", 30.0),
    }


def gemma3(said: Said) -> dict[str, Any]:
    """Gemma 3: norms of queries and keys, and another rotary embedding in the layers with a window."""
    found = _common(said, LONGEST)
    rope, local = _ropes(said)
    return found | {
        "rope": rope,
        "local_rope": local,
        "query_norm": True,
        "windows": _windows(said, found["layers"], said.size("sliding_window_pattern", 6)),
        "score_cap": said.number_or_none("attn_logit_softcapping"),
        "logit_cap": said.number_or_none("final_logit_softcapping"),
    }


def _common(said: Said, longest: int) -> dict[str, Any]:
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


def _windows(said: Said, layers: int, every: int) -> tuple[int | None, ...]:
    """A window in all layers, except for one of each so many."""
    kinds = [("sliding" if (i + 1) % every else "full") + "_attention" for i in range(layers)]
    return windows_of(said, layers, said.size("sliding_window", 4096), kinds)


def _ropes(said: Said) -> tuple[Rope, Rope]:
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
