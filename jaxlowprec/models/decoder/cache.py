"""Keys and values of the tokens that a decoder has seen, kept for the next ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.models.decoder.config import DecoderConfig

EIGHT_BITS = {"float8_e4m3fn": 448.0, "int8": 127.0}
"""The 8-bit types of a cache, and the largest number that a row is scaled to."""
UNROLLED = 8
"""The largest batch whose updates are compiled one by one."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer's part: place s of sequence b is at [b, :, s].

    Attributes:
        keys, values: [batch, key_heads, places, features], see `DecoderConfig.cached`.
        key_scales, value_scales: of 8-bit types, float32 [batch, key_heads, places]: a row, which is one token's in one
            head, is its codes times its scale. None of others.
    """

    keys: jax.Array
    values: jax.Array
    key_scales: jax.Array | None = None
    value_scales: jax.Array | None = None

    def written(self, k: jax.Array, v: jax.Array, starts: jax.Array | None) -> LayerCache:
        """The cache with k and v [batch, time, key_heads, head] at the places that begin at `starts` [batch], or 0."""
        new = {}
        for name, rows in (("key", k), ("value", v)):
            rows, held = jnp.swapaxes(rows, 1, 2), getattr(self, f"{name}s")
            if held.dtype.name in EIGHT_BITS:
                rows, scales = in_8_bits(rows, held.dtype)
                new[f"{name}_scales"] = _put(getattr(self, f"{name}_scales"), scales, starts)
            new[f"{name}s"] = _put(held, rows.astype(held.dtype), starts)
        return LayerCache(**new)

    def first(self, span: int) -> LayerCache:
        """The first so many places of each sequence."""
        return jax.tree.map(lambda array: array[:, :, :span], self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The layers' parts, and how many places of each sequence are in use: int32 [batch]."""

    layers: tuple[LayerCache, ...]
    lengths: jax.Array

    @classmethod
    def empty(cls, config: DecoderConfig, batch: int, places: int, dtype: Any) -> Cache:
        """A cache for sequences of up to so many tokens.

        Arguments:
            dtype: of keys and values: float32, bfloat16, or a type of `EIGHT_BITS`.
        """
        dtype = jnp.dtype(dtype)
        shapes = [(batch, heads, places, features) for heads, features in config.cached]
        small = dtype.name in EIGHT_BITS

        def layer() -> LayerCache:
            rows = [jnp.zeros(shape, dtype) for shape in shapes]
            return LayerCache(*rows, *(jnp.zeros(shape[:-1], jnp.float32) if small else None for shape in shapes))

        return cls(tuple(layer() for _ in range(config.layers)), jnp.zeros(batch, jnp.int32))

    @property
    def places(self) -> int:
        """The number of places of each sequence."""
        return self.layers[0].keys.shape[2]


def in_8_bits(rows: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Rows [..., head] as codes of an 8-bit type and scales [...]: a row's largest magnitude is the type's largest."""
    dtype = jnp.dtype(dtype)
    rows = rows.astype(jnp.float32)
    scales = jnp.max(jnp.abs(rows), axis=-1) / EIGHT_BITS[dtype.name]
    scaled = rows / jnp.where(scales > 0, scales, 1.0)[..., None]
    return (jnp.rint(scaled) if dtype == jnp.int8 else scaled).astype(dtype), scales


def _put(held: jax.Array, new: jax.Array, starts: jax.Array | None) -> jax.Array:
    """The array [batch, heads, places, ...] with `new` [batch, heads, time, ...] written at its places.

    One update for each sequence: XLA does these in place, a scatter's loop is slower. Many are a loop, because 256
    updates in a row take a minute to compile.
    """
    rest = (0,) * (held.ndim - 3)
    if starts is None:
        return jax.lax.dynamic_update_slice(held, new, (0, 0, 0, *rest))

    def put(b: Any, held: jax.Array) -> jax.Array:
        row = jax.lax.dynamic_slice_in_dim(new, b, 1)
        return jax.lax.dynamic_update_slice(held, row, (b, 0, starts[b], *rest))

    return jax.lax.fori_loop(0, held.shape[0], put, held, unroll=held.shape[0] <= UNROLLED)
