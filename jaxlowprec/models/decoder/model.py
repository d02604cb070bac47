"""A decoder of the Llama kind in Flax NNX, whose modules have Hugging Face's names without "model."."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.models.decoder.attention import Attention
from jaxlowprec.models.decoder.cache import Cache, LayerCache
from jaxlowprec.models.decoder.config import DecoderConfig


class Layer(nnx.Module):
    """Pre-norm attention, and a SwiGLU MLP or experts in its place."""

    def __init__(self, config: DecoderConfig, layer: int, options: dict[str, Any]):
        dtypes = {key: value for key, value in options.items() if key != "kernel_init"}
        self.input_layernorm, self.post_attention_layernorm = (
            jlp.nnx.RMSNorm(config.width, epsilon=config.epsilon, **dtypes) for _ in range(2)
        )
        self.self_attn = Attention(config, layer, options)
        if not config.sparse[layer]:
            self.mlp: jlp.nnx.MLP | jlp.nnx.MoE = jlp.nnx.MLP(
                config.width, config.hidden, use_bias=config.mlp_bias, **options
            )
            return
        experts = config.experts
        assert experts is not None
        self.mlp = jlp.nnx.MoE(
            experts.number,
            config.width,
            experts.width,
            top_k=experts.per_token,
            routing=jlp.moe.RouterConfig(normalize=experts.normalize, load_balance_coef=experts.load_balance),
            **options,
        )

    def __call__(
        self, x: jax.Array, positions: jax.Array, tables: Any, cache: LayerCache | None, **places: Any
    ) -> tuple[jax.Array, LayerCache | None, jlp.moe.MoEAux | None]:
        """Activations [batch, time, width], the cache, and the experts' `MoEAux`; see `Attention`."""
        y, cache = self.self_attn(self.input_layernorm(x), positions, tables, cache, **places)
        normed, x = self.post_attention_layernorm(y, residual=x)
        if isinstance(self.mlp, jlp.nnx.MoE):
            y, aux = self.mlp(normed)
            return x + y, cache, aux
        return x + self.mlp(normed), cache, None


class Decoder(nnx.Module):
    """Tokens to the logits of the next ones.

    Arguments:
        config: sizes and options.
        dtype: of activations. Attention, softmax, router and logits are float32.
        param_dtype: of parameters.
        rngs: of the initial parameters.
    """

    def __init__(
        self, config: DecoderConfig, *, dtype: Any = jnp.float32, param_dtype: Any = jnp.float32, rngs: nnx.Rngs
    ):
        init = nnx.initializers.normal(0.02)
        dtypes = {"dtype": jnp.dtype(dtype), "param_dtype": param_dtype, "rngs": rngs}
        options = dtypes | {"kernel_init": init}
        self.config = config
        self.embed_tokens = nnx.Embed(config.vocabulary, config.width, embedding_init=init, **dtypes)
        self.layers = nnx.List([Layer(config, layer, options) for layer in range(config.layers)])
        self.norm = jlp.nnx.RMSNorm(config.width, epsilon=config.epsilon, **dtypes)
        self.lm_head = nnx.data(None)
        if not config.tied:  # a head follows no recipe, but may be loaded quantised
            self.lm_head = jlp.nnx.Linear(config.width, config.vocabulary, use_bias=False, recipe=None, **options)
        jlp.nnx.name_layers(self)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Float32 logits [batch, time, vocabulary] of int32 tokens [batch, time]."""
        return self.logits(self.hidden(tokens)[0])

    def hidden(
        self,
        tokens: jax.Array,
        cache: Cache | None = None,
        *,
        starts: jax.Array | None = None,
        span: int | None = None,
    ) -> tuple[jax.Array, Cache | None, list[jlp.moe.MoEAux]]:
        """What the head reads, [batch, time, width]; the cache with these tokens; the `MoEAux` of layers with experts.

        Arguments:
            tokens: int32 [batch, time].
            cache: of earlier tokens; its lengths stay as they are.
            starts: int32 [batch], the place of each sequence's first token; None: 0.
            span: see `Attention`.
        """
        time = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        positions = time + (jnp.zeros((tokens.shape[0], 1), jnp.int32) if starts is None else starts[:, None])
        tables = self.config.rope.tables(positions, self.config.head)
        x = self.embed_tokens.embedding[...][tokens].astype(self.embed_tokens.dtype)  # nnx.Embed would cast all rows
        caches: list[LayerCache] = []
        said: list[jlp.moe.MoEAux] = []
        for i, layer in enumerate(self.layers):
            x, new, aux = layer(
                x, positions, tables, None if cache is None else cache.layers[i], starts=starts, span=span
            )
            caches += [] if new is None else [new]
            said += [] if aux is None else [aux]
        return self.norm(x), None if cache is None else Cache(tuple(caches), cache.lengths), said

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Float32 logits [..., vocabulary] of what `hidden` gives."""
        if self.lm_head is not None:
            return self.lm_head(hidden).astype(jnp.float32)
        table = self.embed_tokens.embedding[...].astype(hidden.dtype)
        return jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=jnp.float32)


def log_probabilities(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The logarithm of each token's probability, float32 [...], by logits [..., vocabulary]."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)[..., 0]


def loss(decoder: Decoder, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The loss that is trained, and the mean cross-entropy in nats of predicting each token of [batch, time + 1].

    The first has the experts' load-balance losses in it.
    """
    hidden, _, said = decoder.hidden(tokens[:, :-1])
    value = -log_probabilities(decoder.logits(hidden), tokens[:, 1:]).mean()
    return value + sum(aux.loss for aux in said), value
