"""The kinds of sums over devices, for the products whose contraction axis a mesh splits."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxlowprec.ops.quantize.random_bits import words_at
from jaxlowprec.ops.sums import quantized
from jaxlowprec.ops.sums.quantized import FURTHER_SUMS, own_words, stochastic_bfloat16
from jaxlowprec.wiring import IN_THEIR_DTYPE, Adder, Partials

SumKind = Literal["float32", "bfloat16", "bfloat16_stochastic", "quantized"]
KINDS: tuple[SumKind, ...] = ("float32", "bfloat16", "bfloat16_stochastic", "quantized")


def draws(kind: SumKind) -> bool:
    """Whether a kind of sum takes random bits."""
    return kind in ("bfloat16_stochastic", "quantized")


class SumOverDevices(NamedTuple):
    """The sum of a product's partial results over devices.

    Attributes:
        kind: of the sums.
        words: uint32 [2] or [*batch, 2], if they draw.
    """

    kind: SumKind
    words: jax.Array | None = None

    def operands(self, batch: tuple[int, ...]) -> list[jax.Array]:
        """The op's operands for random bits; `batch`: its batch axes."""
        return [] if self.words is None else [jnp.broadcast_to(self.words, (*batch, 2))]


IN_FLOAT32 = SumOverDevices("float32")


@functools.cache
def adder_of(kind: SumKind) -> Adder:
    """The `adder` of `wiring.define` for a kind; partial results are float32."""
    return IN_THEIR_DTYPE if kind == "float32" else _RoundingAdder(kind)


@dataclasses.dataclass(frozen=True)
class _RoundingAdder:
    kind: SumKind

    @property
    def drawn(self) -> bool:
        return draws(self.kind)

    def add_up(self, partial: jax.Array, where: Partials, words: jax.Array | None) -> jax.Array:
        if words is not None:
            words = words.reshape(-1, 2)[0]
        if self.kind == "quantized":
            assert words is not None
            return _one_after_the_other(partial, where, words)
        if words is not None:
            axes = (*(a for axes in where.scattered.values() for a in axes), *where.reduced, *where.elsewhere)
            partial = stochastic_bfloat16(partial, own_words(words, axes))
        if not where.scattered and not where.reduced:
            return partial
        return IN_THEIR_DTYPE.add_up(partial.astype(jnp.bfloat16), where, None).astype(jnp.float32)


def _one_after_the_other(partial: jax.Array, where: Partials, words: jax.Array) -> jax.Array:
    """The sums over the devices of each scattered dimension, and then over all others, each in two stages."""
    sums: list[tuple[int | None, tuple[str, ...]]] = list(where.scattered.items())
    if where.reduced:
        sums.append((None, where.reduced))
    for number, (dim, axes) in enumerate(sums):
        others = (*(axis for _, further in sums[:number] + sums[number + 1 :] for axis in further), *where.elsewhere)
        drawn = words_at(words, number, stream=FURTHER_SUMS) if number else words
        if dim is None:
            partial = quantized.all_reduce(partial, axes, drawn, others)
        else:
            partial = quantized.reduce_scatter(partial, axes, dim, drawn, others)
    return partial
