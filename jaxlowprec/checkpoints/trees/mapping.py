"""Flax parameter trees and Hugging Face tensors: a list of rules that map one to the other, in both directions.

    kernel       [K, N]   <->   weight [N, K]      the bytes of a quantised kernel stay
    embedding    [V, D]   <->   weight [V, D]
    scale, bias  [N]      <->   weight, bias [N]

A rule's path is the path of a leaf in the tree, its name the name of a tensor. `{i}` stands for a number, the same in
both: `layers.{i}.q.kernel` is `layers[i].q.kernel` of an NNX module and `layers_i/q/kernel` of Linen parameters. A name
with `{expert}`, which the path does not have, stands for one tensor per expert: kernels [E, K, N] <-> E weights [N, K].
Stacked layers, heads, joined and split matrices have a layout, see `jaxlowprec.checkpoints.trees.layout`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxlowprec.arguments import as_array, float_dtype_or_none
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.files.dtypes import same_bytes
from jaxlowprec.checkpoints.files.strict_json import repeated
from jaxlowprec.checkpoints.schemes.base import FLOATS, Scheme, as_dtype, require_scheme
from jaxlowprec.checkpoints.trees.adapters import pairs_of
from jaxlowprec.checkpoints.trees.groups import Group, Place, groups, unmerged
from jaxlowprec.checkpoints.trees.layout import Moves, stacked
from jaxlowprec.checkpoints.trees.leaf_tensors import LeafTensors, PlacedTensor, about
from jaxlowprec.checkpoints.trees.quantized_rows import columns_split, holds_expert_arrays, leaf_of_rows, rows_split
from jaxlowprec.checkpoints.trees.rule import EXPERT, Rule, of_leaf
from jaxlowprec.checkpoints.trees.tree_paths import leaves, rebuilt

Arrays = Mapping[str, np.ndarray]

__all__ = ["EXPERT", "Rule", "TreeMapping"]


@dataclasses.dataclass(frozen=True)
class TreeMapping:
    """All rules for one kind of model.

    `to_tensors` and `from_tensors` are inverse to each other: for float leaves up to the requested dtype, for quantised
    leaves byte for byte.

    Attributes:
        rules: a leaf has the first rule that matches its path.
        left_out: regular expressions for whole names of tensors that `from_tensors` leaves out if no leaf needs them.
    """

    rules: tuple[Rule, ...]
    left_out: tuple[str, ...] = ()

    def names(self, tree: Any) -> dict[str, str]:
        """Maps each leaf's path to its tensor's name; a kernel's is that of the float weight, even if it is quantised.

        The names of experts' tensors have `{expert}` in them, those of stacked layers `{i}`; the names of a leaf that
        is split are joined by commas.

        Raises:
            ValueError: leaves that no rule matches, or two leaves with one name.
        """
        found = self._groups("names", tree)
        return {path: ", ".join(group.names) for group in found for path in group.paths}

    def adapters(self, tree: Any) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The LoRA adapters in a tree, by the names of the weights that they belong to, for `save_adapters`.

        They may be those of qwix, which tunix and MaxText use (`kernel_lora_a`, `kernel_lora_b`), of the gemma package,
        and of `jaxlowprec.nnx.add_lora`. Each layer of a scan has a pair. Those of a leaf that is split share A. Leaves
        that are joined have one pair, whose rank is the sum of theirs: the same update.

        Arguments:
            tree: an NNX module or state, or Linen's parameters, with the kernels.

        Returns:
            A [K..., rank] and B [rank, N...] in float32, for rows in the file's order and in its units.

        Raises:
            ValueError: the tree has no adapters, or half of one, or one that does not fit its kernel's shape, or one of
                experts or of an embedding.

        >>> mapping = TreeMapping((Rule("layers.up.kernel", "model.layers.{i}.up.weight", "i D N -> N D"),))
        >>> shapes = {"kernel": (2, 4, 6), "kernel_lora_a": (2, 4, 1), "kernel_lora_b": (2, 1, 6)}
        >>> tree = {"layers": {"up": {name: np.ones(shape) for name, shape in shapes.items()}}}
        >>> {name: (a.shape, b.shape) for name, (a, b) in mapping.adapters(tree).items()}
        {'model.layers.0.up.weight': ((4, 1), (1, 6)), 'model.layers.1.up.weight': ((4, 1), (1, 6))}
        """
        return pairs_of(self.rules, leaves(tree))

    def float_modules(self, tree: Any) -> list[str]:
        """The names of modules whose kernels are not quantised, with those that have no tensor but that of another."""
        stored = self._stored(self._groups("float_modules", tree), None, None)
        named = [tensors.module for tensors in stored if tensors.is_kernel and not tensors.is_quantized]
        return named + self.tied_modules

    @property
    def tied_modules(self) -> list[str]:
        """The names of modules whose weights are tied to other tensors."""
        tied = [rule for rule in self.rules if rule.tied_to is not None and rule.is_kernel]
        return [name.rpartition(".")[0] for rule in tied for name in rule.names]

    def to_tensors(self, tree: Any, scheme: Scheme | None = None, dtype: Any = None) -> dict[str, np.ndarray]:
        """A tree's leaves as the tensors of a checkpoint.

        Arguments:
            tree: an NNX module or state, or Linen's variables or parameters. Leaves are float arrays, and
                QuantizedArrays for kernels quantised along K: `quantize(kernel, fmt, axis=-2)`.
            scheme: the format of quantised kernels.
            dtype: the dtype that float leaves are rounded to, but for those of a rule with `keeps_dtype`. None: each
                keeps its own.

        Raises:
            TypeError: a scheme or a dtype that is something else.
            ValueError: a dtype that is not of floats; leaves that no rule matches or that do not fit its layout;
                quantised leaves without a scheme, or that the scheme or the layout cannot hold; a tied leaf that
                differs from what it is tied to.
        """
        tensors: dict[str, np.ndarray] = {}
        for stored in self.stored(tree, scheme, dtype):
            tensors |= stored.make()
        return tensors

    def stored(self, tree: Any, scheme: Scheme | None = None, dtype: Any = None) -> list[LeafTensors]:
        """The leaves, each expert and each layer by itself, before they are computed or gathered.

        Only leaves that are tied to another tensor are compared with it. Arguments as in `to_tensors`.
        """
        require_scheme("to_tensors", scheme)
        dtype = float_dtype_or_none("to_tensors", dtype)
        found = self._groups("to_tensors", tree)
        stored = self._stored(found, scheme, dtype)
        _require_tied(found, stored)
        return stored

    def _stored(self, found: list[Group], scheme: Scheme | None, dtype: Any) -> list[LeafTensors]:
        """The tensors of the groups, without those that are tied to another."""
        stored = []
        for group in found:
            if group.rule.tied_to is not None:
                continue
            rounded = None if group.rule.keeps_dtype else dtype
            kind = group.rule.is_kernel and len(group.layout.right) == 2, scheme, rounded
            for place in group.places():
                stored.append(LeafTensors(group.path_of(place), place.name, PlacedTensor(group, place), *kind))
        if twice := repeated(tensors.name for tensors in stored):
            paths = " and ".join(tensors.path for tensors in stored if tensors.name == twice)
            raise ValueError(f"to_tensors: {paths} are both called {twice}; needs one of them, stacked or not")
        return stored

    def from_tensors(self, tensors: Arrays, like: Any, scheme: Scheme | None = None) -> Any:
        """A tree with a checkpoint's numbers.

        Arguments:
            tensors: all tensors of the checkpoint.
            like: the tree to fill: its structure, shapes and float dtypes count; its leaves may be abstract
                (`jax.ShapeDtypeStruct`). Kernels that the checkpoint holds in the scheme's format become
                QuantizedArrays [K, N].
            scheme: the format of quantised weights.

        Returns:
            A tree like `like`; for an NNX module the state of its parameters and quantised kernels, for `nnx.update`.

        Raises:
            ValueError: tensors that are missing or left over; other shapes; a leaf whose dtype would round what the
                checkpoint holds.
        """
        require_scheme("from_tensors", scheme)
        found: dict[str, Any] = {}
        reading = TensorReader(tensors, scheme)
        for group in self._groups("from_tensors", like):
            found |= reading.leaves(group) or {}
        for rule in self.rules:
            if rule.tied_to is not None:
                reading.require_tied(rule.names[0], rule.tied_to)
        unexpected = [name for name in sorted(set(tensors) - reading.used) if not self._leaves_out(name)]
        if reading.missing or unexpected:
            raise ValueError(f"from_tensors: {_differences(reading.missing, unexpected)}")
        return rebuilt(like, found)

    def _leaves_out(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.left_out)

    def _groups(self, who: str, tree: Any) -> list[Group]:
        return groups(who, self.rules, leaves(tree))


def _require_tied(found: list[Group], stored: list[LeafTensors]) -> None:
    """Raises ValueError if a leaf differs from what it is tied to, whose tensor stands for both."""
    made = {tensors.name: tensors for tensors in stored}
    for group in found:
        other = group.rule.tied_to
        if other is None:
            continue
        remedy = "use a mapping without tied_to (tie_word_embeddings is false), which stores both"
        if other not in made or made[other].is_quantized or hasattr(group.leaves[0], "dequantize"):
            raise ValueError(f"to_tensors: {group.path} is tied to {other}; needs a float leaf for each; {remedy}")
        if not same_bytes(PlacedTensor(group, group.places()[0]).array(False, None), made[other].on_host()):
            raise ValueError(f"to_tensors: {group.path} differs from {made[other].path}, to which it is tied; {remedy}")


def _differences(missing: list[str], unexpected: list[str]) -> str:
    parts = [("missing", missing), ("unexpected", unexpected)]
    return "; ".join(f"{what} tensors: {', '.join(names)}" for what, names in parts if names)


@dataclasses.dataclass
class TensorReader:
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
            return as_array(np.asarray(made[0], order="C"))
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
