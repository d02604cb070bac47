"""A leaf of a tree as the tensors of a checkpoint, whose names, dtypes and shapes are known before they are made."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.conversion.plan import output_specs
from jaxlowprec.checkpoints.files.dtypes import amax, file_dtype, limit
from jaxlowprec.checkpoints.files.safetensors_header import TensorSpec
from jaxlowprec.checkpoints.schemes.base import FLOATS, Scheme, as_dtype
from jaxlowprec.checkpoints.trees.groups import Group, Place, right_axes
from jaxlowprec.checkpoints.trees.layout import PLUS, Layout, Moves, joined, merged
from jaxlowprec.checkpoints.trees.quantized_rows import (
    columns_joined,
    field_moves,
    has_tensor_scale,
    holds_expert_arrays,
    require_whole_tiles,
    rows_joined,
)
from jaxlowprec.checkpoints.trees.rule import Rule, differ, of_file
from jaxlowprec.checkpoints.trees.tree_paths import on_host

T = TypeVar("T")

_ROWS = 16


@dataclasses.dataclass(frozen=True)
class LeafTensors:
    """A leaf, or what leaves hold of one tensor, and the way in which it is stored.

    Attributes:
        path: the leaf's path in its tree.
        name: the tensor's name; for a quantised kernel the name of the float weight.
        leaf: an array, a QuantizedArray [K, N] quantised along K, or `PlacedTensor` in the tensor by a rule's layout.
        is_kernel: whether the tensor is a matrix [N, K] of a linear layer, for which the leaf is [K, N].
        scheme: the format of quantised leaves.
        dtype: the dtype that a float leaf is rounded to; None: its own.

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

    @functools.cached_property
    def placed(self) -> PlacedTensor:
        """The leaf with its layout."""
        return self.leaf if isinstance(self.leaf, PlacedTensor) else whole(self.path, self.leaf, self.is_kernel)

    @property
    def shape(self) -> tuple[int, ...]:
        """The float tensor's shape; a kernel's is [N, K]."""
        return self.placed.shape

    @property
    def module(self) -> str:
        """The tensor's name without its last part."""
        return self.name.rpartition(".")[0]

    @property
    def is_quantized(self) -> bool:
        """Whether the leaf is a QuantizedArray."""
        return isinstance(
            self.leaf.group.leaves[0] if isinstance(self.leaf, PlacedTensor) else self.leaf, QuantizedArray
        )

    @property
    def own_scheme(self) -> Scheme | None:
        """The scheme of the tensor's module: of a `Mixed` that of the target that names it; None: there is none."""
        return None if self.scheme is None else self.scheme.of_module(self.scheme.module_of(self.name))

    def specs(self) -> dict[str, TensorSpec]:
        """Dtypes and shapes of the tensors, by their names; nothing is computed."""
        if self.is_quantized:
            scheme, spec = self._scheme(), TensorSpec(file_dtype(self.placed.dtype), self.shape)
            self.placed.require_rows(scheme)
            return output_specs(scheme, scheme.module_of(self.name), spec)
        return {self.name: TensorSpec(file_dtype(as_dtype(self.dtype or self.placed.dtype)), self.shape)}

    def make(self, on_device: bool = False) -> dict[str, Any]:
        """The tensors, by their names.

        Arguments:
            on_device: a float leaf that is a JAX array stays one, on its device; all other tensors are numpy arrays.
        """
        if self.is_quantized:
            scheme = self._scheme()
            stored = about(self.path, lambda: scheme.store(self.placed.quantized(scheme)))
            module = f"{scheme.module_of(self.name)}{scheme.joint}"
            return {f"{module}{part}": tensor for part, tensor in stored.items()}
        dtype = None if self.dtype is None else as_dtype(self.dtype)
        array = self.placed.array(on_device, dtype)
        if isinstance(array, np.ndarray) and not array.flags.c_contiguous:
            array = contiguous(array)
        return {self.name: array}

    def on_host(self) -> np.ndarray:
        """The float tensor as a numpy array, before it is rounded."""
        return self.placed.array(False, None)

    def _scheme(self) -> Scheme:
        if self.scheme is None:
            fmt = self.placed.group.leaves[0].format
            raise ValueError(f"to_tensors: {self.path} is quantised to {fmt}; pass scheme= to store it")
        own = self.own_scheme
        if own is None:
            raise ValueError(f"to_tensors: {self.path} is quantised: {self.scheme.why_no_scheme(self.module)}")
        return own


