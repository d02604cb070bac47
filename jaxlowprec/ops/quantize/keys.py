"""Keys of stochastic rounding: two uint32 words for each slice of the batch axes."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.arguments import as_array, shown
from jaxlowprec.ops.quantize.philox import words_at
from jaxlowprec.ops.rounding import magnitude_bits

_STREAM_OF_LONGER_KEYS = 13
_KEYLESS = np.asarray((0x6A6C7021, 0x6E766634), np.uint32)


def random_words(who: str, rounding: str, key: Any, batch: tuple[int, ...]) -> jax.Array | None:
    """The two uint32 words of `key=` for each slice of the batch axes, or None for nearest rounding.

    `rounding` is checked: "nearest", "stochastic" or "eden".
    """
    if rounding == "nearest":
        if key is not None:
            raise ValueError(f'{who}: a key was given but rounding is "nearest"; pass rounding="stochastic" or no key')
        return None
    if key is None:
        raise ValueError(f'{who}: rounding="{rounding}" needs key=, such as jax.random.key(0)')
    return key_words(who, key, batch)


def check_key(who: str, key: Any, argument: str = "key") -> None:
    """Raises TypeError unless it is an array, as keys are, or None."""
    if key is not None and not isinstance(key, jax.Array | np.ndarray):
        raise TypeError(f"{who}: {argument}={shown(key)}; needs a JAX key such as jax.random.key(0)")


def key_words(who: str, key: Any, batch: tuple[int, ...], argument: str = "key") -> jax.Array:
    """The two uint32 words of a key, or of one key per slice, as [*batch, 2]. `argument`: what it was given as.

    Keys of JAX's other generators, such as "rbg" and "unsafe_rbg", have four: two are made of them (numerics.md 4).
    """
    check_key(who, key, argument)
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    words = jax.random.key_data(key) if typed else as_array(key)
    if words.dtype == jnp.uint32 and words.shape[-1:] == (4,):
        words = words_at(words[..., :2], words[..., 2], words[..., 3], stream=_STREAM_OF_LONGER_KEYS)
    if words.dtype != jnp.uint32 or words.shape[-1:] != (2,) or words.shape[:-1] not in ((), batch):
        raise TypeError(
            f"{who}: {argument} has dtype {key.dtype} and shape {key.shape}; needs one JAX key, or one for each slice "
            f"of the batch axes {batch}"
        )
    return jnp.broadcast_to(words, (*batch, 2))


def slice_words(words: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Words for each slice of the batch axes: one key would give all of them the same bits."""
    if not batch:
        return words
    index = jnp.arange(math.prod(batch), dtype=jnp.uint32)
    return words_at(words, index, stream=1).reshape(*batch, 2)


def further_words(words: jax.Array, stream: int = 3) -> jax.Array:
    """Other words [..., 2] that follow from those of a key: two operands of one GEMM must not share their bits.

    `stream`: 3 for the input, 4 for the weight, 9 to 11 for the sums of fprop, dgrad and wgrad.
    """
    return words_at(words, stream=stream)


class Randomness(NamedTuple):
    """The source of the random bits of a product's operands, for their rounding or for the signs of their rotation:
    exactly one of the two.

    Attributes:
        words: of a key, uint32 [..., 2]; see `slice_words`.
        seed: uint32 [], see `keyless_seed`, for bits that come from the operand itself.
    """

    words: jax.Array | None = None
    seed: jax.Array | np.ndarray | None = None

    def words_for(self, amax: Callable[[], jax.Array]) -> jax.Array:
        """The two words of each slice of the tensor; its amax is asked for only if there is no key."""
        if self.words is not None:
            return self.words
        assert self.seed is not None
        return keyless_words(amax(), self.seed)

    def words_of_input(self, amax: Callable[[], jax.Array]) -> jax.Array:
        """The same of the input; without a key they are the same for all products that read it."""
        return keyless_words(amax(), np.zeros((), np.uint32)) if self.words is None else further_words(self.words)


def keyless_seed(rows: int, columns: int, name: str) -> np.ndarray:
    """uint32 [], of a tensor's shape and its layer's name.

    It is an operand of the traced function and not a static argument: layers that differ only in their names are traced
    once.
    """
    return np.asarray(zlib.crc32(repr(((rows, columns), name)).encode()), np.uint32)


def keyless_words(amax: jax.Array, seed: jax.Array | np.ndarray) -> jax.Array:
    """A 64-bit mix of the bits of a tensor's amax [...] and a seed, for each slice: [..., 2]."""
    bits = magnitude_bits(amax)
    index = jnp.arange(bits.size, dtype=jnp.uint32).reshape(bits.shape)
    return words_at(_KEYLESS, bits, seed, index, stream=2)
