"""What is left alone unless it is asked for: rules that hold for the names of published models.

Every expression ends in `(\\.|$)`, or may end anywhere: so it matches a module's name, the name of its weight, and what
lies within, and programs that compare rules with tensor names decide alike.
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
INDEXERS = r"re:.*\.indexer(\.|$)"  # DeepSeek-V3.2's sparse attention: its choice of tokens, not its arithmetic

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
"""For Llama, Qwen, Mixtral, DeepSeek and GLM models, with vision and multi-token prediction, and names like theirs."""
