"""The policies to choose from: the small transformer of `policy.py`, and the library's decoder in Qwen3-MoE's shape."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec import decoder
from jaxlowprec.decoder import Decoder, DecoderConfig
from rl.policy import GROUP_SIZE, RECIPE, Config, Policy
from rl.task import VOCABULARY

POLICIES = ("small", "qwen3_moe")
STATIC = "fp8_static"
CACHES = (*decoder.CACHES, STATIC)
"""What a rollout may keep keys and values as; the last in FP8 with a scale for each layer, which the trainer finds."""


class DecoderPolicy(nnx.Module):
    """A `Decoder` that is called as `Policy` is. Its rollout keeps keys and values in a cache."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        self.decoder = Decoder(decoder_config(config), rngs=rngs)
        if self.decoder.lm_head is not None:  # so that the first answers are random digits
            self.decoder.lm_head.kernel.set_value(0.2 * self.decoder.lm_head.kernel.get_value())
        for layer in self.decoder.layers if config.cache == STATIC else ():
            attention = layer.self_attn
            attention.k_scale, attention.v_scale = (nnx.data(jlp.nnx.KVScale(jnp.ones(1))) for _ in range(2))

    def __call__(
        self, tokens: jax.Array, tape: jlp.moe.RoutingTape
    ) -> tuple[jax.Array, jlp.moe.RoutingTape, jax.Array]:
        """Float32 log-probabilities [batch, length, vocabulary], the used routing, and the load-balance loss."""
        hidden, _, said = self.decoder.hidden(tokens, tape=tape)
        found = jax.nn.log_softmax(self.decoder.logits(hidden))
        used = jlp.moe.RoutingTape.of_layers([aux.tape for aux in said])
        return found, used, sum(aux.load_balance_loss for aux in said)


AnyPolicy = Policy | DecoderPolicy


def decoder_config(config: Config) -> DecoderConfig:
    """Qwen3-MoE with the sizes of a policy: grouped queries, normalised queries and keys, experts in every layer."""
    return DecoderConfig.of(
        {
            "model_type": "qwen3_moe",
            "vocab_size": VOCABULARY,
            "hidden_size": config.width,
            "intermediate_size": 2 * config.width,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.heads // 2,
            "head_dim": GROUP_SIZE,
            "num_experts": config.experts,
            "num_experts_per_tok": config.top_k,
            "moe_intermediate_size": 2 * config.width,
            "norm_topk_prob": True,
            "max_position_embeddings": config.length,
        }
    )


def kept(config: Config) -> jlp.KVCache | str:
    """What the rollout of a decoder keeps keys and values as."""
    return jlp.KVCache(jlp.Float8Tensor()) if config.cache == STATIC else config.cache


def calibrate(policy: AnyPolicy, prompts: np.ndarray) -> None:
    """Finds the static scales of a policy's cache for the weights that it has now; other caches have none.

    The text is each prompt with its digits as the answer: int32 prompts [sequences, digits + 1].
    """
    if policy.config.cache == STATIC:
        jlp.kv.calibrate(policy.decoder, np.concatenate([prompts, prompts[:, :-1]], axis=1))


def trained(config: Config) -> jlp.autocast:
    """The scope of the trainer's passes: weights in 4 bits, and keys and values as the rollout's cache keeps them."""
    return jlp.autocast(RECIPE, kv_cache=None if config.kind == "small" else kept(config))


def made(config: Config, rngs: nnx.Rngs) -> AnyPolicy:
    """The policy that the config names, with initial parameters."""
    return {"small": Policy, "qwen3_moe": DecoderPolicy}[config.kind](config, rngs)
