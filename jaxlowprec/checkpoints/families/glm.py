"""GLM-4 and GLM-4.5: the dense ones fuse gate and up, those with experts do not."""

from jaxlowprec.checkpoints.families.deepseek import DRAFT
from jaxlowprec.checkpoints.families.family import Family
from jaxlowprec.checkpoints.families.parts import (
    attention,
    ends,
    experts,
    fused_gated_mlp,
    gated_mlp,
    norms,
    selection_bias,
    with_stacked,
)
from jaxlowprec.checkpoints.trees.mapping import TreeMapping

NORMS = ("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")

DENSE_LAYERS = (*attention(), *fused_gated_mlp(), *norms(*NORMS))
LAYERS = (
    *attention(),
    *gated_mlp(),
    *experts(),
    *selection_bias(),
    *gated_mlp("mlp.shared_experts"),
    *norms("input_layernorm", "post_attention_layernorm"),
    *DRAFT,
)

DENSE = Family("GLM-4", ("GlmForCausalLM", "Glm4ForCausalLM"), TreeMapping((*ends(), *with_stacked(DENSE_LAYERS))))
MIXTURE = Family(
    "GLM-4.5, GLM-4.6",
    ("Glm4MoeForCausalLM",),
    TreeMapping((*ends(), *LAYERS)),
    dense_first="first_k_dense_replace",
    draft_layers=True,
)
