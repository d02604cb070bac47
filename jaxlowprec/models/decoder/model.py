"""A decoder in Flax NNX, whose modules have Hugging Face's names without "model."."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.models.decoder.attention import INIT, Attention, LatentAttention, Parts, capped
from jaxlowprec.models.decoder.cache import FROM_THE_START, Cache, LayerCache, TokenPlaces
from jaxlowprec.models.decoder.config import DecoderConfig


class Layer(nnx.Module):
    """Attention, and a gated MLP or experts, each with a norm of its input and maybe one of its result."""

    def __init__(self, parts: Parts, layer: int):
        config = parts.config
        self.names = config.norms
        for name in self.names:
            if name is not None:
                setattr(self, name, parts.norm(config.width))
        self.self_attn = (Attention if config.latent is None else LatentAttention)(parts, layer)
        self.mlp = mixture_of(parts) if config.sparse[layer] else mlp_of(parts)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        tables: Any,
        cache: LayerCache | None,
        at: TokenPlaces = FROM_THE_START,
        tape: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache | None, jlp.moe.MoEAux | None]:
        """Activations [batch, time, width], the cache, and the experts' `MoEAux`; see `Attention` and `MoE`."""
        names = self.names
        y, cache = self.self_attn(self._normed(names.attention, x), positions, tables, cache, at)
        normed, x = getattr(self, names.mlp)(self._normed(names.after_attention, y), residual=x)
        y, aux = self.mlp(normed, tape) if isinstance(self.mlp, jlp.nnx.MoE) else (self.mlp(normed), None)
        return x + self._normed(names.after_mlp, y), cache, aux

    def _normed(self, name: str | None, x: jax.Array) -> jax.Array:
        """The result of the norm of a name, or x if there is none."""
        return x if name is None else getattr(self, name)(x)


def mlp_of(parts: Parts) -> jlp.nnx.MLP:
    """The MLP of a layer without experts."""
    config = parts.config
    options = {"use_bias": config.mlp_bias, "activation": config.activation, **parts.options}
    return jlp.nnx.MLP(config.width, config.hidden, **options)


def mixture_of(parts: Parts) -> jlp.nnx.MoE:
    """The experts of a layer."""
    experts, options = parts.config.experts, parts.options
    assert experts is not None
    if experts.clamped is not None:
        options |= {"activation": experts.clamped, "gated": "joint"}
    return jlp.nnx.MoE(
        experts.number,
        parts.config.width,
        experts.width,
        top_k=experts.per_token,
        shared_hidden_features=experts.shared,
        routing=dataclasses.replace(experts.routing, logit_bias=experts.bias),
        use_bias=experts.bias,
        **options,
    )


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
        parts = Parts(config, jnp.dtype(dtype), param_dtype, rngs)
        self.config = config
        self.embed_tokens = nnx.Embed(config.vocabulary, config.width, embedding_init=INIT, **parts.dtypes)
        self.layers = nnx.List([Layer(parts, layer) for layer in range(config.layers)])
        self.norm = parts.norm(config.width)
        self.lm_head = nnx.data(None)
        if not config.tied:  # a head follows no recipe, but may be loaded quantised
            self.lm_head = parts.linear(config.width, config.vocabulary, recipe=None)
        jlp.nnx.name_layers(self)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Float32 logits [batch, time, vocabulary] of int32 tokens [batch, time]."""
        return self.logits(self.hidden(tokens)[0])

    def hidden(
        self,
        tokens: jax.Array,
        cache: Cache | None = None,
        at: TokenPlaces = FROM_THE_START,
        *,
        tape: jlp.moe.RoutingTape | None = None,
    ) -> tuple[jax.Array, Cache | None, list[jlp.moe.MoEAux]]:
        """The head's input [batch, time, width]; the cache with these tokens; the `MoEAux` of layers with experts.

        Arguments:
            tokens: int32 [batch, time].
            cache: of earlier tokens; its lengths stay as they are.
            at: where the tokens stand in their sequences.
            tape: [layers with experts, batch, time, k], the experts of each token, such as those that a rollout used;
                None: they are chosen.

        Raises:
            ValueError: the tape has another number of layers.
        """
        if tape is not None and len(tape) != sum(self.config.sparse):
            raise ValueError(f"Decoder: {tape}; needs a layer for each of {sum(self.config.sparse)} with experts")
        time = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        positions = time + (jnp.zeros((tokens.shape[0], 1), jnp.int32) if at.starts is None else at.starts[:, None])
        length = tokens.shape[1] if cache is None else cache.places
        tables = {rope: rope.tables(positions, self.config.turned, length) for rope in self.config.ropes}
        x = self.embedded(tokens)
        caches: list[LayerCache] = []
        said: list[jlp.moe.MoEAux] = []
        for i, layer in enumerate(self.layers):
            held, turns = None if cache is None else cache.layer(i), tables[self.config.rope_of(i)]
            replayed = tape[len(said)] if tape is not None and self.config.sparse[i] else None
            x, new, aux = layer(x, positions, turns, held, at, replayed)
            caches += [] if new is None else [new.without_table]
            said += [] if aux is None else [aux]
        return self.norm(x), None if cache is None else dataclasses.replace(cache, layers=tuple(caches)), said

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """The tokens' rows of the embedding; `nnx.Embed` would cast all rows."""
        x = self.embed_tokens.embedding[...][tokens].astype(self.embed_tokens.dtype)
        scale = self.config.embedding_scale
        return x if scale == 1 else x * jnp.asarray(scale, x.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Float32 logits [..., vocabulary] of what `hidden` gives."""
        if self.lm_head is not None:
            return capped(self.lm_head(hidden).astype(jnp.float32), self.config.logit_cap)
        table = self.embed_tokens.embedding[...].astype(hidden.dtype)
        logits = jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=jnp.float32)
        return capped(logits, self.config.logit_cap)


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