@dataclasses.dataclass(frozen=True)
class PlacedTensor:
    """A tensor in the leaves that hold it, as a rule's layout places it there.

    Attributes:
        group: the leaves and their rule.
        place: the tensor.
    """

    group: Group
    place: Place

    @property
    def shape(self) -> tuple[int, ...]:
        """The float tensor's shape."""
        return self.group.shape_of(self.place)

    @property
    def dtype(self) -> Any:
        """The leaves' dtype. Raises ValueError if they differ."""
        dtypes = {np.dtype(leaf.dtype) for leaf in self.group.leaves}
        if len(dtypes) > 1:
            names = ", ".join(sorted(dtype.name for dtype in dtypes))
            raise ValueError(f"{self.group.path} are joined to one tensor and have dtypes {names}; needs one dtype")
        return dtypes.pop()

    def array(self, on_device: bool, dtype: np.dtype | None) -> Any:
        """The float tensor, as a view where that is possible.

        Arguments:
            on_device: leaves that are JAX arrays stay on their devices.
            dtype: what to round to; None: the leaves' dtype stays.
        """
        assert self.dtype is not None  # raises ValueError if there are several
        group, place = self.group, self.place
        parts = []
        for path, leaf, moves in zip(group.paths, group.leaves, group.moves, strict=True):
            taken = moves.taken(leaf, place.counts, place.part)
            array = taken if on_device else on_host(path, taken)
            array = of_file(path, array, group.rule, dtype)
            if dtype is not None:
                array = rounded(path, array, dtype)
            parts.append(moves.arranged(array, place.part))
        axes = right_axes(group.layout)
        array = parts[0] if len(parts) == 1 else joined(parts, axes, group.layout.joined)
        return array if array.shape == self.shape else merged(array, axes, group.layout.right)

    def require_rows(self, scheme: Scheme) -> None:
        """Raises ValueError unless quantised leaves can be placed so in a scheme's tensors."""
        group = self.group
        if differ(group.rule):
            raise ValueError(f"{group.path} is quantised, and its numbers are not the file's (factor, offset)")
        if not group.holds_matrices and not (scheme.of_expert_arrays and holds_expert_arrays(group)):
            raise ValueError(
                f"{group.path} of shape {group.moves[0].shape} is quantised; the layout {group.layout.text!r} is for "
                "float leaves, because codes and scales belong to rows of a matrix; quantise the kernel as a matrix "
                "[.., K, N] along K, or dequantise it"
            )
        if group.rule.padded and any(moves.shape[-1] != self.shape[0] for moves in group.moves):
            raise ValueError(f"{group.path} is quantised and padded; store it without its padding, or dequantise it")

    def quantized(self, scheme: Scheme) -> QuantizedArray:
        """The quantised tensor [N, K], or [E, N, K] of all experts."""
        self.require_rows(scheme)
        group = self.group
        if holds_expert_arrays(group):
            return columns_joined(group, group.leaves).mT
        return rows_joined(
            group, [self._rows(leaf, moves) for leaf, moves in zip(group.leaves, group.moves, strict=True)]
        )

    def _rows(self, q: QuantizedArray, moves: Moves) -> QuantizedArray:
        """The part of a leaf [.., K, N] that the tensor has: [N, K]."""
        group, place = self.group, self.place
        if q.axis != -2:
            raise ValueError(f"it, of shape {q.shape}, is quantised along axis -1; needs the contracted axis, -2")

        def taken(array: Any, layout: Layout) -> Any:
            if array is None:
                return None
            return field_moves(moves, array.shape, layout).out(array, place.counts, place.part)

        rows, batch = group.layout.of_rows(), group.layout.of_batch()
        matrix = (self.shape[0] if group.layout.splits_leaf else q.shape[-1], q.shape[-2])
        if group.layout.splits_leaf and group.layout.joined != PLUS:
            sizes = [moves.file_sizes(part)[str(group.layout.joined)] for part in range(len(group.rule.names))]
            require_whole_tiles(group.path, q.format, sizes)
        amax = q.amax if q.format.row_scaled else taken(q.amax, batch)  # no scheme stores an amax per row
        scale = taken(q.scale, batch if has_tensor_scale(q) else rows)
        data, zeros = taken(q.data, rows), taken(q.zero_point, rows)
        return dataclasses.replace(q, data=data, scale=scale, amax=amax, zero_point=zeros, matrix_shape=matrix, axis=-1)


def whole(path: str, leaf: Any, is_kernel: bool) -> PlacedTensor:
    """A leaf that is a tensor by itself, without a mapping."""
    rule = Rule("kernel" if is_kernel else "leaf", "tensor")
    group = Group(rule, {}, (path,), (leaf,), (rule.moves(path, leaf),))
    return PlacedTensor(group, group.places()[0])


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
    """Calls `work`. Its ValueErrors get the name of the leaf.

    >>> about("up.kernel", lambda: int("x"))
    Traceback (most recent call last):
    ValueError: up.kernel: invalid literal for int() with base 10: 'x'
    """
    try:
        return work()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
