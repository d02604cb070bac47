"""DeepSeek V2 and V3, and Kimi K2: latent attention, dense layers first, then experts that a bias helps to choose."""

from jaxlowprec.checkpoints.families.family import Family
from jaxlowprec.checkpoints.families.parts import (
    IN_FILE,
    LAYER,
    OUT,
    QUERY,
    ends,
    experts,
    gated_mlp,
    linears,
    norms,
    selection_bias,
)
from jaxlowprec.checkpoints.trees.mapping import Rule, TreeMapping

ATTENTION = (
    *linears("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    *linears("self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj", layout=QUERY),
    *linears("self_attn.o_proj", layout=OUT),
    *norms("self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"),
)
DRAFT = (
    *norms("enorm", "hnorm", "shared_head.norm"),
    *linears("eh_proj", "shared_head.head"),
    Rule(f"{LAYER}embed_tokens.embedding", f"{IN_FILE}embed_tokens.weight"),
)
"""Layers after the last, which predict further tokens."""

LAYERS = (
    *ATTENTION,
    *gated_mlp(),
    *experts(),
    *selection_bias(),
    *gated_mlp("mlp.shared_experts"),
    *norms("input_layernorm", "post_attention_layernorm"),
    *DRAFT,
)

MAPPING = TreeMapping((*ends(), *LAYERS))

FAMILY = Family(
    "DeepSeek V2, DeepSeek V3, Kimi K2",
    ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK2ForCausalLM"),
    MAPPING,
    sizes=(("V", "vocab_size"), ("H", "num_attention_heads")),
    splits_qkv=False,
    dense_first="first_k_dense_replace",
    draft_layers=True,
)
