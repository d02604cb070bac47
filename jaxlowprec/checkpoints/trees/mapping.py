"""Flax parameter trees and Hugging Face tensors: a list of rules that map one to the other, in both directions.

    kernel       [K, N]   <->   weight [N, K]      the only transposition; the bytes of a quantised kernel stay
    embedding    [V, D]   <->   weight [V, D]
    scale, bias  [N]      <->   weight, bias [N]

A rule's path is the path of a leaf in the tree, its name the name of a tensor. `{i}` stands for a number, the same in
both: `layers.{i}.q.kernel` is `layers[i].q.kernel` of an NNX module and `layers_i/q/kernel` of Linen parameters. A name
with `{expert}`, which the path does not have, stands for one tensor per expert: kernels [E, K, N] <-> E weights [N, K].
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.checkpoints.schemes.base import FLOATS, Scheme, as_dtype
from jaxlowprec.checkpoints.trees.leaf_tensors import LeafTensors, about, transposed
from jaxlowprec.checkpoints.trees.tree_paths import leaves, rebuilt

Arrays = Mapping[str, np.ndarray]

EXPERT = "{expert}"
"""Stands for the number of an expert in a rule's name."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """Maps one kind of leaf to its tensor.

    Attributes:
        path: the leaf's path in the tree, parts joined by dots, `{i}` for a number.
        name: the tensor's name.

    >>> rule = Rule("mlp.{i}.up_proj.kernel", "model.{i}.experts.{expert}.up_proj.weight")
    >>> rule.name_of("mlp.3.up_proj.kernel")
    'model.3.experts.{expert}.up_proj.weight'
    """

    path: str
    name: str

    @property
    def of_experts(self) -> bool:
        """Whether the leaf's first axis counts experts, each of which has a tensor."""
        return EXPERT in self.name and EXPERT not in self.path

    @property
    def is_kernel(self) -> bool:
        """Whether the leaf is a matrix [K, N] that the file holds as [N, K]."""
        return self.path.endswith("kernel")

    def name_of(self, path: str) -> str | None:
        """The tensor's name for a leaf, with `{expert}` in it for experts; None if the rule does not match the path."""
        pattern = re.sub(r"\\\.\\\{(\w+)\\\}", r"[._](?P<\1>\\d+)", re.escape(self.path))
        match = re.fullmatch(pattern, path)
        return None if match is None else self.name.format(**{"expert": EXPERT} | match.groupdict())


@dataclasses.dataclass(frozen=True)
class TreeMapping:
    """All rules for one kind of model.

    `to_tensors` and `from_tensors` are inverse to each other: for float leaves up to the requested dtype, for quantised
    leaves byte for byte.
    """

    rules: tuple[Rule, ...]

    def names(self, tree: Any) -> dict[str, str]:
        """Maps each leaf's path to its tensor's name; a kernel's is that of the float weight, even if it is quantised.

        The names of experts' tensors have `{expert}` in them.

        Raises:
            ValueError: leaves that no rule matches, or two leaves with one name.
        """
        return {path: name for path, name, _, _ in self._named("names", tree)}

    def float_modules(self, tree: Any) -> list[str]:
        """The names of modules whose kernels are not quantised."""
        stored = self._stored("float_modules", tree, None, None)
        return [tensors.module for tensors in stored if tensors.is_kernel and not tensors.is_quantized]

    def to_tensors(self, tree: Any, scheme: Scheme | None = None, dtype: Any = None) -> dict[str, np.ndarray]:
        """A tree's leaves as the tensors of a checkpoint.

        Arguments:
            tree: an NNX module or state, or Linen's variables or parameters. Leaves are float arrays, and
                QuantizedArrays for kernels quantised along K: `quantize(kernel, fmt, axis=-2)`.
            scheme: the format of quantised kernels.
            dtype: the dtype that float leaves are rounded to. None: each keeps its own.

        Raises:
            ValueError: leaves that no rule matches; quantised leaves without a scheme, or that the scheme cannot hold.
        """
        tensors: dict[str, np.ndarray] = {}
        for stored in self.stored(tree, scheme, dtype):
            tensors |= stored.make()
        return tensors

    def stored(self, tree: Any, scheme: Scheme | None = None, dtype: Any = None) -> list[LeafTensors]:
        """The leaves, each expert by itself, before anything is computed or gathered. Arguments as in `to_tensors`."""
        return self._stored("to_tensors", tree, scheme, dtype)

    def _stored(self, who: str, tree: Any, scheme: Scheme | None, dtype: Any) -> list[LeafTensors]:
        found: list[LeafTensors] = []
        for path, name, rule, leaf in self._named(who, tree):
            kind = rule.is_kernel, scheme, dtype
            if not rule.of_experts:
                found.append(LeafTensors(path, name, leaf, *kind))
                continue
            for i in _experts(who, path, leaf):
                found.append(LeafTensors(f"{path}[{i}]", _name_of_expert(name, i), leaf, *kind, expert=i))
        return found

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
        found: dict[str, Any] = {}
        missing: list[str] = []
        used: set[str] = set()
        read = functools.partial(_read, tensors, scheme, used)
        for path, name, rule, leaf in self._named("from_tensors", like):
            if rule.of_experts:
                names = [_name_of_expert(name, i) for i in _experts("from_tensors", path, leaf)]
            else:
                names = [name]
            arrays = [read(path, one, rule.is_kernel, leaf.dtype) for one in names]
            if absent := [one for one, array in zip(names, arrays, strict=True) if array is None]:
                missing += absent
                continue
            found[path] = _stacked(path, arrays) if rule.of_experts else arrays[0]
            if found[path].shape != tuple(leaf.shape):
                given, needed = found[path].shape, tuple(leaf.shape)
                raise ValueError(f"from_tensors: {path} has shape {given} in the checkpoint; the model has {needed}")
        if missing or len(used) < len(tensors):
            raise ValueError(f"from_tensors: {_differences(missing, sorted(set(tensors) - used))}")
        return rebuilt(like, found)

    def _named(self, who: str, tree: Any) -> Iterator[tuple[str, str, Rule, Any]]:
        """Yields (path, name, rule, leaf) for each leaf."""
        found = leaves(tree)
        ruled = {path: match for path in found if (match := self._rule(path))}
        if unknown := [path for path in found if path not in ruled]:
            known = ", ".join(rule.path for rule in self.rules)
            raise ValueError(f"{who}: no rule is about {', '.join(unknown)}; there are rules for {known}")
        counts = collections.Counter(name for _, name in ruled.values())
        if double := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"{who}: several leaves are called {', '.join(double)}")
        for path, (rule, name) in ruled.items():
            yield path, name, rule, found[path]

    def _rule(self, path: str) -> tuple[Rule, str] | None:
        return next(((rule, name) for rule in self.rules if (name := rule.name_of(path))), None)


