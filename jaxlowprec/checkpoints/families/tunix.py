"""Trees of tunix: Llama 3, Qwen2 and Qwen3, and Gemma 2 and 3. Source: tunix/models, the files params.py."""

from __future__ import annotations

from jaxlowprec.checkpoints.families.parts import GATED, IN_FILE, LAYER, Rules
from jaxlowprec.checkpoints.trees.mapping import EXPERT, Rule, TreeMapping

_QUERY, _KEY, _OUT = "D H d -> (H d) D", "D G d -> (G d) D", "H d D -> D (H d)"

MLP: Rules = tuple(Rule(f"{LAYER}mlp.{part}.kernel", f"{IN_FILE}mlp.{part}.weight") for part in GATED)

_PROJECTIONS = tuple(
    Rule(f"{LAYER}attn.{module}.w", f"{IN_FILE}self_attn.{module}.weight", layout)
    for module, layout in (("q_proj", _QUERY), ("k_proj", _KEY), ("v_proj", _KEY), ("o_proj", _OUT))
)
_BIASES = tuple(
    Rule(f"{LAYER}attn.{p}_bias", f"{IN_FILE}self_attn.{p}_proj.bias", "N -> N | H d -> (H d)") for p in "qkv"
)
_NORMS = (
    *(Rule(f"{LAYER}attn.{p}_norm.w", f"{IN_FILE}self_attn.{p}_norm.weight") for p in "qk"),
    *(Rule(f"{LAYER}{norm}.w", f"{IN_FILE}{norm}.weight") for norm in ("input_layernorm", "post_attention_layernorm")),
)
_EXPERTS = (
    Rule(f"{LAYER}mlp.router.kernel", f"{IN_FILE}mlp.gate.weight"),
    *(
        Rule(f"{LAYER}mlp.{part}", f"{IN_FILE}mlp.experts.{EXPERT}.{part}.weight", "expert D N -> N D")
        for part in GATED
    ),
)

DECODER = TreeMapping(
    (
        Rule("embedder.input_embedding", "model.embed_tokens.weight", "V D -> V D"),
        Rule("final_norm.w", "model.norm.weight"),
        Rule("lm_head.w", "lm_head.weight", "D V -> V D"),
        *_PROJECTIONS,
        *_BIASES,
        *_NORMS,
        *MLP,
        *_EXPERTS,
    )
)
"""Llama 3, Qwen2, Qwen3 and Qwen3-MoE."""
