"""The policy: a small transformer with experts, whose linears follow the context's recipe or hold 4-bit kernels."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

import jaxlowprec as jlp
from rl.task import VOCABULARY

GROUP_SIZE = 32
RECIPE = jlp.Int4QAT(group_size=GROUP_SIZE, symmetric=True, scale_dtype="bfloat16", ste="identity")
"""What the trainer trains under. Embeddings, norms, routers and the head stay float32."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the policy. Activations are float32.

    Attributes:
        layers, width, heads: sizes of the transformer; width is a multiple of the recipe's group size.
        experts, top_k: experts in each block, and experts per token.
        length: tokens per sequence.
        kind: which policy has these sizes, see `policies.made`.
        cache: what the rollout of a decoder keeps keys and values as, one of `policies.CACHES`.
    """

    layers: int = 2
    width: int = 64
    heads: int = 4
    experts: int = 4
    top_k: int = 2
    length: int = 9
    kind: str = "small"
    cache: str = "float32"


class Block(nnx.Module):
    """Pre-norm causal attention, and experts."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        width = config.width
        self.heads = config.heads
        self.norm1, self.norm2 = (nnx.RMSNorm(width, rngs=rngs) for _ in range(2))
        self.qkv = jlp.nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = jlp.nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.moe = jlp.nnx.MoE(config.experts, width, 2 * width, top_k=config.top_k, rngs=rngs)

    def __call__(self, x: jax.Array, tape: jax.Array) -> tuple[jax.Array, jlp.moe.MoEAux]:
        """Activations [batch, time, width] and the experts' `MoEAux`; `tape`: the tape of this layer."""
        qkv = self.qkv(self.norm1(x)).reshape(*x.shape[:2], 3, self.heads, -1)
        attended = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
        x = x + self.out(attended.reshape(x.shape))
        y, aux = self.moe(self.norm2(x), tape)
        return x + y, aux


class Policy(nnx.Module):
    """Tokens [batch, length] to the log-probabilities of each place's next token."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.5)
        self.config = config
        self.tokens = nnx.Embed(VOCABULARY, config.width, embedding_init=init, rngs=rngs)
        self.positions = nnx.Embed(config.length, config.width, embedding_init=init, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        head = nnx.initializers.normal(0.02)  # so that the first answers are random digits
        self.head = nnx.Linear(config.width, VOCABULARY, use_bias=False, kernel_init=head, rngs=rngs)
        jlp.nnx.name_layers(self)

    def __call__(
        self, tokens: jax.Array, tape: jlp.moe.RoutingTape
    ) -> tuple[jax.Array, jlp.moe.RoutingTape, jax.Array]:
        """Float32 log-probabilities [batch, length, vocabulary], the used routing, and the load-balance loss."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        said = []
        for layer, block in enumerate(self.blocks):
            x, aux = block(x, tape[layer])
            said.append(aux)
        scores = jax.nn.log_softmax(self.head(self.norm(x)))
        used = jlp.moe.RoutingTape.of_layers([aux.tape for aux in said])
        return scores, used, sum(aux.load_balance_loss for aux in said)


def afresh(config: Config, sequences: int) -> jlp.moe.RoutingTape:
    """The tape with which every token chooses its experts itself."""
    return jlp.moe.RoutingTape.afresh(config.layers, (sequences, config.length), config.top_k)


@nnx.jit
def scores(model: nnx.Module, tokens: jax.Array, tape: jlp.moe.RoutingTape) -> tuple[jax.Array, jlp.moe.RoutingTape]:
    """The log-probabilities of all tokens at all places, and the used routing.

    Trainer and rollout both call this function with arrays of one shape: XLA may sum in another order for other shapes.
    """
    found, used, _ = model(tokens, tape)
    return found, used


def of_next(found: jax.Array, tokens: jax.Array) -> jax.Array:
    """[batch, length - 1]: the log-probability of each token but the first, given those before it."""
    return jnp.take_along_axis(found[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
