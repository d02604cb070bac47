"""A rule of a mapping: which leaves are which tensors, and how their axes and numbers differ, without a rounding that
nobody asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxlowprec.arguments import as_array
from jaxlowprec.checkpoints.schemes.base import FLOATS
from jaxlowprec.checkpoints.trees.layout import Layout, Moves, parsed

EXPERT = "{expert}"
"""Stands for the number of an expert in a rule's name."""

_IN_PATH = re.compile(r"\\\.\\\{(\w+)\\\}")
_IN_NAME = re.compile(r"\{(?:(\d+)\*)?([A-Za-z]\w*)(?:\+(\d+))?\}")


@dataclasses.dataclass(frozen=True)
class Rule:
    """Maps one kind of leaf to its tensor, several leaves to one tensor, or one leaf to several tensors.

    Attributes:
        path: the leaf's path in the tree, parts joined by dots, `{i}` for a number. A tuple: leaves that are joined to
            one tensor.
        name: the tensor's name. `{i}` that the path does not have stands for the indices of an axis `i` of the leaf;
            `{i+3}` and `{6*i+1}` are the tensor's number for `i`. A tuple: tensors that the leaf is split to.
        layout: how the leaf's axes become the tensor's, see `jaxlowprec.checkpoints.trees.layout`. None: the leaf's
            first axes are those that the name counts; then kernels [K, N] become [N, K], and other leaves stay.
        parts: sizes of the tensors that a leaf is split to, along the joined axis, or their proportions. None: equal.
        sizes: sizes that axes of the tensor must have, by the axes' names.
        padded: axes that may be larger in the leaf than `sizes` says, such as a vocabulary's: the tensor has the first
            indices, and a leaf that is read gets zeros for the rest.
        offset: what the leaf has more than the tensor: 1 for a norm that multiplies by the leaf, where the file's norm
            multiplies by 1 + weight. A number that would be rounded is an error.
        factor: what the leaf is a multiple of the tensor by, alike.
        tied_to: the name of a tensor that this one equals, and that the file has instead of it.
        keeps_dtype: whether a float tensor has the leaf's dtype also if others are rounded to another.

    >>> rule = Rule("mlp.{i}.up_proj.kernel", "model.{i}.experts.{expert}.up_proj.weight")
    >>> rule.name_of("mlp.3.up_proj.kernel")
    'model.3.experts.{expert}.up_proj.weight'
    >>> Rule("layers.q.kernel", "layers.{i}.q.weight", "i D H d -> (H d) D").counted
    ('i',)
    """

    path: str | tuple[str, ...]
    name: str | tuple[str, ...]
    layout: str | None = None
    parts: tuple[int, ...] | None = None
    sizes: tuple[tuple[str, int], ...] = ()
    padded: tuple[str, ...] = ()
    offset: float = 0.0
    factor: float = 1.0
    tied_to: str | None = None
    keeps_dtype: bool = False

    def __post_init__(self):
        who = f"Rule({' + '.join(self.paths)})"
        if len(self.paths) > 1 and len(self.names) > 1:
            raise ValueError(f"{who}: several paths and several names; either leaves are joined or one is split")
        several = len(self.paths) > 1 or len(self.names) > 1
        if several and self.layout is None:
            raise ValueError(f"{who}: needs a layout with a + that says along which axis parts are joined")
        bound = [_IN_PATH.findall(re.escape(path)) for path in self.paths]
        if any(set(numbers) != set(bound[0]) for numbers in bound):
            raise ValueError(f"{who}: the paths have different numbers in braces; needs the same in each")
        if any(set(_placeholders(name)) != set(_placeholders(self.names[0])) for name in self.names):
            raise ValueError(f"{who}: the names have different numbers in braces; needs the same in each")
        if lost := [number for number in bound[0] if number not in _placeholders(self.names[0])]:
            raise ValueError(f"{who}: the name lacks {{{lost[0]}}}, so that leaves of different numbers would share it")
        for layout in parsed(self.layout) if self.layout is not None else ():
            if layout.counted != tuple(axis for axis in layout.counted if axis in self.counted) or len(
                layout.counted
            ) != len(self.counted):
                raise ValueError(
                    f"{who}: layout {layout.text!r} has axes {list(layout.counted)} that the tensor lacks; the name "
                    f"counts {list(self.counted)}"
                )
            if (layout.joined is not None) != several or (several and layout.splits_leaf != (len(self.names) > 1)):
                raise ValueError(
                    f"{who}: layout {layout.text!r} needs one +, on the side of what has parts, and only there"
                )
        if self.parts is not None and (len(self.parts) != len(self.names) or min(self.parts) < 1):
            raise ValueError(f"{who}: parts={self.parts}; needs a positive size for each of {len(self.names)} names")
        if not self.factor or not math.isfinite(self.factor) or not math.isfinite(self.offset):
            raise ValueError(
                f"{who}: factor={self.factor}, offset={self.offset}; needs finite numbers, the factor not 0"
            )
        if unsized := [axis for axis in self.padded if axis not in dict(self.sizes)]:
            raise ValueError(f"{who}: axis {unsized[0]} is padded; sizes needs its size in the file")

    @property
    def paths(self) -> tuple[str, ...]:
        """The leaves' paths."""
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names."""
        return (self.name,) if isinstance(self.name, str) else self.name

    @property
    def counted(self) -> tuple[str, ...]:
        """The numbers in the name that the path lacks: axes of the leaf."""
        bound = _IN_PATH.findall(re.escape(self.paths[0]))
        return tuple(dict.fromkeys(number for number in _placeholders(self.names[0]) if number not in bound))

    @property
    def of_experts(self) -> bool:
        """Whether an axis of the leaf counts experts, each of which has a tensor."""
        return EXPERT[1:-1] in self.counted

    @property
    def is_kernel(self) -> bool:
        """Whether the leaf is a matrix [K, N], or several, that the file holds as [N, K]."""
        if self.layout is None:
            return self.paths[0].endswith("kernel")
        return any(len(layout.right) == 2 and not layout.is_identity for layout in parsed(self.layout))

    def name_of(self, path: str) -> str | None:
        """The tensor's name for a leaf, with braces for what it counts; None if the rule does not match the path."""
        found = self.bound(path)
        return None if found is None else ", ".join(filled(name, found[1]) for name in self.names)

    def bound(self, path: str) -> tuple[int, dict[str, int]] | None:
        """The index of the rule's path that a leaf has, and its numbers; None if the rule does not match it."""
        for place, pattern in enumerate(_patterns(self.paths)):
            if match := pattern.fullmatch(path):
                return place, {name: int(number) for name, number in match.groupdict().items()}
        return None

    def moves(self, path: str, leaf: Any) -> Moves:
        """The moves for a leaf. Raises ValueError if its shape does not fit the layout."""
        shape = tuple(leaf.shape)
        moves = Moves(self._layout(path, shape), shape, self._shares(), self.sizes, self.padded)
        try:
            for part in range(len(self.names)):
                moves.file_sizes(part)
        except ValueError as error:
            raise ValueError(f"{path} has {error}") from None
        return moves

    def _shares(self) -> tuple[int, ...]:
        return self.parts or (1,) * len(self.names)

    def _layout(self, path: str, shape: tuple[int, ...]) -> Layout:
        if self.layout is None:
            return self._default(path, shape)
        found = parsed(self.layout)
        for layout in found:
            if layout.rank == len(shape):
                return layout
        needed = " or ".join(f"[{layout.text.partition('->')[0].strip()}]" for layout in found)
        raise ValueError(f"{path} has shape {shape}; its rule needs {needed}")

    def _default(self, path: str, shape: tuple[int, ...]) -> Layout:
        lead = self.counted
        if len(shape) < len(lead):
            what = "is a scalar" if not shape else f"has shape {shape}"
            axes = "experts" if self.of_experts else f"each of {', '.join(lead)}"
            braces = ", ".join(f"{{{axis}}}" for axis in lead)
            raise ValueError(f"{path} {what}; a rule with {braces} in its name needs a first axis of {axes}")
        if not self.is_kernel:
            rest = " ".join(f"a{axis}" for axis in range(len(shape) - len(lead)))
            return parsed(f"{' '.join(lead)} {rest} -> {rest}")[0]
        if len(shape) != len(lead) + 2:
            raise ValueError(
                f"{path} has shape {shape}; a kernel's needs two axes (a rule for kernels of experts, [E, K, N], "
                "has {expert} in its name; a rule for heads has a layout, such as 'D H d -> (H d) D')"
            )
        return parsed(f"{' '.join(lead)} K N -> N K")[0]


