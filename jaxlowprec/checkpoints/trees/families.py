"""The tensor names of model families in Hugging Face's checkpoints."""

from __future__ import annotations

from jaxlowprec.checkpoints.trees.mapping import EXPERT, Rule, TreeMapping

_LLAMA_LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
_LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")

LLAMA = TreeMapping(
    (
        Rule("embed_tokens.embedding", "model.embed_tokens.weight"),
        *(Rule(f"layers.{{i}}.{m}.kernel", f"model.layers.{{i}}.{m}.weight") for m in _LLAMA_LINEARS),
        *(Rule(f"layers.{{i}}.{m}.bias", f"model.layers.{{i}}.{m}.bias") for m in _LLAMA_LINEARS),
        *(Rule(f"layers.{{i}}.{m}.scale", f"model.layers.{{i}}.{m}.weight") for m in _LLAMA_NORMS),
        Rule("norm.scale", "model.norm.weight"),
        Rule("lm_head.kernel", "lm_head.weight"),
    )
)
"""Llama, Mistral and dense Qwen, for a tree whose modules have Hugging Face's names without "model."."""

QWEN3_MOE = TreeMapping(
    (
        *LLAMA.rules,
        Rule("layers.{i}.mlp.router.kernel", "model.layers.{i}.mlp.gate.weight"),
        *(
            Rule(f"layers.{{i}}.mlp.experts.{m}.kernel", f"model.layers.{{i}}.mlp.experts.{EXPERT}.{m}.weight")
            for m in ("gate_proj", "up_proj", "down_proj")
        ),
    )
)
"""Qwen3's mixtures of experts: as `LLAMA`, with `mlp` a `jaxlowprec.nnx.MoE` or Linen's, without biases."""
