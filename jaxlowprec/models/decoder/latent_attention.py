"""Multi-head latent attention, whose keys and values are made of a narrow latent that the cache keeps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlowprec.models.decoder.attention import attended
from jaxlowprec.models.decoder.cache import LayerCache
from jaxlowprec.models.decoder.parts import Parts

EPSILON = 1e-6
"""Of the latents' norms, whatever the config says of the others."""


class LatentAttention(nnx.Module):
    """Latent attention of one layer, as in DeepSeek V2 and V3 (arXiv 2405.04434, section 2.1).

    A token's latent [rank] and its rotated key, which all heads share, are the values and the keys of the cache. Keys
    and values of the heads are made of them when they are read.
    """

    def __init__(self, parts: Parts, layer: int):
        config, latent = parts.config, parts.config.latent
        assert latent is not None
        self.config, self.latent, self.rope = config, latent, config.rope_of(layer)
        queries = config.heads * config.head
        if latent.query_rank is None:
            self.q_proj = parts.linear(config.width, queries)
        else:
            self.q_a_proj = parts.linear(config.width, latent.query_rank, config.qkv_bias)
            self.q_a_layernorm = parts.norm(latent.query_rank, EPSILON)
            self.q_b_proj = parts.linear(latent.query_rank, queries)
        self.kv_a_proj_with_mqa = parts.linear(config.width, latent.rank + latent.rotated, config.qkv_bias)
        self.kv_a_layernorm = parts.norm(latent.rank, EPSILON)
        self.kv_b_proj = parts.linear(latent.rank, config.heads * (latent.plain + latent.value))
        self.o_proj = parts.linear(config.heads * latent.value, config.width, config.out_bias)

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
        """Attends from each token to those before it; see `Attention`."""
        latent, (batch, time, _) = self.latent, x.shape
        q = self._queries(x).reshape(batch, time, self.config.heads, self.config.head)
        plain, turned = jnp.split(q, [latent.plain], axis=-1)
        q = jnp.concatenate([plain, self.rope.apply(turned, tables)], axis=-1)
        values, keys = jnp.split(self.kv_a_proj_with_mqa(x), [latent.rank], axis=-1)
        values, keys = self.kv_a_layernorm(values)[:, :, None], self.rope.apply(keys[:, :, None], tables)
        if cache is None:
            seen = LayerCache(jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2))
        else:
            cache = cache.written(keys, values, starts)
            seen = cache if span is None else cache.first(span)
        y = attended(q, self._heads_of(seen, x.dtype), positions, None, config=self.config)
        return self.o_proj(y.reshape(batch, time, -1).astype(x.dtype)), cache

    def _queries(self, x: jax.Array) -> jax.Array:
        """[batch, time, heads * head]."""
        if self.latent.query_rank is None:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))

    def _heads_of(self, seen: LayerCache, dtype: jnp.dtype) -> LayerCache:
        """The keys and values of the heads, of the latents that a cache has."""
        latent, heads = self.latent, self.config.heads
        keys, latents = (
            (codes if scales is None else codes.astype(jnp.float32) * scales[..., None]).astype(dtype)[:, 0]
            for codes, scales in ((seen.keys, seen.key_scales), (seen.values, seen.value_scales))
        )
        batch, places, _ = latents.shape
        made = self.kv_b_proj(latents).reshape(batch, places, heads, -1)
        plain, values = jnp.split(jnp.swapaxes(made, 1, 2), [latent.plain], axis=-1)
        shared = jnp.broadcast_to(keys[:, None], (batch, heads, places, latent.rotated))
        return LayerCache(jnp.concatenate([plain, shared], axis=-1), values)
