"""Model families: rules for the tensors of each family's checkpoints, and the config's keys that give their sizes."""

from __future__ import annotations

import dataclasses

from jaxlowprec.checkpoints.families.parts import (
    IN_FILE,
    LAYER,
    OUT,
    QUERY,
    ROTARY,
    attention,
    ends,
    experts,
    fused_attention,
    fused_gated_mlp,
    gated_mlp,
    linears,
    norms,
    selection_bias,
    with_stacked,
)
from jaxlowprec.checkpoints.trees.mapping import Rule, TreeMapping


@dataclasses.dataclass(frozen=True)
class Family:
    """Models whose checkpoints have the same tensors.

    Attributes:
        title: their names, for readers.
        architectures: what their config.json has in `architectures`.
        mapping: the rules that do not depend on a config.
        sizes: the keys of the config that say how large an axis is, by the axis's name in layouts.
        splits_qkv: whether files have queries, keys and values apart, so that a tree that fuses them needs to know the
            numbers of heads.
        dense_first: the key of the config that says how many layers come before those with experts.
        draft_layers: whether files may have layers after the last, which predict further tokens; a tree without them
            leaves their tensors out.
        tied: whether the head is the embedding if the config does not say it.
    """

    title: str
    architectures: tuple[str, ...]
    mapping: TreeMapping
    sizes: tuple[tuple[str, str], ...] = (
        ("V", "vocab_size"),
        ("H", "num_attention_heads"),
        ("G", "num_key_value_heads"),
        ("d", "head_dim"),
    )
    splits_qkv: bool = True
    dense_first: str | None = None
    draft_layers: bool = False
    tied: bool = False


LLAMA_LAYERS = (*attention(), *gated_mlp(), *norms("input_layernorm", "post_attention_layernorm"))

LLAMA = TreeMapping((*ends(), *with_stacked(LLAMA_LAYERS)), left_out=(ROTARY,))
"""Llama, Mistral and dense Qwen, for a tree whose modules have Hugging Face's names without "model."."""

LLAMA_FAMILY = Family("Llama 2, Llama 3, Mistral", ("LlamaForCausalLM", "MistralForCausalLM"), LLAMA)


QWEN3_MOE = TreeMapping((*ends(), *with_stacked((*LLAMA_LAYERS, *experts()))))
"""Qwen3's mixtures of experts: as `LLAMA`, with `mlp` a `jaxlowprec.nnx.MoE` or Linen's, without biases."""

QWEN_FAMILY = Family("Qwen2, Qwen2.5, Qwen3", ("Qwen2ForCausalLM", "Qwen3ForCausalLM"), LLAMA)
QWEN_MOE_FAMILY = Family("Qwen3-MoE", ("Qwen3MoeForCausalLM",), QWEN3_MOE)


GEMMA_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")

GEMMA = TreeMapping((*ends(), *with_stacked((*attention(), *gated_mlp(), *norms(*GEMMA_NORMS)))))

GEMMA_FAMILY = Family("Gemma 2, Gemma 3 (text)", ("Gemma2ForCausalLM", "Gemma3ForCausalLM"), GEMMA, tied=True)


NORMS = norms("input_layernorm", "post_attention_layernorm")

PHI = TreeMapping((*ends(), *with_stacked((*fused_attention(), *fused_gated_mlp(), *NORMS))))

PHI_FAMILY = Family(
    "Phi-3, Phi-4",
    ("Phi3ForCausalLM",),
    PHI,
    sizes=(("V", "vocab_size"), ("d", "head_dim")),
    splits_qkv=False,
)


MIXTRAL_EXPERTS = experts(names=("w1", "w3", "w2"), module="block_sparse_moe")

MIXTRAL = TreeMapping((*ends(), *with_stacked((*attention(), *MIXTRAL_EXPERTS, *NORMS))))

MIXTRAL_FAMILY = Family("Mixtral", ("MixtralForCausalLM",), MIXTRAL)


LATENT_ATTENTION = (
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

DEEPSEEK_LAYERS = (
    *LATENT_ATTENTION,
    *gated_mlp(),
    *experts(),
    *selection_bias(),
    *gated_mlp("mlp.shared_experts"),
    *norms("input_layernorm", "post_attention_layernorm"),
    *DRAFT,
)

DEEPSEEK = TreeMapping((*ends(), *DEEPSEEK_LAYERS))

DEEPSEEK_FAMILY = Family(
    "DeepSeek V2, DeepSeek V3, Kimi K2",
    ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK2ForCausalLM"),
    DEEPSEEK,
    sizes=(("V", "vocab_size"), ("H", "num_attention_heads")),
    splits_qkv=False,
    dense_first="first_k_dense_replace",
    draft_layers=True,
)


GLM_NORMS = ("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")

GLM_LAYERS = (*attention(), *fused_gated_mlp(), *norms(*GLM_NORMS))
GLM_MOE_LAYERS = (
    *attention(),
    *gated_mlp(),
    *experts(),
    *selection_bias(),
    *gated_mlp("mlp.shared_experts"),
    *norms("input_layernorm", "post_attention_layernorm"),
    *DRAFT,
)

GLM_FAMILY = Family("GLM-4", ("GlmForCausalLM", "Glm4ForCausalLM"), TreeMapping((*ends(), *with_stacked(GLM_LAYERS))))
GLM_MOE_FAMILY = Family(
    "GLM-4.5, GLM-4.6",
    ("Glm4MoeForCausalLM",),
    TreeMapping((*ends(), *GLM_MOE_LAYERS)),
    dense_first="first_k_dense_replace",
    draft_layers=True,
)


AT, INSIDE = f"{LAYER}mlp.experts", f"{IN_FILE}mlp.experts"

GPT_OSS_EXPERTS = (
    *linears("mlp.router"),
    Rule((f"{AT}.gate_proj.kernel", f"{AT}.up_proj.kernel"), f"{INSIDE}.gate_up_proj", "E D I -> E D (I +)"),
    Rule((f"{AT}.gate_proj.bias", f"{AT}.up_proj.bias"), f"{INSIDE}.gate_up_proj_bias", "E I -> E (I +)"),
    Rule(f"{AT}.gate_up_proj.kernel", f"{INSIDE}.gate_up_proj", "E D N -> E D N"),
    Rule(f"{AT}.gate_up_proj.bias", f"{INSIDE}.gate_up_proj_bias", "E N -> E N"),
    Rule(f"{AT}.down_proj.kernel", f"{INSIDE}.down_proj", "E I D -> E I D"),
    Rule(f"{AT}.down_proj.bias", f"{INSIDE}.down_proj_bias", "E D -> E D"),
)
SINKS = (Rule(f"{LAYER}self_attn.sinks", f"{IN_FILE}self_attn.sinks"),)

GPT_OSS = TreeMapping((*ends(), *with_stacked((*attention(), *SINKS, *GPT_OSS_EXPERTS, *NORMS))))

GPT_OSS_FAMILY = Family("GPT-OSS", ("GptOssForCausalLM",), GPT_OSS)

FAMILIES: tuple[Family, ...] = (
    LLAMA_FAMILY,
    QWEN_FAMILY,
    QWEN_MOE_FAMILY,
    GEMMA_FAMILY,
    PHI_FAMILY,
    MIXTRAL_FAMILY,
    DEEPSEEK_FAMILY,
    GLM_FAMILY,
    GLM_MOE_FAMILY,
    GPT_OSS_FAMILY,
)