def _experts(who: str, path: str, leaf: Any) -> range:
    """The indices of a leaf's first axis."""
    if not leaf.shape:
        raise ValueError(f"{who}: {path} is a scalar; a rule with {EXPERT} in its name needs a first axis of experts")
    return range(leaf.shape[0])


def _name_of_expert(name: str, index: int) -> str:
    return name.replace(EXPERT, str(index))


def _stacked(path: str, arrays: list[Any]) -> Any:
    """The experts' arrays as one leaf; raises ValueError if they differ in shape, dtype or format."""
    kinds = {
        (jax.tree.structure(array), *((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(array))) for array in arrays
    }
    if len(kinds) > 1:
        raise ValueError(f"from_tensors: {path}: the experts' tensors differ in shape, dtype or format")
    return jax.tree.map(lambda *each: jnp.stack(each), *arrays)


def _read(
    tensors: Arrays, scheme: Scheme | None, used: set[str], path: str, name: str, is_kernel: bool, dtype: Any
) -> Any:
    """A leaf, or one expert's part of it, from its tensors, which are added to `used`; None if they are missing."""
    array = tensors.get(name)
    quantized = is_kernel and (array is None or array.dtype.name not in FLOATS)
    if quantized and scheme is not None and (parts := _quantized_parts(tensors, name, scheme)):
        read = {} if array is None else {name: array}
        suffixed = {part: read[full] if full in read else tensors[full] for part, full in parts.items()}
        used |= set(parts.values())
        stored = scheme.as_stored({part: tensor.dtype.name for part, tensor in suffixed.items()})
        return about(path, functools.partial(stored.load, suffixed, dtype)).mT
    if array is None:
        return None
    used.add(name)
    return _widened(path, transposed(path, array) if is_kernel else array, dtype)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _quantized_parts(tensors: Arrays, name: str, scheme: Scheme) -> dict[str, str]:
    """The tensors of a module in a scheme's format: maps their last parts to their full names."""
    parts = {part: f"{_module(name)}.{part}" for part in (*scheme.required, *scheme.optional)}
    return {part: full for part, full in parts.items() if full in tensors}


def _widened(path: str, array: np.ndarray, dtype: Any) -> jax.Array:
    """The array in a dtype that holds its numbers exactly."""
    if array.dtype.name not in FLOATS:
        raise ValueError(f"from_tensors: {path} is {array.dtype.name} in the checkpoint; needs {' or '.join(FLOATS)}")
    dtype = as_dtype(dtype)
    if array.dtype != dtype and dtype.name != "float32":
        raise ValueError(
            f"from_tensors: {path} is {array.dtype.name} in the checkpoint and {dtype.name} in the model, which would "
            "round it; cast the checkpoint's tensors first, or make the model's parameters float32"
        )
    return jnp.asarray(np.ascontiguousarray(array).astype(dtype, copy=False))


def _differences(missing: list[str], unexpected: list[str]) -> str:
    parts = [("missing", missing), ("unexpected", unexpected)]
    return "; ".join(f"{what} tensors: {', '.join(names)}" for what, names in parts if names)
