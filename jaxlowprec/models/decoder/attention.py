"""Causal attention with fewer key heads than query heads, rotary embeddings, and a cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.models.decoder.cache import LayerCache
from jaxlowprec.models.decoder.config import DecoderConfig
from jaxlowprec.models.decoder.rope import rotated


class Attention(nnx.Module):
    """Attention of one layer. Linears follow the recipe or hold quantised kernels; the rest is float32."""

    def __init__(self, config: DecoderConfig, layer: int, options: dict[str, Any]):
        heads, keys = config.heads * config.head, config.key_heads * config.head
        dtypes = {key: value for key, value in options.items() if key != "kernel_init"}

        def linear(inputs: int, outputs: int, bias: bool) -> jlp.nnx.Linear:
            return jlp.nnx.Linear(inputs, outputs, use_bias=bias, **options)

        self.config, self.window = config, config.windows[layer]
        self.q_proj = linear(config.width, heads, config.qkv_bias)
        self.k_proj, self.v_proj = (linear(config.width, keys, config.qkv_bias) for _ in range(2))
        self.o_proj = linear(heads, config.width, config.out_bias)
        self.q_norm, self.k_norm = nnx.data(None), nnx.data(None)
        if config.query_norm:
            self.q_norm, self.k_norm = (
                jlp.nnx.RMSNorm(config.head, epsilon=config.epsilon, **dtypes) for _ in range(2)
            )

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        tables: tuple[jax.Array, jax.Array],
        cache: LayerCache | None = None,
        *,
        starts: jax.Array | None = None,
        span: int | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Attends from each token to those before it.

        Arguments:
            x: [batch, time, width].
            positions: int32 [batch, time], the tokens' places in their sequences.
            tables: of the rotary embedding, see `Rope.tables`.
            cache: the keys and values of earlier tokens. These tokens' are added to it.
            starts: int32 [batch], the place of the first token; None: 0.
            span: no token of the cache is at this place or a later one; None: they may be anywhere.

        Returns:
            [batch, time, width], and the cache.
        """
        config, (batch, time, _) = self.config, x.shape
        q, k, v = jlp.nnx.linears(x, [self.q_proj, self.k_proj, self.v_proj])
        q = q.reshape(batch, time, config.heads, config.head)
        k, v = (y.reshape(batch, time, config.key_heads, config.head) for y in (k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotated(q, tables), rotated(k, tables)
        if cache is None:
            seen = LayerCache(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))
        else:
            cache = cache.written(k, v, starts)
            seen = cache if span is None else cache.first(span)
        y = attended(q, seen, positions, self.window)
        return self.o_proj(y.reshape(batch, time, -1).astype(x.dtype)), cache


def attended(q: jax.Array, seen: LayerCache, positions: jax.Array, window: int | None) -> jax.Array:
    """The values that queries [batch, time, heads, head] at such places attend to: float32, of that shape.

    Products and softmax are float32. Scales of an 8-bit cache are applied to scores and probabilities.
    """
    batch, time, heads, head = q.shape
    groups = heads // seen.keys.shape[1]
    q = q.reshape(batch, time, -1, groups, head).astype(jnp.float32) * head**-0.5
    scores = jnp.einsum("btkgd,bksd->bkgts", q, seen.keys.astype(jnp.float32))
    if seen.key_scales is not None:
        scores = scores * seen.key_scales[:, :, None, None]
    places, here = jnp.arange(seen.keys.shape[2]), positions[:, :, None]
    visible = places <= here
    if window is not None:
        visible &= places > here - window
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1)
    if seen.value_scales is not None:
        weights = weights * seen.value_scales[:, :, None, None]
    y = jnp.einsum("bkgts,bksd->btkgd", weights, seen.values.astype(jnp.float32))
    return y.reshape(batch, time, heads, head)
