"""Tiny decoders: what config.json of each family says, and folders of random numbers."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlowprec import checkpoints
from jaxlowprec.checkpoints.decoders import mapping_of
from jaxlowprec.models.decoder.config import DecoderConfig
from jaxlowprec.models.decoder.model import Decoder

SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def _long(pairs, **more):
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(pairs)], "long_factor": [1.0 + i for i in range(pairs)]}
    return {"rope_type": "longrope", "rope_theta": 10000.0, **factors, **more}


_OWN_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # some defaults are beyond the vocabulary
_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_GROUPS = {"n_group": 2, "topk_group": 1}
_LATENT = {"kv_lora_rank": 128, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 64}
FAMILIES = {
    "llama2": {"model_type": "llama", "num_key_value_heads": 4},
    "llama3": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral": {"model_type": "mistral", "sliding_window": 7, "head_dim": 64},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 128},
    "qwen2": {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 64, "tie_word_embeddings": True},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 32, "norm_topk_prob": True, **_EXPERTS},
    "qwen3_moe-dense": {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "norm_topk_prob": False,
        "mlp_only_layers": [0],
        **_EXPERTS,
    },
    "phi3": {
        "model_type": "phi3",
        "sliding_window": 7,
        "original_max_position_embeddings": 64,
        "rope_parameters": _long(16),
        **_OWN_TOKENS,
    },
    "phi4-mini": {
        "model_type": "phi3",
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "original_max_position_embeddings": 16,
        "rope_parameters": _long(12, partial_rotary_factor=0.75),
        **_OWN_TOKENS,
    },
    "gemma2": {"model_type": "gemma2", "head_dim": 64, "sliding_window": 7, "query_pre_attn_scalar": 48, **_CAPS},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "sliding_window": 7,
        "sliding_window_pattern": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "glm": {"model_type": "glm", "head_dim": 32, **_OWN_TOKENS},
    "glm4": {"model_type": "glm4", "head_dim": 32, **_OWN_TOKENS},
    "glm4_moe": {"model_type": "glm4_moe", "head_dim": 32, "use_qk_norm": True, "attention_bias": True, **_ROUTED},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 32,
        "intermediate_size": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "swiglu_limit": 0.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "num_key_value_heads": 4,
        "topk_method": "group_limited_greedy",
        **_LATENT,
        **_ROUTED,
        **_GROUPS,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "q_lora_rank": 128,
        "num_key_value_heads": 4,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "mscale": 0.8,
            "mscale_all_dim": 0.5,
            "original_max_position_embeddings": 32,
        },
        **_LATENT,
        **_ROUTED,
        **_GROUPS,
    },
}
LLAMAS = tuple(family for family in FAMILIES if family.startswith(("llama", "mi", "qwen")))


def config(family, **changed):
    """The content of config.json."""
    return SIZES | FAMILIES[family] | changed


def decoder(family, *, seed=0, dtype=jnp.float32, **changed):
    """A decoder of random numbers, large enough that its logits differ. NumPy draws them: each initialiser of a matrix
    would be a program of its own."""

    def make():
        return Decoder(DecoderConfig.of(config(family, **changed)), dtype=dtype, rngs=nnx.Rngs(seed))

    made, numbers = nnx.eval_shape(make), np.random.default_rng(seed)
    leaves = nnx.to_flat_state(nnx.state(made))
    matrices = {path: leaf.get_value() for path, leaf in leaves if path[-1] in ("kernel", "embedding")}
    others = jax.jit(lambda: [leaf for path, leaf in nnx.to_flat_state(nnx.state(make())) if path not in matrices])()
    others = iter(others)
    for path, leaf in leaves:
        if path not in matrices:
            leaf.set_value(next(others).get_value())
            continue
        size, is_router = matrices[path], "router" in path
        scale = 0.02 if path[-1] == "embedding" else 3 / size.shape[-2] ** 0.5 if is_router else 0.06
        leaf.set_value(jax.device_put(numbers.normal(0, scale, size.shape).astype(size.dtype)))
    return made


def folder(path, family, **changed):
    """A Hugging Face folder of such a decoder."""
    made = decoder(family, **changed)
    checkpoints.save(path, made, mapping_of(made.config), config(family, **changed), dtype=jnp.bfloat16)
    return path
