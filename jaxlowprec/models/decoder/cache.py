"""Keys and values of the tokens that a decoder has seen, kept for the next ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlowprec.models.decoder.config import DecoderConfig
from jaxlowprec.ops.kv_cache import KVCache, is_static, static_codes
from jaxlowprec.ops.quantize.api import quantize

KEPT_AS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
"""The types whose bits a cache keeps as integers. XLA's CPU compiler updates an array of small floats in a wider type,
and so copies all of it for each token; it updates integers in place."""
UNROLLED = 8
"""The largest batch whose updates are compiled one by one."""


class TokenPlaces(NamedTuple):
    """Where the tokens of a pass stand in their sequences.

    Attributes:
        starts: int32 [batch], the place of each sequence's first token; None: 0.
        span: no token is at this place or a later one; None: they may be anywhere.
        counts: int32 [batch], how many of each sequence's tokens are more than padding, which is at its end; None: all.
            Only a `RingCache` needs it.
    """

    starts: jax.Array | None = None
    span: int | None = None
    counts: jax.Array | None = None


FROM_THE_START = TokenPlaces()
"""Tokens that are the first of their sequences."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer's part: place s of sequence b is at [b, :, s].

    Attributes:
        keys, values: [batch, key_heads, places, features], see `DecoderConfig.cached`. Numbers of a type of `KEPT_AS`
            are kept as such integers.
        key_scales, value_scales: of 8-bit types, float32 [batch, key_heads, places]: a row, which is one token's in one
            head, is its codes times its scale. None of others, and while scales are static, which the decoder has.
        kept: what keys and values are kept as; None: they are numbers, not quantised.
    """

    keys: jax.Array
    values: jax.Array
    key_scales: jax.Array | None = None
    value_scales: jax.Array | None = None
    kept: KVCache | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def numbers(self) -> LayerCache:
        """The cache with keys and values as numbers of their dtype instead of bits."""
        if self.kept is None:
            return self
        keys = _in_dtype(self.keys, dtype_of(self.kept.key))
        values = _in_dtype(self.values, dtype_of(self.kept.value))
        return dataclasses.replace(self, keys=keys, values=values, kept=None)

    def written(
        self, k: jax.Array, v: jax.Array, starts: jax.Array | None, static: Mapping[str, jax.Array] | None = None
    ) -> LayerCache:
        """The cache with k and v [batch, time, key_heads, head] at the places that begin at `starts` [batch], or 0.

        `static`: see `coded`.
        """
        coded = self.coded(k, v, static).items()
        new: Any = {name: put(getattr(self, name), rows, starts) for name, rows in coded}
        return dataclasses.replace(self, **new)

    def coded(self, k: jax.Array, v: jax.Array, static: Mapping[str, jax.Array] | None) -> dict[str, Any]:
        """The fields that keep k and v [batch, time, key_heads, head], as [batch, key_heads, time, ...].

        `static`: "key" and "value", where their formats have static scales, float32 [1 or key_heads].
        """
        new: dict[str, Any] = {}
        for name, rows in (("key", k), ("value", v)):
            rows, held = jnp.swapaxes(rows, 1, 2), getattr(self, f"{name}s")
            fmt: Any = getattr(self.kept, name)
            if isinstance(fmt, str):
                rows = rows.astype(fmt)
            elif static and name in static:
                rows = static_codes(rows.astype(jnp.float32), static[name][:, None, None])
            else:
                q = quantize(rows, fmt)
                rows = q.data
                new[f"{name}_scales"] = q.scale[..., 0]
            new[f"{name}s"] = _in_dtype(rows, held.dtype)
        return new

    @property
    def without_table(self) -> LayerCache:
        """The cache as `Cache.layers` has it: a table that all layers share is held once."""
        return self

    def first(self, span: int) -> LayerCache:
        """The first so many places of each sequence."""
        return jax.tree.map(lambda array: array[:, :, :span], self)

    def extended(
        self, k: jax.Array, v: jax.Array, at: TokenPlaces, static: Mapping[str, jax.Array] | None = None
    ) -> tuple[LayerCache, LayerCache, jax.Array | None]:
        """Adds tokens, and says what they may attend to.

        Arguments:
            k, v, static: see `written`.
            at: where the tokens stand.

        Returns:
            The cache with the tokens; what they attend to; and of each of its rows the place, int32 [batch, rows], a
            negative one for a row without a token. None: row s is place s.
        """
        cache = self.written(k, v, at.starts, static)  # padding is overwritten before it is seen
        return cache, (cache if at.span is None else cache.first(at.span)).numbers.scaled(static), None

    def scaled(self, static: Mapping[str, jax.Array] | None) -> LayerCache:
        """The cache with static scales, the same at all places, as those of its rows."""
        rows: Any = {f"{name}_scales": scale[None, :, None] for name, scale in (static or {}).items()}
        return dataclasses.replace(self, **rows)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RingCache(LayerCache):
    """The part of a layer with a sliding window: as many rows as the window has, and place p is in row p mod rows.

    A token overwrites the one that has just left its window. Attention adds up the same terms as with a `LayerCache`,
    which adds exact zeros for the others, in another order. Two orders of a float32 sum of n terms x differ by at most
    2 n u / (1 - n u) sum |x|, u = 2^-24: n is a head's features for a score, and the window for the sum of the softmax
    and for that of values.
    """

    def extended(
        self, k: jax.Array, v: jax.Array, at: TokenPlaces, static: Mapping[str, jax.Array] | None = None
    ) -> tuple[LayerCache, LayerCache, jax.Array | None]:
        """See `LayerCache`. Several tokens attend to the rows that were there, and to each other."""
        (batch, time), rows = k.shape[:2], self.keys.shape[2]
        begin = jnp.zeros(batch, jnp.int32) if at.starts is None else at.starts
        if time == 1 and at.counts is None:
            ring = self.written(k, v, begin % rows, static)
            return ring, ring.numbers.scaled(static), latest(begin, rows)
        empty = jax.tree.map(lambda array: jnp.zeros((*array.shape[:2], time, *array.shape[3:]), array.dtype), self)
        new = empty.written(k, v, None, static)
        places = latest(begin + (time if at.counts is None else at.counts) - 1, rows)
        from_new = places - begin[:, None]

        def kept(old: jax.Array, fresh: jax.Array) -> jax.Array:
            index = from_new.reshape(batch, 1, rows, *(1,) * (old.ndim - 3))
            return jnp.where(index >= 0, jnp.take_along_axis(fresh, jnp.maximum(index, 0), axis=2), old)

        ring = jax.tree.map(kept, self, new)
        if at.starts is None:
            return ring, new.numbers.scaled(static), None
        seen = jax.tree.map(lambda old, fresh: jnp.concatenate([old, fresh], axis=2), self, new)
        fresh_places = begin[:, None] + jnp.arange(time, dtype=jnp.int32)
        return ring, seen.numbers.scaled(static), jnp.concatenate([latest(begin - 1, rows), fresh_places], axis=1)


def latest(last: jax.Array, rows: int) -> jax.Array:
    """The place in each row of a ring, int32 [batch, rows], if the last token is at place `last` [batch].

    >>> latest(jnp.asarray([1, 4]), 3).tolist()
    [[0, 1, -1], [3, 4, 2]]
    """
    return last[:, None] - (last[:, None] - jnp.arange(rows, dtype=jnp.int32)) % rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The layers' parts.

    Attributes:
        layers: of each layer.
        lengths: int32 [batch], how many places of each sequence are in use.
        places: the number of places of each sequence.
        table: of a `PagedCache` in each layer, int32 [batch, blocks]; None: layers are of another kind.
    """

    layers: tuple[LayerCache, ...]
    lengths: jax.Array
    places: int = dataclasses.field(metadata={"static": True})
    table: jax.Array | None = None

    @classmethod
    def empty(
        cls,
        config: DecoderConfig,
        batch: int,
        places: int,
        kept: KVCache | str,
        *,
        rings: bool = True,
        held: int | None = None,
    ) -> Cache:
        """A cache for sequences of up to so many tokens.

        Arguments:
            kept: what keys and values are kept as, or one of `CACHES`.
            rings: whether layers with a window keep only as many places as it has.
            held: how many places there is memory for; None: all.
        """
        kept = KVCache.of("Cache", kept)
        formats = kept.key, kept.value
        dtypes = [dtype_of(fmt) for fmt in formats]

        def layer(window: int | None) -> LayerCache:
            ring = rings and window is not None and window < places
            rows = window if ring else held or places
            shapes = [(batch, heads, rows, features) for heads, features in config.cached]
            codes = [jnp.zeros(s, KEPT_AS.get(d.name, d)) for s, d in zip(shapes, dtypes, strict=True)]
            scales = [
                None if isinstance(fmt, str) or is_static(fmt) else jnp.zeros(shape[:-1], jnp.float32)
                for shape, fmt in zip(shapes, formats, strict=True)
            ]
            kind: Any = RingCache if ring else LayerCache
            return kind(*codes, *scales, kept=kept)

        return cls(tuple(layer(window) for window in config.windows), jnp.zeros(batch, jnp.int32), places)

    def layer(self, number: int) -> LayerCache:
        """A layer's part, with the table of all layers if there is one."""
        layer: Any = self.layers[number]
        return layer if self.table is None else dataclasses.replace(layer, table=self.table)

    @property
    def nbytes(self) -> int:
        """The bytes of keys, values and scales."""
        return sum(array.nbytes for array in jax.tree.leaves(self.layers))


def dtype_of(fmt: Any) -> jnp.dtype:
    """The dtype of keys or values in a format of `KVCache`."""
    return jnp.dtype(fmt if isinstance(fmt, str) else fmt.data_dtype)


def _in_dtype(array: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The array's bits as numbers of a dtype of the same width."""
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)


def put(held: jax.Array, new: jax.Array, starts: jax.Array | None, rows: jax.Array | None = None) -> jax.Array:
    """The array [batch, heads, places, ...] with `new` [batch, heads, time, ...] written at its places.

    One update for each sequence: XLA does these in place, a scatter's loop is slower. Many are a loop, because 256
    updates in a row take a minute to compile.

    Arguments:
        rows: the row of `held` that each sequence is written to; None: its own number.
    """
    rest = (0,) * (held.ndim - 3)
    if starts is None:
        return jax.lax.dynamic_update_slice(held, new, (0, 0, 0, *rest))

    def at(b: Any, held: jax.Array) -> jax.Array:
        row = jax.lax.dynamic_slice_in_dim(new, b, 1)
        return jax.lax.dynamic_update_slice(held, row, (b if rows is None else rows[b], 0, starts[b], *rest))

    return jax.lax.fori_loop(0, len(new), at, held, unroll=len(new) <= UNROLLED)
