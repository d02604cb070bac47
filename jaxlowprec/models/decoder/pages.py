"""A cache in blocks of tokens: sequences that continue one prompt share the blocks of its tokens.

    pool     [blocks, key_heads, block_size, features]     of a layer; the blocks of prompts, then those of sequences
    table    int32 [batch, blocks of a sequence]           the same for all layers: place p is in block p // block_size

A prompt's whole blocks are held once. Its last tokens, which fill a part of a block, are copied for each sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.models.decoder.cache import Cache, LayerCache, TokenPlaces, put


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache(LayerCache):
    """One layer's pool, and the table of all layers.

    Attributes:
        keys, values: [blocks, key_heads, block_size, features].
        key_scales, value_scales: of 8-bit types, float32 [blocks, key_heads, block_size].
        table: int32 [batch, blocks of a sequence].
    """

    table: jax.Array | None = None

    @property
    def without_table(self) -> LayerCache:
        """See `LayerCache`."""
        return dataclasses.replace(self, table=None)

    def extended(
        self, k: jax.Array, v: jax.Array, at: TokenPlaces, static: Mapping[str, jax.Array] | None = None
    ) -> tuple[LayerCache, LayerCache, jax.Array | None]:
        """See `LayerCache`: for one token of each sequence."""
        starts, span, _ = at
        assert self.table is not None and starts is not None and k.shape[1] == 1
        size = self.keys.shape[2]
        block = jnp.take_along_axis(self.table, starts[:, None] // size, axis=1)[:, 0]
        coded = self.coded(k, v, static).items()
        new: Any = {name: put(getattr(self, name), rows, starts % size, block) for name, rows in coded}
        cache = dataclasses.replace(self, **new)
        table = self.table if span is None else self.table[:, : -(-span // size)]

        def rows(pool: jax.Array) -> jax.Array:
            """[batch, key_heads, places, ...] of [blocks, key_heads, block_size, ...]."""
            found = jnp.moveaxis(pool[table], 2, 1)
            return found.reshape(*found.shape[:2], -1, *pool.shape[3:])[:, :, :span]

        fields: Any = {name: None if (pool := getattr(cache, name)) is None else rows(pool) for name in _ARRAYS}
        return cache, LayerCache(**fields, kept=self.kept).numbers.scaled(static), None


_ARRAYS = ("keys", "values", "key_scales", "value_scales")


class Plan(NamedTuple):
    """Where tokens are.

    Attributes:
        distinct: which of the prompts are computed: the first of those that are equal.
        origin: int32 [batch], the number of each sequence's prompt among these.
        shared: whole blocks that each of these has in the pool.
        own: blocks that each sequence has.
        first: int32 [batch], the block of a sequence that is the first of its own.
        table: int32 [batch, blocks]. Blocks beyond a sequence's last one stand for places that it does not attend to.
    """

    distinct: list[int]
    origin: np.ndarray
    shared: int
    own: int
    first: np.ndarray
    table: np.ndarray

    @classmethod
    def of(cls, prompts: Sequence[np.ndarray], count: int, size: int, span: int) -> Plan:
        """For prompts that are continued by `count` tokens, in blocks of `size`. Steps see up to `span` places.

        >>> plan = Plan.of([np.array([5, 6, 7]), np.array([5, 6, 7])], 2, 2, 6)
        >>> plan.distinct, plan.table.tolist()
        ([0], [[0, 1, 2], [0, 3, 4]])
        """
        numbers: dict[bytes, int] = {}
        distinct: list[int] = []
        origin = np.zeros(len(prompts), np.int32)
        for b, prompt in enumerate(prompts):
            key = prompt.astype(np.int64).tobytes()
            if key not in numbers:
                numbers[key] = len(distinct)
                distinct.append(b)
            origin[b] = numbers[key]
        lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
        first, blocks = lengths // size, -(-(lengths + count) // size)
        shared, own = int(first.max()), int((blocks - first).max())
        place, sequence = np.arange(-(-span // size)), np.arange(len(prompts))[:, None]
        of_own = len(distinct) * shared + sequence * own + np.clip(place - first[:, None], 0, own - 1)
        table = np.where(place < first[:, None], origin[:, None] * shared + place, of_own)
        return cls(distinct, origin, shared, own, first, table.astype(np.int32))


def paged(
    cache: Cache, origin: jax.Array, first: jax.Array, table: jax.Array, *, size: int, shared: int, own: int
) -> Cache:
    """The cache of distinct prompts in blocks, for all sequences; see `Plan`."""

    def pool(held: jax.Array) -> jax.Array:
        spare = max(0, (shared + 1) * size - held.shape[2])
        held = jnp.pad(held, [(0, 0), (0, 0), (0, spare), *[(0, 0)] * (held.ndim - 3)])
        whole = held[:, :, : shared * size]
        whole = whole.reshape(*held.shape[:2], shared, size, *held.shape[3:])
        blocks = jnp.moveaxis(whole, 2, 1).reshape(-1, held.shape[1], size, *held.shape[3:])
        last = jax.vmap(lambda p, at: jax.lax.dynamic_slice_in_dim(held[p], at * size, size, axis=1))(origin, first)
        room = jnp.zeros((len(last), own - 1, *last.shape[1:]), held.dtype)
        mine = jnp.concatenate([last[:, None], room], axis=1).reshape(-1, *last.shape[1:])
        return jnp.concatenate([blocks, mine])

    layers = tuple(
        PagedCache(**{n: jax.tree.map(pool, getattr(layer, n)) for n in _ARRAYS}, kept=layer.kept)
        for layer in cache.layers
    )
    return dataclasses.replace(cache, layers=layers, lengths=cache.lengths[origin], table=table)
