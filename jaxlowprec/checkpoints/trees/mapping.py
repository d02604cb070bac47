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
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxlowprec.arguments import float_dtype_or_none
from jaxlowprec.checkpoints.files.dtypes import same_bytes
from jaxlowprec.checkpoints.files.strict_json import repeated
from jaxlowprec.checkpoints.schemes.base import Scheme, require_scheme
from jaxlowprec.checkpoints.trees.groups import Group, groups
from jaxlowprec.checkpoints.trees.leaf_tensors import LeafTensors, Placed
from jaxlowprec.checkpoints.trees.reading import Reading
from jaxlowprec.checkpoints.trees.rule import EXPERT, Rule
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
                stored.append(LeafTensors(group.path_of(place), place.name, Placed(group, place), *kind))
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
        reading = Reading(tensors, scheme)
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
        if not same_bytes(Placed(group, group.places()[0]).array(False, None), made[other].on_host()):
            raise ValueError(f"to_tensors: {group.path} differs from {made[other].path}, to which it is tied; {remedy}")


def _differences(missing: list[str], unexpected: list[str]) -> str:
    parts = [("missing", missing), ("unexpected", unexpected)]
    return "; ".join(f"{what} tensors: {', '.join(names)}" for what, names in parts if names)
