"""Trees of the gemma package (Flax), and of tunix's Gemma, for Gemma 2 and 3: leaves of norms hold the file's weight.

Source: gemma/gm/nn/_modules.py and _layers.py; tunix/models/gemma and gemma3.
"""

from __future__ import annotations

from jaxlowprec.checkpoints.families.parts import IN_FILE, LAYER, Rules
from jaxlowprec.checkpoints.families.tunix import MLP
from jaxlowprec.checkpoints.trees.mapping import Rule, TreeMapping

_FLAX = "layer.{i}."
_KEYS_VALUES = tuple(f"{IN_FILE}self_attn.{part}_proj.weight" for part in "kv")
_ALL = tuple(f"{IN_FILE}self_attn.{part}_proj.weight" for part in "qkv")


def _ends() -> Rules:
    return (
        Rule("embedder.input_embedding", "model.embed_tokens.weight", "V D -> V D"),
        Rule("final_norm.scale", "model.norm.weight"),
        Rule("lm_head.kernel", "lm_head.weight", "D V -> V D"),
    )


def _attention(at: str) -> Rules:
    return (
        Rule(f"{at}attn.q_einsum.w", f"{IN_FILE}self_attn.q_proj.weight", "H D d -> (H d) D"),
        Rule(f"{at}attn.kv_einsum.w", _KEYS_VALUES, "+ G D d -> (G d) D"),
        Rule(f"{at}attn.qkv_einsum.w", _ALL, "+ H D d -> (H d) D"),
        Rule(f"{at}attn.attn_vec_einsum.w", f"{IN_FILE}self_attn.o_proj.weight", "H d D -> D (H d)"),
        Rule(f"{at}attn._query_norm.scale", f"{IN_FILE}self_attn.q_norm.weight"),
        Rule(f"{at}attn._key_norm.scale", f"{IN_FILE}self_attn.k_norm.weight"),
    )


def _norms(at: str) -> Rules:
    names = (
        ("pre_attention_norm", "input_layernorm"),
        ("post_attention_norm", "post_attention_layernorm"),
        ("post_attn_norm", "post_attention_layernorm"),  # tunix's name in Gemma 2
        ("pre_ffw_norm", "pre_feedforward_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
    )
    return tuple(Rule(f"{at}{ours}.scale", f"{IN_FILE}{theirs}.weight") for ours, theirs in names)


_GATING = (
    Rule(
        f"{_FLAX}mlp.gating_einsum",
        (f"{IN_FILE}mlp.gate_proj.weight", f"{IN_FILE}mlp.up_proj.weight"),
        "+ I D -> I D",
    ),
    Rule(f"{_FLAX}mlp.linear", f"{IN_FILE}mlp.down_proj.weight", "I D -> D I"),
)

FLAX = TreeMapping((*_ends(), *_attention(_FLAX), *_norms(_FLAX), *_GATING))
"""The gemma package."""

TUNIX = TreeMapping((*_ends(), *_attention(LAYER), *_norms(LAYER), *MLP))
"""Tunix."""
