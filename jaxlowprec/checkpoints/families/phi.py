"""Phi-3 and Phi-4, whose files fuse queries, keys and values, and gate and up."""

from jaxlowprec.checkpoints.families.family import Family
from jaxlowprec.checkpoints.families.parts import ends, fused_attention, fused_gated_mlp, norms, with_stacked
from jaxlowprec.checkpoints.trees.mapping import TreeMapping

NORMS = norms("input_layernorm", "post_attention_layernorm")

MAPPING = TreeMapping((*ends(), *with_stacked((*fused_attention(), *fused_gated_mlp(), *NORMS))))

FAMILY = Family(
    "Phi-3, Phi-4",
    ("Phi3ForCausalLM",),
    MAPPING,
    sizes=(("V", "vocab_size"), ("d", "head_dim")),
    splits_qkv=False,
)
