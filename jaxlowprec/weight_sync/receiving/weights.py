"""A complete version of the weights, as an engine reads it: the receiver's own copies, in memory that is reused.

Fresh memory costs as much as the copy into it: the kernel clears every page that it hands out.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxlowprec.checkpoints.files.open_files import memory
from jaxlowprec.weight_sync.bucket import as_bits
from jaxlowprec.weight_sync.manifest import Manifest
from jaxlowprec.weight_sync.receiving.forms import Module, encoded

_LEAST_BYTES = 1 << 16
"""The smallest buffer in bytes that is reused; smaller ones come from the allocator, which reuses memory itself."""


class Weights(Mapping[str, Any]):
    """The arrays of one version, by their names. It never changes: whoever holds it keeps this version, whole.

    Attributes:
        version: 0 before anything was received.
        manifest: the manifest of the version as it was sent.
        form: the form that weights were decoded to, see `forms`.

    >>> weights = Weights({"a": 1}, 7, Manifest(()))
    >>> weights["a"], weights.version, len(weights)
    (1, 7, 1)
    """

    def __init__(
        self,
        arrays: Mapping[str, Any],
        version: int,
        manifest: Manifest,
        form: str = "published",
        modules: Mapping[str, Module] | None = None,
    ):
        self._arrays = dict(arrays)
        self.version = version
        self.manifest = manifest
        self.form = form
        self._modules = modules or {}

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def dump(self) -> dict[str, np.ndarray]:
        """The tensors as they were sent, in their order, restored from the form.

        Raises:
            ValueError: no sent tensors decode to the live ones: somebody changed them.
        """
        sent = encoded(self._arrays, self._modules, self.form)
        return {entry.name: sent[entry.name] for entry in self.manifest.entries}

    def __repr__(self) -> str:
        return f"Weights(version={self.version}, {len(self)} arrays, form={self.form!r})"


NOTHING = Weights({}, 0, Manifest(()))
"""Served before the first version arrives."""


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


class Memory:
    """Lends buffers. A buffer comes back when the last array that is a view of it is gone, whoever held that array.

    Arguments:
        keep: whether to keep buffers that came back.

    >>> memory = Memory()
    >>> buffer = memory.take(1 << 20)
    >>> view, address = buffer[:8], buffer.ctypes.data
    >>> del buffer
    >>> memory.kept_bytes  # the view still holds it
    0
    >>> del view
    >>> memory.kept_bytes, memory.take(1 << 20).ctypes.data == address
    (1048576, True)
    """

    def __init__(self, keep: bool = True):
        self._keep = keep
        self._free: dict[int, list[np.ndarray]] = {}

    @property
    def kept_bytes(self) -> int:
        """Bytes of the buffers that came back and are kept."""
        return sum(size * len(buffers) for size, buffers in list(self._free.items()))

    def take(self, nbytes: int) -> np.ndarray:
        """A buffer, uint8 [nbytes], that begins at a multiple of 64 bytes. Its content is undefined."""
        if not self._keep or nbytes < _LEAST_BYTES:
            return memory(nbytes)
        free = self._free.setdefault(nbytes, [])
        try:
            buffer = free.pop()
        except IndexError:
            buffer = memory(nbytes)
        lent = _Lent(buffer)
        weakref.finalize(lent, free.append, buffer).atexit = False
        return np.asarray(lent)

    def trim(self) -> None:
        """Returns the memory of all kept buffers to the system."""
        for free in self._free.values():
            free.clear()


class _Lent:
    """The object that all views of a buffer hold; unlike an array's own memory, its end can be observed."""

    def __init__(self, buffer: np.ndarray):
        self.__array_interface__: Any = buffer.__array_interface__
