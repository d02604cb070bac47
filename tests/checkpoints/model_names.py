"""Names of the weights of published models, as their files have them, and which of them are quantised by default.

One layer of each kind stands for all. A shape is what matters of it here: its number of dimensions.
"""

from __future__ import annotations

import dataclasses


def each(prefix, *names):
    return [f"{prefix}.{name}" for name in names]


QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
GATED = ("gate_proj", "up_proj", "down_proj")
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclasses.dataclass(frozen=True)
class Model:
    """Modules with a matrix (or a filter) as their weight, by whether the default rules leave them alone."""

    quantised: list[str]
    left: list[str]
    arrays: tuple[str, ...] = ()  # whole tensor names, that hold all experts of a layer


def attention(layer, *more):
    return each(f"{layer}.self_attn", *QKVO, *more)


def dense(layer):
    return attention(layer) + each(f"{layer}.mlp", *GATED)


def experts(parent, names=GATED):
    return [f"{parent}.experts.{e}.{name}" for e in (0, 127) for name in names]


ENDS = ["model.embed_tokens", "lm_head"]
L0, L1, L3, L46, L61, L92 = (f"model.layers.{n}" for n in (0, 1, 3, 46, 61, 92))
TEXT = "model.language_model.layers.0"


def latent_attention(layer):
    return each(f"{layer}.self_attn", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


MODELS = {
    "Llama 3": Model(dense(L0), ENDS),
    "Qwen2": Model(dense(L0), ENDS),
    "Qwen2-MoE": Model(
        attention(L0) + experts(f"{L0}.mlp") + each(f"{L0}.mlp.shared_expert", *GATED),
        ENDS + each(f"{L0}.mlp", "gate", "shared_expert_gate"),
    ),
    "Qwen3": Model(dense(L0), ENDS),
    "Qwen3-MoE": Model(attention(L0) + experts(f"{L0}.mlp"), [*ENDS, f"{L0}.mlp.gate"]),
    "Qwen3-Next": Model(
        attention(L3)
        + experts(f"{L0}.mlp")
        + each(f"{L0}.mlp.shared_expert", *GATED)
        + attention("mtp.layers.0")
        + experts("mtp.layers.0.mlp")
        + each("mtp.layers.0.mlp.shared_expert", *GATED),
        ENDS
        + each(f"{L0}.linear_attn", "in_proj_qkvz", "in_proj_ba", "conv1d", "out_proj")
        + each(f"{L0}.mlp", "gate", "shared_expert_gate")
        + each("mtp.layers.0.mlp", "gate", "shared_expert_gate")
        + ["mtp.fc"],
    ),
    "Qwen2.5-VL": Model(
        dense(L0),
        ENDS
        + ["visual.patch_embed.proj"]
        + each("visual.blocks.0", "attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        + each("visual.merger", "mlp.0", "mlp.2"),
    ),
    "Qwen3-VL": Model(
        dense(TEXT),
        ["model.language_model.embed_tokens", "lm_head", "model.visual.patch_embed.proj", "model.visual.pos_embed"]
        + each("model.visual.blocks.0", "attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
        + each("model.visual.merger", "linear_fc1", "linear_fc2")
        + each("model.visual.deepstack_merger_list.0", "linear_fc1", "linear_fc2"),
    ),
    "Qwen3-VL-MoE": Model(
        attention(TEXT),
        ["model.language_model.embed_tokens", "lm_head", f"{TEXT}.mlp.gate", "model.visual.blocks.0.attn.qkv"],
        (f"{TEXT}.mlp.experts.gate_up_proj", f"{TEXT}.mlp.experts.down_proj"),
    ),
    "Mixtral": Model(
        attention(L0) + experts(f"{L0}.block_sparse_moe", ("w1", "w2", "w3")), [*ENDS, f"{L0}.block_sparse_moe.gate"]
    ),
    "DeepSeek-V3": Model(
        latent_attention(L0)
        + each(f"{L0}.mlp", *GATED)
        + latent_attention(L3)
        + experts(f"{L3}.mlp")
        + each(f"{L3}.mlp.shared_experts", *GATED)
        + latent_attention(L61)
        + experts(f"{L61}.mlp"),
        [*ENDS, f"{L3}.mlp.gate", f"{L61}.mlp.gate"] + each(L61, "embed_tokens", "eh_proj", "shared_head.head"),
    ),
    "DeepSeek-V3.2": Model(
        latent_attention(L0) + each(f"{L0}.mlp", *GATED),
        ENDS + each(f"{L0}.self_attn.indexer", "wq_b", "wk", "weights_proj"),
    ),
    "GLM-4": Model(attention(L0) + each(f"{L0}.mlp", "gate_up_proj", "down_proj"), ENDS),
    "GLM-4.5": Model(
        dense(L0)
        + attention(L1)
        + experts(f"{L1}.mlp")
        + each(f"{L1}.mlp.shared_experts", *GATED)
        + attention(L92)
        + experts(f"{L92}.mlp"),
        [*ENDS, f"{L1}.mlp.gate", f"{L92}.mlp.gate"] + each(L92, "embed_tokens", "eh_proj", "shared_head.head"),
    ),
    "GLM-4.5V": Model(
        dense(TEXT),
        ["model.language_model.embed_tokens", "lm_head", "model.visual.patch_embed.proj"]
        + each("model.visual", "embeddings.position_embedding", "downsample")
        + each("model.visual.blocks.0", "attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        + each("model.visual.merger", "proj", "gate_proj", "up_proj", "down_proj"),
    ),
    "ChatGLM3": Model(
        each(
            "transformer.encoder.layers.0",
            "self_attention.query_key_value",
            "self_attention.dense",
            "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h",
        ),
        ["transformer.embedding.word_embeddings", "transformer.output_layer"],
    ),
    "Kimi-VL": Model(
        latent_attention("language_model.model.layers.1")
        + experts("language_model.model.layers.1.mlp")
        + each("language_model.model.layers.1.mlp.shared_experts", *GATED),
        ["language_model.model.embed_tokens", "language_model.lm_head", "language_model.model.layers.1.mlp.gate"]
        + each("vision_tower.encoder.blocks.0", "wqkv", "wo", "mlp.fc0", "mlp.fc1")
        + each("multi_modal_projector", "linear_1", "linear_2"),
    ),
    "LLaVA": Model(
        dense("language_model.model.layers.0"),
        ["language_model.model.embed_tokens", "language_model.lm_head"]
        + each("vision_tower.vision_model.encoder.layers.0", "self_attn.q_proj", "self_attn.out_proj", "mlp.fc1")
        + each("mm_projector", "0", "2"),
    ),
}

NORMS = [
    "model.norm",
    f"{L0}.input_layernorm",
    f"{L0}.self_attn.q_norm",
    f"{L0}.self_attn.kv_a_layernorm",
    f"{L0}.linear_attn.norm",
    f"{L61}.enorm",
    f"{L61}.hnorm",
    f"{L61}.shared_head.norm",
    "mtp.pre_fc_norm_hidden",
    "mtp.pre_fc_norm_embedding",
    "model.visual.merger.norm",
    "transformer.encoder.final_layernorm",
]