def filled(name: str, values: Mapping[str, int]) -> str:
    """A name with numbers in its braces, where they are known.

    >>> filled("layers.{6*i+1}.{expert}.weight", {"i": 2})
    'layers.13.{expert}.weight'
    """

    def number(match: re.Match[str]) -> str:
        times, axis, plus = match.groups()
        return str(int(times or 1) * values[axis] + int(plus or 0)) if axis in values else match[0]

    return _IN_NAME.sub(number, name)


def _placeholders(name: str) -> list[str]:
    return [match[2] for match in _IN_NAME.finditer(name)]


@functools.lru_cache(maxsize=4096)
def _patterns(paths: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(_IN_PATH.sub(r"[._](?P<\1>\\d+)", re.escape(path))) for path in paths)


def differ(rule: Rule) -> bool:
    """Whether the rule's leaves have other numbers than the file."""
    return rule.factor != 1 or rule.offset != 0


def of_file(path: str, array: Any, rule: Rule, dtype: np.dtype | None) -> Any:
    """The file's numbers for those of a leaf.

    Arguments:
        path: the leaf's path.
        array: the leaf, or part of it.
        rule: its rule.
        dtype: the dtype that they will be rounded to. None: the leaf's own, in which they need to be exact.

    Raises:
        ValueError: `dtype` is None, and what is read back would differ from the leaf.

    >>> of_file("norm.scale", np.float32([1.5, 0.25]), Rule("norm.scale", "norm.weight", offset=1.0), None)
    array([ 0.5 , -0.75], dtype=float32)
    """
    if not differ(rule):
        return array
    given = np.asarray(array)
    made = (given.astype(np.float64) - rule.offset) / rule.factor
    if dtype is None:
        own = made.astype(given.dtype)
        _require_same(path, given, _leaf(own, rule, given.dtype), rule, "pass dtype=, which says what to round to")
        made = own
    made = made.astype(dtype or given.dtype)
    return as_array(made) if isinstance(array, jax.Array) else made


def of_leaf(path: str, array: np.ndarray, rule: Rule, dtype: np.dtype) -> np.ndarray:
    """The leaf's numbers for those of the file: the inverse of `of_file`.

    Raises:
        ValueError: the file's numbers could not be had back.
    """
    if not differ(rule) or array.dtype.name not in FLOATS:
        return array
    made = _leaf(array, rule, dtype)
    back = ((made.astype(np.float64) - rule.offset) / rule.factor).astype(array.dtype)
    remedy = "make the leaf float32, or keep the file's numbers in the tree"
    _require_same(path, array, back, rule, remedy)
    return made


def _leaf(array: np.ndarray, rule: Rule, dtype: np.dtype) -> np.ndarray:
    return (array.astype(np.float64) * rule.factor + rule.offset).astype(dtype)


def _require_same(path: str, given: np.ndarray, back: np.ndarray, rule: Rule, remedy: str) -> None:
    same = (given == back) | (np.isnan(given) & np.isnan(back))
    if not same.all():
        number = given[~same].flat[0]
        raise ValueError(
            f"{path}: {given.dtype.name} cannot hold {number} after the factor {rule.factor:g} and the offset "
            f"{rule.offset:g} between file and tree, so that it could not be had back; {remedy}"
        )
