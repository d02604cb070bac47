"""Signs of rotations that are drawn from a key (numerics.md 15)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.arguments import as_array
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.ops.quantize.keys import key_words
from jaxlowprec.ops.quantize.philox import philox4x32

STREAM, STREAM_OF_DGRAD = 4, 5
"""The third counter word of signs, and of those of dgrad's operands. Streams 0 and 1 round codes; 2 and 3 scales."""


def sign_source(
    who: str, hadamard: Hadamard | None, key: Any, batch: tuple[int, ...], parts: tuple[int, ...] = ()
) -> jax.Array | None:
    """The checked `sign_key=`, of which `signs_of` makes signs; None where the rotation has no drawn signs.

    Arguments:
        key: a JAX key, or the signs of another array, uint32 [..., 4].
        batch: the batch axes.
        parts: the axis after them where rows are split into parts, which have the same signs.

    Returns:
        uint32 [..., 2] or [..., 4], whose leading axes broadcast to [*batch, *parts].

    Raises:
        TypeError: the key is not usable.
        ValueError: the key is missing, or has no use.
    """
    if hadamard is None or not hadamard.drawn:
        if key is not None:
            raise ValueError(
                f'{who}: sign_key= was given, but the rotation is {hadamard}; pass Hadamard(signs="drawn"), or no '
                "sign_key"
            )
        return None
    if key is None:
        raise ValueError(
            f"{who}: the rotation is {hadamard}, which needs sign_key=, such as jax.random.key(0): the same for both "
            "operands of a GEMM"
        )
    if isinstance(key, jax.Array | np.ndarray) and key.dtype == jnp.uint32 and key.shape[-1:] == (4,):
        if key.shape[:-1] not in ((), batch, (*batch, *parts)):
            raise TypeError(
                f"{who}: sign_key has the signs of batch axes {key.shape[:-1]}; needs one vector, or one for each "
                f"slice of the batch axes {batch}"
            )
        source = as_array(key)
    else:
        source = key_words(who, key, batch, "sign_key")
    return jnp.expand_dims(source, -2) if parts and source.shape[:-1] == batch else source


@functools.partial(jax.jit, static_argnames="lead")
def signs_of(source: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    """The signs of each matrix [*lead, R, C], uint32 [*lead, 4]: sign i is negative where bit i % 32 of word i / 32 is
    set.

    Arguments:
        source: see `sign_source`.
    """
    if source.shape[-1] == 2:
        source = drawn_signs(source)
    return jnp.broadcast_to(source, (*lead, 4))


def drawn_signs(words: jax.Array, stream: int = STREAM) -> jax.Array:
    """The signs of the two words of a key: uint32 [..., 2] -> [..., 4]."""
    zero = jnp.zeros_like(words[..., 0])
    return jnp.stack(philox4x32((zero, zero, zero + stream, zero), (words[..., 0], words[..., 1])), axis=-1)


def factors(signs: jax.Array, size: int) -> jax.Array:
    """float32 [..., size]: 1 or -1 for each element of a transform."""
    index = np.arange(size)
    bits = signs[..., index // 32] >> np.uint32(index % 32)
    return jnp.where(bits & 1, -1.0, 1.0).astype(jnp.float32)
