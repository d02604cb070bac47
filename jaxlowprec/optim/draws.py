"""Random bits of optimizer states: 16 for each element, by its place in the whole array, the leaf and the step.

numerics.md 19. A byte would be too few: with a decay of 0.999 a step moves a second moment by a hundredth of a code.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxlowprec.arguments import shown, whole_number
from jaxlowprec.ops.checks import check_whole
from jaxlowprec.ops.optimizer_states import EIGHTH, draws_at
from jaxlowprec.ops.quantize.random_bits import key_words, words_at
from jaxlowprec.wiring.sharding_rule import dimensions_of, sharding_of

STREAM_OF_STATES, STREAM_OF_WEIGHTS = 15, 16
_U32 = jnp.uint32


def words_of(who: str, key: Any) -> jax.Array | np.ndarray:
    """uint32 [2] of a JAX key, or of a whole number, which stands for (0, number).

    Raises:
        TypeError, ValueError: it is neither.
    """
    if key is None:
        raise TypeError(f"{who}: key=None; needs an int, such as key=0, or a JAX key such as jax.random.key(0)")
    if isinstance(key, jax.Array | np.ndarray) and (key.ndim or jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        return key_words(who, key, ())
    try:
        return np.array([0, whole_number(who, "key", key, 0, 2**32 - 1)], np.uint32)
    except TypeError:
        raise TypeError(f"{who}: key={shown(key)}; needs an int or a JAX key such as jax.random.key(0)") from None


def words_of_leaves(words: jax.Array, step: jax.Array, paths: Sequence[str], stream: int) -> jax.Array:
    """uint32 [len(paths), 2]: the words of each leaf in one step."""
    leaves = np.array([zlib.crc32(path.encode()) for path in paths], np.uint32)
    return words_at(words, step, leaves, stream=stream)


def sharding_by(x: jax.Array, unit: int) -> NamedSharding | None:
    """The sharding of x's type, without the split of rows if that would cut units of so many elements."""
    sharding = sharding_of(x)
    if sharding is None:
        return None
    *lead, last = dimensions_of(x)
    parts = math.prod(sharding.mesh.shape[axis] for axis in last)
    is_whole = x.shape[-1] % (unit * parts) == 0
    return sharding if is_whole else sharding.update(spec=PartitionSpec(*lead, None))


def half_words(x: jax.Array, words: jax.Array) -> jax.Array:
    """uint32 [..., C] below 2^16: a draw for each element of x [..., C], by row and eighth of the whole array.

    Rows are counted over all leading axes by iota: a reshape would gather what a mesh has split.

    Raises:
        ValueError: x is the shard of an array, whose places in the whole are not known.
    """
    check_whole("jaxlowprec.optim", x)
    shape, sharding = (*x.shape[:-1], -(-x.shape[-1] // EIGHTH)), sharding_by(x, EIGHTH)

    def counted(axis: int) -> jax.Array:
        return jax.lax.broadcasted_iota(_U32, shape, axis, out_sharding=sharding)

    row, stride = jnp.zeros_like(counted(0)), 1
    for axis in reversed(range(x.ndim - 1)):
        row += counted(axis) * _U32(stride & 0xFFFFFFFF)
        stride *= x.shape[axis]
    return draws_at(row, counted(x.ndim - 1), words, x.shape[-1])
