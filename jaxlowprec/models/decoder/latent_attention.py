"""Multi-head latent attention, whose keys and values are made of a narrow latent that the cache keeps."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxlowprec.models.decoder.attention import Attention
from jaxlowprec.models.decoder.cache import LayerCache
from jaxlowprec.models.decoder.configs.options import Latent
from jaxlowprec.models.decoder.parts import Parts

EPSILON = 1e-6
"""Of the latents' norms, whatever the config says of the others."""


class LatentAttention(Attention):
    """Latent attention of one layer, as in DeepSeek V2 and V3 (arXiv 2405.04434, section 2.1).

    A token's latent [rank] and its rotated key, which all heads share, are the values and the keys of the cache. Keys
    and values of the heads are made of them when they are read.
    """

    def _make(self, parts: Parts) -> None:
        config, latent = parts.config, self._latent
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

    @property
    def _latent(self) -> Latent:
        assert self.config.latent is not None
        return self.config.latent

    def _projected(self, x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, the rotated keys [batch, time, 1, rotated], and the latents [batch, time, 1, rank]."""
        config, latent = self.config, self._latent
        q = self.q_proj(x) if latent.query_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        plain, turned = jnp.split(q.reshape(*x.shape[:2], config.heads, config.head), [latent.plain], axis=-1)
        q = jnp.concatenate([plain, self.rope.apply(turned, tables)], axis=-1)
        latents, keys = jnp.split(self.kv_a_proj_with_mqa(x)[:, :, None], [latent.rank], axis=-1)
        return q, self.rope.apply(keys, tables), self.kv_a_layernorm(latents)

    def _read(self, seen: LayerCache, dtype: jnp.dtype) -> LayerCache:
        """The keys and values of the heads, of the latents that a cache has."""
        latent, heads = self._latent, self.config.heads
        keys, latents = (
            (codes if scales is None else codes.astype(jnp.float32) * scales[..., None]).astype(dtype)[:, 0]
            for codes, scales in ((seen.keys, seen.key_scales), (seen.values, seen.value_scales))
        )
        batch, places, _ = latents.shape
        made = self.kv_b_proj(latents).reshape(batch, places, heads, -1)
        plain, values = jnp.split(jnp.swapaxes(made, 1, 2), [latent.plain], axis=-1)
        shared = jnp.broadcast_to(keys[:, None], (batch, heads, places, latent.rotated))
        return LayerCache(jnp.concatenate([plain, shared], axis=-1), values)
