"""A leaf of a tree as the tensors of a checkpoint, whose names, dtypes and shapes are known before they are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.conversion.plan import output_specs
from jaxlowprec.checkpoints.files.dtypes import file_dtype
from jaxlowprec.checkpoints.files.safetensors_header import TensorSpec
from jaxlowprec.checkpoints.schemes.base import FLOATS, Scheme, as_dtype
from jaxlowprec.checkpoints.schemes.magnitudes import amax, limit
from jaxlowprec.checkpoints.trees.tree_paths import on_host

T = TypeVar("T")

_ROWS = 16


@dataclasses.dataclass(frozen=True)
class LeafTensors:
    """A leaf and the way in which it is stored.

    Attributes:
        path: the leaf's path in its tree.
        name: the tensor's name; for a quantised kernel the name of the float weight.
        leaf: an array, or a QuantizedArray [K, N] quantised along K.
        is_kernel: whether the leaf is a matrix [K, N] that is stored as [N, K].
        scheme: the format of quantised leaves.
        dtype: the dtype that a float leaf is rounded to; None: its own.
        expert: the index into the leaf's first axis, if each expert has its own tensors; None: the whole leaf.

    >>> stored = LeafTensors("up.kernel", "up.weight", np.zeros((2, 3), np.float32), True, dtype="bfloat16")
    >>> stored.specs()
    {'up.weight': TensorSpec(dtype='BF16', shape=(3, 2))}
    >>> stored.make()["up.weight"].shape
    (3, 2)
    """

    path: str
    name: str
    leaf: Any
    is_kernel: bool = False
    scheme: Scheme | None = None
    dtype: Any = None
    expert: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is stored, before a kernel is transposed."""
        shape = tuple(self.leaf.shape)
        return shape if self.expert is None else shape[1:]

    @property
    def module(self) -> str:
        """The tensor's name without its last part."""
        return self.name.rpartition(".")[0]

    @property
    def is_quantized(self) -> bool:
        """Whether the leaf is a QuantizedArray."""
        return isinstance(self.leaf, QuantizedArray)

    def specs(self) -> dict[str, TensorSpec]:
        """Dtypes and shapes of the tensors, by their names; nothing is computed."""
        shape = self.shape
        if self.is_kernel and len(shape) != 2:
            raise ValueError(
                f"{self.path} has shape {shape}; a kernel's needs two axes (a rule for kernels of experts, [E, K, N], "
                "has {expert} in its name)"
            )
        shape = shape[::-1] if self.is_kernel else shape
        if self.is_quantized:
            return output_specs(self._scheme(), self.module, TensorSpec(file_dtype(self.leaf.dtype), shape))
        return {self.name: TensorSpec(file_dtype(as_dtype(self.dtype or self.leaf.dtype)), shape)}

    def make(self, on_device: bool = False) -> dict[str, Any]:
        """The tensors, by their names.

        Arguments:
            on_device: a float leaf that is a JAX array stays one, on its device; all other tensors are numpy arrays.
        """
        if self.is_quantized:
            scheme = self._scheme()
            stored = about(self.path, lambda: scheme.store(self.taken().mT))
            return {f"{self.module}.{part}": tensor for part, tensor in stored.items()}
        array = self.taken() if on_device else self.on_host()
        if self.dtype is not None:
            array = rounded(self.path, array, as_dtype(self.dtype))
        if self.is_kernel:
            array = transposed(self.path, array)
        if isinstance(array, np.ndarray) and not array.flags.c_contiguous:
            array = contiguous(array)
        return {self.name: array}

    def taken(self) -> Any:
        """The leaf, or the expert's part of it, on its device."""
        if self.expert is None:
            return self.leaf
        return jax.tree.map(lambda array: array[self.expert], self.leaf)

    def on_host(self) -> np.ndarray:
        """The float leaf, or the expert's part of it, as a numpy array."""
        return on_host(self.path, self.taken())

    def _scheme(self) -> Scheme:
        if self.scheme is None:
            raise ValueError(f"to_tensors: {self.path} is quantised to {self.leaf.format}; pass scheme= to store it")
        return self.scheme


def transposed(path: str, array: Any) -> Any:
    """A kernel as the file holds it, or the inverse. Raises ValueError unless it has two axes.

    >>> transposed("up.kernel", np.ones((2, 3))).shape
    (3, 2)
    """
    if array.ndim != 2:
        raise ValueError(f"{path} has shape {array.shape}; a kernel's needs two axes")
    return array.T


def rounded(path: str, array: Any, dtype: np.dtype) -> Any:
    """A float array in a dtype. Raises ValueError if a number of a numpy array becomes infinite; JAX's are not checked.

    >>> rounded("up.bias", np.ones(2, np.float32), np.dtype("float16"))
    array([1., 1.], dtype=float16)
    """
    if not isinstance(array, np.ndarray) or array.dtype.name not in FLOATS or amax(array) <= limit(dtype):
        return array.astype(dtype, copy=False)
    with np.errstate(over="ignore"):
        made = array.astype(dtype, copy=False)
    finite = np.isfinite(array)
    if not np.array_equal(np.isfinite(made), finite):
        raise ValueError(
            f"{path}: its numbers reach {np.abs(array[finite]).max():.6g}, but {dtype.name} ends at "
            f"{limit(dtype):.6g}; choose a dtype of larger numbers"
        )
    return made


def contiguous(array: np.ndarray) -> np.ndarray:
    """A C-contiguous copy of an array that may be a transposed one.

    numpy reads a transposed matrix along its long axis, one element per cache line. Copying a few rows at a time takes
    a seventh of the time.

    >>> contiguous(np.arange(6).reshape(2, 3).T)
    array([[0, 3],
           [1, 4],
           [2, 5]])
    """
    if array.ndim != 2 or not array.flags.f_contiguous:
        return np.ascontiguousarray(array)
    bits = array.view(f"u{array.dtype.itemsize}") if array.dtype.itemsize <= 8 else array
    copy = np.empty(array.shape, bits.dtype)
    for begin in range(0, array.shape[1], _ROWS):
        copy[:, begin : begin + _ROWS] = bits[:, begin : begin + _ROWS]
    return copy.view(array.dtype)


def about(path: str, work: Callable[[], T]) -> T:
    """What `work()` returns. Its ValueErrors get the name of the leaf.

    >>> about("up.kernel", lambda: int("x"))
    Traceback (most recent call last):
    ValueError: up.kernel: invalid literal for int() with base 10: 'x'
    """
    try:
        return work()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
