"""The attention of a decoder, and the parts from which it makes its linears and norms."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.models.decoder.cache import FROM_THE_START, LayerCache, TokenPlaces
from jaxlowprec.models.decoder.config import DecoderConfig
from jaxlowprec.models.decoder.configs.options import Latent
from jaxlowprec.ops.kv_cache import KVCache

INIT = nnx.initializers.normal(0.02)

EPSILON = 1e-6
"""The epsilon of the latents' norms, whatever the config says of the others."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """Makes the parts of a decoder.

    Attributes:
        config: sizes and options.
        dtype, param_dtype: of activations and parameters.
        rngs: of the initial parameters.
    """

    config: DecoderConfig
    dtype: Any
    param_dtype: Any
    rngs: nnx.Rngs

    @property
    def dtypes(self) -> dict[str, Any]:
        """Arguments of every layer."""
        return {"dtype": self.dtype, "param_dtype": self.param_dtype, "rngs": self.rngs}

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of every layer with kernels."""
        return {**self.dtypes, "kernel_init": INIT}

    def linear(self, inputs: int, outputs: int, bias: bool = False, **more: Any) -> jlp.nnx.Linear:
        """A linear that follows the recipe, or holds a quantised kernel."""
        return jlp.nnx.Linear(inputs, outputs, use_bias=bias, **self.options, **more)

    def norm(self, features: int, epsilon: float | None = None) -> jlp.nnx.RMSNorm:
        """A norm with the config's epsilon, or its own."""
        epsilon = self.config.epsilon if epsilon is None else epsilon
        centred = self.config.zero_centered
        return jlp.nnx.RMSNorm(features, epsilon=epsilon, zero_centered_scale=centred, **self.dtypes)

    def parameter(self, *shape: int) -> nnx.Param:
        """A random parameter that no layer has."""
        return nnx.Param(INIT(self.rngs.params(), shape, self.param_dtype))


