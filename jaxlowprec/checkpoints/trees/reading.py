"""Leaves from the tensors of a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxlowprec.arguments import as_array
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.files.dtypes import same_bytes
from jaxlowprec.checkpoints.schemes.base import FLOATS, Scheme, as_dtype
from jaxlowprec.checkpoints.trees.expert_arrays import columns_split, holds_expert_arrays
from jaxlowprec.checkpoints.trees.groups import Group, Place, unmerged
from jaxlowprec.checkpoints.trees.leaf_tensors import about
from jaxlowprec.checkpoints.trees.moves import Moves, stacked
from jaxlowprec.checkpoints.trees.numbers import of_leaf
from jaxlowprec.checkpoints.trees.quantized_rows import leaf_of_rows, rows_split

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass
class Reading:
    """Reads the tensors of a checkpoint, and keeps account of them.

    Attributes:
        tensors: all tensors of the checkpoint.
        scheme: the format of quantised weights.
        used: names of the tensors that were read.
        missing: names of those that leaves need and the checkpoint lacks.
    """

    tensors: Arrays
    scheme: Scheme | None
    used: set[str] = dataclasses.field(default_factory=set)
    missing: list[str] = dataclasses.field(default_factory=list)

    def leaves(self, group: Group) -> dict[str, Any] | None:
        """The leaves of a group by their paths; None if tensors are missing.

        Raises:
            ValueError: other shapes; a leaf whose dtype would round what the checkpoint holds.
        """
        places = group.places()
        found = [self._tensor(group, place) for place in places]
        if absent := [place.name for place, array in zip(places, found, strict=True) if array is None]:
            self.missing += absent
            return None
        _require_one_kind(group, found)
        for place, array in zip(places, found, strict=True):
            _require_shape(group, place, array)
        if isinstance(found[0], QuantizedArray) and holds_expert_arrays(group):
            made = columns_split(group, found[0])
        elif isinstance(found[0], QuantizedArray):
            rows = [about(group.path, functools.partial(rows_split, group, array)) for array in found]
            made = [leaf_of_rows(group, moves, [each[n] for each in rows]) for n, moves in enumerate(group.moves)]
        else:
            pairs = zip(places, found, strict=True)
            parts = [list(unmerged(array, group.layout, group.moves, place.part)) for place, array in pairs]
            made = [self._leaf(group, n, moves, [each[n] for each in parts]) for n, moves in enumerate(group.moves)]
        for path, moves, leaf in zip(group.paths, group.moves, made, strict=True):
            if tuple(leaf.shape) != moves.shape:
                raise ValueError(
                    f"from_tensors: {path} is {tuple(leaf.shape)} and quantised in the checkpoint, and {moves.shape} "
                    "with padding in the model; needs a leaf without padding, or a float tensor"
                )
        return dict(zip(group.paths, made, strict=True))

    def require_tied(self, name: str, other: str) -> None:
        """Takes note of a tensor that equals another, and needs no leaf. Raises ValueError if it differs."""
        if name in self.tensors and other in self.tensors:
            self.used.add(name)
            if not same_bytes(self.tensors[name], self.tensors[other]):
                raise ValueError(
                    f"from_tensors: {name} differs from {other}, to which the mapping ties it; use a mapping without "
                    "tied_to (tie_word_embeddings is false), and a tree with a leaf for it"
                )

    def _leaf(self, group: Group, number: int, moves: Moves, parts: Sequence[np.ndarray]) -> Any:
        """A float leaf from the unmerged parts of all its tensors."""
        path, leaf = group.paths[number], group.leaves[number]
        dtype = as_dtype(leaf.dtype)
        parts = [_widened(path, of_leaf(path, part, group.rule, dtype), dtype) for part in parts]
        each = len(group.rule.names)
        made = [moves.back(parts[begin : begin + each]) for begin in range(0, len(parts), each)]
        if not moves.counts:
            return as_array(np.ascontiguousarray(made[0]))
        return stacked(made, moves.counts, moves.layout)

    def _tensor(self, group: Group, place: Place) -> Any:
        """A tensor, or the QuantizedArray [N, K] of a module's tensors; None if they are missing."""
        name = place.name
        array = self.tensors.get(name)
        if array is None and group.rule.tied_to is not None:
            return self.tensors.get(group.rule.tied_to)
        if group.rule.tied_to is not None:
            self.require_tied(name, group.rule.tied_to)
        scheme = None if self.scheme is None else self.scheme.of_module(self.scheme.module_of(name))
        arrays = scheme is not None and scheme.of_expert_arrays and holds_expert_arrays(group)
        is_kernel = group.rule.is_kernel or arrays
        quantized = is_kernel and (array is None or array.dtype.name not in FLOATS)
        if quantized and scheme is not None and (parts := self._parts(scheme, name)):
            return self._quantized(group, place, scheme, parts, array)
        if array is not None:
            self.used.add(name)
        return array

    def _parts(self, scheme: Scheme, name: str) -> dict[str, str]:
        """The tensors of a module in the scheme's format: maps their last parts to their full names."""
        module = scheme.module_of(name)
        parts = {part: f"{module}{scheme.joint}{part}" for part in (*scheme.required, *scheme.optional)}
        return {part: full for part, full in parts.items() if full in self.tensors}

    def _quantized(
        self, group: Group, place: Place, scheme: Scheme, parts: Mapping[str, str], read: np.ndarray | None
    ) -> Any:
        path = group.path_of(place)
        arrays = holds_expert_arrays(group)
        if not group.holds_matrices and not arrays:
            raise ValueError(
                f"from_tensors: {group.path} of shape {group.moves[0].shape} has the layout {group.layout.text!r}, and "
                f"the checkpoint holds {place.name} quantised to {scheme.name}; needs a leaf [K, N] for it, or a "
                "checkpoint that jaxlowprec.checkpoints.dequantize made"
            )
        suffixed = {
            p: read if full == place.name and read is not None else self.tensors[full] for p, full in parts.items()
        }
        self.used |= set(parts.values())
        stored = scheme.as_stored({part: tensor.dtype.name for part, tensor in suffixed.items()})
        q = about(path, functools.partial(stored.load, suffixed, group.leaves[0].dtype))
        return q.mT if arrays else q


