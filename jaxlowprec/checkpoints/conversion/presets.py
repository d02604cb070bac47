"""The default rules for weights that stay in high precision, by the names that published models use.

Every expression ends in `(\\.|$)` or may end anywhere. So it matches a module's name, the name of its weight and the
names inside the module, and programs that compare rules with tensor names decide in the same way.
"""

from __future__ import annotations

HEADS = r"re:(.*\.)?(lm_head|output_layer|embed_out|shared_head\.head|score|classifier|v_head)(\.|$)"
EMBEDDINGS = r"re:(.*\.)?([^.]*embed[^.]*|wte|wpe)(\.|$)"
NORMS = r"re:(.*\.)?([^.]*norm[^.]*|ln_[^.]*)(\.|$)"
ROUTERS = r"re:(.*\.)?(gate|router|wg)(\.|$)"
SHARED_EXPERT_GATES = r"re:.*\.shared_experts?_gate(\.|$)"
VISION = (
    r"re:(.*\.)?(visual|vision_[^.]+|vit|image_newline|mm_projector|multi_modal_projector|multimodal_projector|mlp1"
    r"|audio_[^.]+|aligner)(\.|$)"
)
LINEAR_ATTENTION = r"re:(.*\.)?(linear_attn|conv1d|mamba)(\.|$)"
MULTI_TOKEN_PREDICTION = r"re:(.*\.)?(eh_proj|mtp\.fc)(\.|$)"
INDEXERS = r"re:.*\.indexer(\.|$)"  # DeepSeek-V3.2's sparse attention: it only chooses tokens

KINDS = {
    HEADS: "heads",
    EMBEDDINGS: "embeddings",
    NORMS: "norms",
    ROUTERS: "routers",
    SHARED_EXPERT_GATES: "shared experts' gates",
    VISION: "vision and audio",
    LINEAR_ATTENTION: "linear attention",
    MULTI_TOKEN_PREDICTION: "multi-token prediction's projections",
    INDEXERS: "sparse attention's indexers",
}
"""What each default rule is for."""

DEFAULTS = tuple(KINDS)
"""For Llama, Qwen, Mixtral, DeepSeek and GLM models, with vision and multi-token prediction, and similar names."""
