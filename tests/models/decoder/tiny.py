"""Tiny decoders: what config.json of each family says, and folders of random numbers."""

import jax.numpy as jnp
from flax import nnx

from jaxlowprec import checkpoints
from jaxlowprec.checkpoints.decoders.folders import mapping_of
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
}


def config(family, **changed):
    """The content of config.json."""
    return SIZES | FAMILIES[family] | changed


def decoder(family, *, seed=0, dtype=jnp.float32, **changed):
    """A decoder of random numbers, large enough that its logits differ."""
    made = Decoder(DecoderConfig.of(config(family, **changed)), dtype=dtype, rngs=nnx.Rngs(seed))
    for path, leaf in nnx.to_flat_state(nnx.state(made, nnx.Param)):
        if path[-1] == "kernel":
            leaf.set_value(3 * leaf.get_value())
    return made


def folder(path, family, **changed):
    """A Hugging Face folder of such a decoder."""
    made = decoder(family, **changed)
    checkpoints.save(path, made, mapping_of(made.config), config(family, **changed), dtype=jnp.bfloat16)
    return path
