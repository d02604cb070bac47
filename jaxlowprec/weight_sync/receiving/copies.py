"""Copies of arrays that belong to the receiver, whatever the trainer does with its own."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxlowprec.weight_sync.bucket import as_bits
from jaxlowprec.weight_sync.receiving.memory import Memory


def own_copy(array: Any, sharding: Any = None, memory: Memory | None = None) -> Any:
    """A copy, made from device to device: a GPU's array does not pass through the host.

    Arguments:
        array: a JAX or numpy array.
        sharding: the copy's `jax.sharding.Sharding` or device. None: the array's own; numpy arrays stay numpy's.
        memory: memory for the copy, used if the copy is on the CPU and laid out as the array is.

    Raises:
        ValueError: see `placed`.

    >>> own_copy(np.arange(3)).flags.writeable
    False
    """
    memory = memory or Memory(keep=False)
    if not isinstance(array, jax.Array):
        return _of_numpy(array, memory) if sharding is None else placed(array, sharding, may_alias=False)
    given = array.sharding
    on_the_cpu = all(device.platform == "cpu" for device in array.devices())
    if sharding not in (None, given) or not on_the_cpu or not array.is_fully_addressable:
        return placed(array, given if sharding is None else sharding, may_alias=False)
    # XLA's allocator takes fresh pages of 4 KiB, which is slower than the copy; numpy asks for huge pages
    parts = [
        jax.device_put(_of_numpy(np.asarray(shard.data), memory), shard.device) for shard in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, given, parts)


def placed(array: Any, sharding: Any, may_alias: bool | None = None) -> jax.Array:
    """An array on the device or devices of a sharding.

    Raises:
        ValueError: a dtype that JAX would change, as it changes 64-bit dtypes by default.

    >>> placed(np.ones(1), jax.devices()[0])
    Traceback (most recent call last):
    ValueError: JAX makes float32 of float64; set jax_enable_x64, or send another dtype
    """
    found = jax.device_put(array, sharding, may_alias=may_alias)
    if found.dtype != array.dtype:
        raise ValueError(f"JAX makes {found.dtype} of {array.dtype}; set jax_enable_x64, or send another dtype")
    return found


def _of_numpy(array: np.ndarray, memory: Memory) -> np.ndarray:
    """A read-only copy in memory that JAX can use without copying it."""
    copy = memory.take(array.nbytes).view(array.dtype).reshape(array.shape)
    np.copyto(as_bits(copy), as_bits(array))
    copy.flags.writeable = False
    return copy