def _require_one_kind(group: Group, arrays: Sequence[Any]) -> None:
    """Raises ValueError if the tensors of one leaf differ in dtype or format, or in shape for the same part."""
    parts = len(group.rule.names)

    def kind(array: Any, part: int) -> object:
        if not isinstance(array, QuantizedArray):
            return part, array.shape, array.dtype
        fields = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(array)]
        return part, array.format, array.shape, tuple(fields)

    kinds = {kind(array, n % parts) for n, array in enumerate(arrays)}
    formats = {array.format if isinstance(array, QuantizedArray) else str(array.dtype) for array in arrays}
    if len(kinds) > parts or len(formats) > 1:
        whose = "experts'" if group.rule.of_experts else "leaf's"
        raise ValueError(f"from_tensors: {group.path}: the {whose} tensors differ in shape, dtype or format")


def _require_shape(group: Group, place: Place, array: Any) -> None:
    given, needed = tuple(array.shape), group.shape_of(place)
    if given == needed:
        return
    path = group.path_of(place)
    if len(given) == len(needed) and group.layout.holds_matrices and len(group.moves) == len(group.rule.names) == 1:
        raise ValueError(
            f"from_tensors: {path} has shape {given[::-1]} in the checkpoint; the model has {needed[::-1]}"
        )
    raise ValueError(
        f"from_tensors: {path} has shape {given} in the checkpoint; the model has "
        f"{', '.join(str(moves.shape) for moves in group.moves)}, which {place.name} holds as {needed}, by the layout "
        f"{group.layout.text!r}; compare the numbers of heads and of layers, and the widths, with the checkpoint's "
        "config"
    )


def _widened(path: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array in a dtype that holds its numbers exactly."""
    if array.dtype.name not in FLOATS:
        raise ValueError(f"from_tensors: {path} is {array.dtype.name} in the checkpoint; needs {' or '.join(FLOATS)}")
    if array.dtype != dtype and dtype.name != "float32":
        raise ValueError(
            f"from_tensors: {path} is {array.dtype.name} in the checkpoint and {dtype.name} in the model, which would "
            "round it; cast the checkpoint's tensors first, or make the model's parameters float32"
        )
    return array.astype(dtype, copy=False)