class Attention(nnx.Module):
    """Attention of one layer. Linears follow the recipe or hold quantised kernels; the rest is float32.

    `k_scale` and `v_scale` are `nnx.KVScale`s, or None before `kv.calibrate`.
    """

    def __init__(self, parts: Parts, layer: int):
        config = parts.config
        self.config, self.window, self.rope = config, config.windows[layer], config.rope_of(layer)
        self.name = f"layers.{layer}.self_attn"
        self.sinks = nnx.data(parts.parameter(config.heads) if config.sinks else None)
        self.k_scale, self.v_scale = nnx.data(None), nnx.data(None)
        self._make(parts)

    def _make(self, parts: Parts) -> None:
        """Makes the linears and their norms."""
        config = parts.config
        heads, keys = config.heads * config.head, config.key_heads * config.head
        self.q_proj = parts.linear(config.width, heads, config.qkv_bias)
        self.k_proj, self.v_proj = (parts.linear(config.width, keys, config.qkv_bias) for _ in range(2))
        self.o_proj = parts.linear(heads, config.width, config.out_bias)
        self.q_norm, self.k_norm = (nnx.data(parts.norm(config.head) if config.query_norm else None) for _ in range(2))

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        tables: tuple[jax.Array, jax.Array],
        cache: LayerCache | None = None,
        at: TokenPlaces = FROM_THE_START,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Attends from each token to those before it.

        Arguments:
            x: [batch, time, width].
            positions: int32 [batch, time], the tokens' places in their sequences.
            tables: of the rotary embedding, see `Rope.tables`.
            cache: the keys and values of earlier tokens. These tokens' are added to it. None: these tokens are all;
                their keys and values are read as the `kv_cache` of `autocast` keeps them.
            at: where the tokens stand in the cache.

        Returns:
            [batch, time, width], and the cache.
        """
        q, k, v = self._projected(x, tables)
        if cache is None:
            k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
            kept = jlp.current_kv_cache()
            if kept is not None:
                static = {f"{name[0]}_scale": scale[:, None, None] for name, scale in self.static(kept).items()}
                k, v = kept.as_kept(k, v, **static)
            seen, places = LayerCache(k, v), None
        else:
            static = {} if cache.kept is None else self.static(cache.kept)
            cache, seen, places = cache.extended(k, v, at, static)
        sinks = None if self.sinks is None else self.sinks[...]
        seen = self._read(seen, x.dtype)
        y = attended(q, seen, positions, self.window, config=self.config, places=places, sinks=sinks)
        return self.o_proj(y.reshape(*x.shape[:2], -1).astype(x.dtype)), cache

    def static(self, kept: KVCache) -> dict[str, jax.Array]:
        """The static scales that a cache needs, of "key" and "value", float32 [1 or key_heads].

        Raises:
            ValueError: a scale is missing.
        """
        found: dict[str, jax.Array] = {}
        for name in kept.static:
            scale = getattr(self, f"{name[0]}_scale")
            if scale is None:
                raise ValueError(
                    f"{self.name}: {kept} keeps {name}s by static scales, and this layer has none; run "
                    "jaxlowprec.kv.calibrate(decoder, tokens), or use a scale for each token and head: KVCache()"
                )
            found[name] = scale[...]
        return found

    def _projected(self, x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, and what the cache keeps as keys and values: [batch, time, heads, features]."""
        config, (batch, time, _) = self.config, x.shape
        q, k, v = jlp.nnx.linears(x, [self.q_proj, self.k_proj, self.v_proj])
        q = q.reshape(batch, time, config.heads, config.head)
        k, v = (y.reshape(batch, time, config.key_heads, config.head) for y in (k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.rope.apply(q, tables), self.rope.apply(k, tables), v

    def _read(self, seen: LayerCache, dtype: jnp.dtype) -> LayerCache:
        """The keys and values that queries attend to, of those that are kept."""
        return seen


def attended(
    q: jax.Array,
    seen: LayerCache,
    positions: jax.Array,
    window: int | None,
    *,
    config: DecoderConfig,
    places: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """The values that queries [batch, time, heads, head] at such places attend to: float32 [batch, time, heads, value].

    Products and softmax are float32. Scales of an 8-bit cache are applied to scores and probabilities.

    Arguments:
        window: the number of places that a token attends to, itself included; None: all.
        config: says what scores are multiplied by, and their limit.
        places: see `LayerCache.extended`.
        sinks: [heads], scores without values.
    """
    batch, time, heads, head = q.shape
    groups = heads // seen.keys.shape[1]
    q = q.reshape(batch, time, -1, groups, head).astype(jnp.float32) * config.score_scale
    scores = jnp.einsum("btkgd,bksd->bkgts", q, seen.keys.astype(jnp.float32))
    if seen.key_scales is not None:
        scores = scores * seen.key_scales[:, :, None, None]
    scores = capped(scores, config.score_cap)
    rows = jnp.arange(seen.keys.shape[2]) if places is None else places[:, None]
    here = positions[:, :, None]
    visible = rows <= here if places is None else (rows <= here) & (rows >= 0)
    if window is not None:
        visible &= rows > here - window
    weights = shares(jnp.where(visible[:, None, None], scores, -jnp.inf), sinks)
    if seen.value_scales is not None:
        weights = weights * seen.value_scales[:, :, None, None]
    y = jnp.einsum("bkgts,bksd->btkgd", weights, seen.values.astype(jnp.float32))
    return y.reshape(batch, time, heads, -1)


def shares(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """The softmax of scores [batch, key_heads, groups, time, places], and of a sink of each head, which is left out."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sinks = sinks.astype(jnp.float32).reshape(*scores.shape[1:3], 1, 1)
    column = jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]


def capped(x: jax.Array, cap: float | None) -> jax.Array:
    """cap tanh(x / cap), or x without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


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
