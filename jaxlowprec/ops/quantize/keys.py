"""Keys of stochastic rounding: two uint32 words for each slice of the batch axes."""

from __future__ import annotations

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.arguments import shown
from jaxlowprec.ops.quantize.philox import philox4x32
from jaxlowprec.ops.rounding import magnitude_bits


def random_words(who: str, rounding: str, key: Any, batch: tuple[int, ...]) -> jax.Array | None:
    """The two uint32 words of `key=` for each slice of the batch axes, or None for nearest rounding."""
    if rounding == "nearest":
        if key is not None:
            raise ValueError(f'{who}: a key was given but rounding is "nearest"; pass rounding="stochastic" or no key')
        return None
    if rounding != "stochastic":
        raise ValueError(f'{who}: rounding={shown(rounding)}; needs "nearest" or "stochastic"')
    if key is None:
        raise ValueError(f'{who}: rounding="stochastic" needs key=, such as jax.random.key(0)')
    return key_words(who, key, batch)


def check_key(who: str, key: Any) -> None:
    """Raises TypeError unless it is an array, as keys are, or None."""
    if key is not None and not isinstance(key, jax.Array | np.ndarray):
        raise TypeError(f"{who}: key={shown(key)}; needs a JAX key such as jax.random.key(0)")


def key_words(who: str, key: Any, batch: tuple[int, ...]) -> jax.Array:
    """The two uint32 words of a key, or of one key for each slice, as [*batch, 2]."""
    check_key(who, key)
    words = key
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        words = jax.random.key_data(key)
        if words.shape[-1] != 2:
            raise TypeError(
                f"{who}: key is of the kind {jax.random.key_impl(key)!r} with {words.shape[-1]} words; stochastic "
                'rounding needs the two of jax.random.key(seed, impl="threefry2x32")'
            )
    if words.dtype != jnp.uint32 or words.shape[-1:] != (2,) or words.shape[:-1] not in ((), batch):
        raise TypeError(
            f"{who}: key has dtype {key.dtype} and shape {key.shape}; needs one JAX key, or one for each slice of the "
            f"batch axes {batch}"
        )
    return jnp.broadcast_to(words, (*batch, 2))


def slice_words(words: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Words for each slice of the batch axes: one key would give all of them the same bits."""
    if not batch:
        return words
    index = jnp.arange(math.prod(batch), dtype=jnp.uint32)
    zero = jnp.zeros_like(index)
    out = philox4x32((index, zero, zero, zero + 1), (words[0], words[1]))
    return jnp.stack(out[:2], axis=-1).reshape(*batch, 2)


def keyless_words(amax: jax.Array, shape: tuple[int, ...], name: str) -> jax.Array:
    """A 64-bit mix of a gradient's amax bits, its shape and the layer's name, for each slice."""
    seed = zlib.crc32(repr((shape[-2:], name)).encode())
    bits = magnitude_bits(amax)
    index = jnp.arange(bits.size, dtype=jnp.uint32).reshape(bits.shape)
    counter = (bits, jnp.full_like(bits, seed), index, jnp.full_like(bits, 2))
    out = philox4x32(counter, (jnp.uint32(0x6A6C7021), jnp.uint32(0x6E766634)))
    return jnp.stack(out[:2], axis=-1)
