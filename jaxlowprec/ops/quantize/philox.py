"""Philox4x32-10 in pure JAX: the random bytes of stochastic rounding (numerics.md 4; Salmon et al., SC 2011)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def _multiply_wide(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    """The high and the low 32 bits of a * b, by 16-bit halves: there are no 64-bit integers by default."""
    a_low, a_high = a & 0xFFFF, a >> 16
    b_low, b_high = jnp.uint32(b & 0xFFFF), jnp.uint32(b >> 16)
    middle = a_high * b_low + ((a_low * b_low) >> 16)
    carry = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (carry >> 16), a * jnp.uint32(b)


Words = tuple[Any, ...]
"""uint32 arrays, of JAX or of NumPy, whose shapes broadcast."""


def _round(_: int, state: tuple[Words, Words]) -> tuple[Words, Words]:
    """The counter and the key after one round."""
    (c0, c1, c2, c3), (k0, k1) = state
    high0, low0 = _multiply_wide(c0, _MULTIPLIERS[0])
    high1, low1 = _multiply_wide(c2, _MULTIPLIERS[1])
    counter = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return counter, (k0 + jnp.uint32(_KEY_STEPS[0]), k1 + jnp.uint32(_KEY_STEPS[1]))


def _ten_rounds(counter: Words, key: Words, unroll: int = 1) -> Words:
    return jax.lax.fori_loop(0, 10, _round, (counter, key), unroll=unroll)[0]


def philox4x32(counter: Words, key: Words) -> Words:
    """Ten rounds on four counter words with a key of two.

    On a CPU they are a loop: it compiles several times faster than its rounds one after the other, and XLA would fuse
    those into a kernel that computes most of them again and again. On a GPU each round of a loop would be a kernel.
    """
    nothing = functools.reduce(jnp.bitwise_or, (*counter, *key)) & 0  # shaped, sharded and varying as the results are
    counter = tuple(c | nothing for c in counter)
    unrolled = functools.partial(_ten_rounds, unroll=10)
    return jax.lax.platform_dependent(counter, key, cpu=_ten_rounds, default=unrolled)


def words_at(
    words: jax.Array | np.ndarray,
    first: jax.Array | np.ndarray | int = 0,
    second: jax.Array | np.ndarray | int = 0,
    third: jax.Array | np.ndarray | int = 0,
    *,
    stream: int,
) -> jax.Array:
    """Two further words that follow from those of a key: uint32 [..., 2].

    Arguments:
        words: uint32 [..., 2].
        first, second, third: uint32, numbers that tell the results apart; their shapes and that of the keys broadcast.
        stream: one for each purpose, for the same reason.
    """
    counter = (first, second, third, stream)
    return _two_words(words, tuple(np.uint32(c) if isinstance(c, int) else c for c in counter))


@jax.jit
def _two_words(words: Any, counter: Words) -> jax.Array:
    return jnp.stack(philox4x32(counter, (words[..., 0], words[..., 1]))[:2], axis=-1)


class Draws(NamedTuple):
    """What the random bits of an array [..., R, C] depend on.

    Attributes:
        words: uint32 [..., 2], of a key.
        lines: uint32 [R], or [..., R]: the rows' indices in the whole array.
        sixteens: uint32 [ceil(C/16)], or with `...`: the indices in the whole array of each 16 elements of a row.
        stream: 0 where rows are quantised, 1 where columns are; for bits of block scales 2 and 3.
    """

    words: jax.Array
    lines: jax.Array
    sixteens: jax.Array
    stream: int


def random_words_of(draws: Draws) -> jax.Array:
    """uint32 [..., R, ceil(C/16), 4]: the words of one call for each row and sixteen."""
    words, lines, sixteens, stream = draws
    key = (words[..., 0, None, None], words[..., 1, None, None])
    counter = (sixteens[..., None, :], lines[..., :, None], np.uint32(stream), np.uint32(0))
    return jnp.stack(philox4x32(counter, key), axis=-1)


def random_bytes(draws: Draws) -> jax.Array:
    """uint8 [..., R, ceil(C/16), 16]."""
    words = random_words_of(draws)
    shifts = jnp.arange(0, 32, 8, dtype=jnp.uint32)
    return (words[..., None] >> shifts).astype(jnp.uint8).reshape(*words.shape[:-1], 16)
