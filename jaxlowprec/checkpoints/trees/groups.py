"""Leaves and tensors that one rule maps to each other."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.trees.layout import PLUS, Layout, Moves
from jaxlowprec.checkpoints.trees.rule import Rule, filled


@dataclasses.dataclass(frozen=True)
class Place:
    """One tensor of a group.

    Attributes:
        name: the tensor's name.
        counts: the indices of the leaf's axes that count tensors.
        part: which part of a leaf that is split.
    """

    name: str
    counts: Mapping[str, int]
    part: int


@dataclasses.dataclass(frozen=True)
class Group:
    """The leaves of a rule that have the same numbers in their paths: one, or those that are joined.

    Attributes:
        rule: the rule.
        values: the numbers in the paths.
        paths: the leaves' paths.
        leaves: the leaves.
        moves: how each becomes its part of a tensor.
    """

    rule: Rule
    values: Mapping[str, int]
    paths: tuple[str, ...]
    leaves: tuple[Any, ...]
    moves: tuple[Moves, ...]

    @property
    def layout(self) -> Layout:
        """The leaves' layout."""
        return self.moves[0].layout

    @property
    def path(self) -> str:
        """The leaves' paths, for messages."""
        return " + ".join(self.paths)

    @property
    def counts(self) -> dict[str, int]:
        """How many tensors there are for each axis that counts them."""
        return self.moves[0].counts

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, with braces for what the leaves count."""
        return tuple(filled(name, self.values) for name in self.rule.names)

    @property
    def holds_matrices(self) -> bool:
        """Whether the leaves may be quantised."""
        return self.rule.is_kernel and self.layout.holds_matrices

    def indices(self) -> list[dict[str, int]]:
        """The indices of the axes that count tensors, in order."""
        counts = self.counts
        return [dict(zip(counts, each, strict=True)) for each in itertools.product(*map(range, counts.values()))]

    def places(self) -> list[Place]:
        """The tensors, index by index, and part by part for each index."""
        names = self.names
        return [Place(filled(name, at), at, part) for at in self.indices() for part, name in enumerate(names)]

    def path_of(self, place: Place) -> str:
        """The leaf's path, with what of it the tensor holds."""
        index = "".join(f"[{i}]" for i in place.counts.values())
        part = f" part {place.part + 1} of {len(self.rule.names)}" if len(self.rule.names) > 1 else ""
        return f"{self.path}{index}{part}"

    def shape_of(self, place: Place) -> tuple[int, ...]:
        """The tensor's shape."""
        return merged_shape(self.layout, self.moves, place.part)


def groups(who: str, rules: Sequence[Rule], found: Mapping[str, Any]) -> list[Group]:
    """The groups of a tree's leaves, in their order.

    Arguments:
        who: the caller, for errors.
        rules: the mapping's rules; a leaf has the first that matches its path.
        found: the leaves by their paths.

    Raises:
        ValueError: leaves that no rule matches or whose shape does not fit, tensors of two groups that have one name,
            and leaves of a joined tensor that are missing or do not go together.
    """
    members: dict[tuple[int, tuple[tuple[str, int], ...]], dict[int, str]] = {}
    unknown = []
    for path in found:
        match = next(((n, hit) for n, rule in enumerate(rules) if (hit := rule.bound(path))), None)
        if match is None:
            unknown.append(path)
            continue
        number, (place, values) = match
        members.setdefault((number, tuple(values.items())), {})[place] = path
    if unknown:
        known = ", ".join(dict.fromkeys(path for rule in rules for path in rule.paths))
        raise ValueError(f"{who}: no rule is about {', '.join(unknown)}; there are rules for {known}")
    made = [_group(who, rules[number], dict(values), paths, found) for (number, values), paths in members.items()]
    names = collections.Counter(name for group in made for name in group.names)
    if double := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"{who}: several leaves are called {', '.join(double)}")
    return made


def _group(who: str, rule: Rule, values: dict[str, int], paths: Mapping[int, str], found: Mapping[str, Any]) -> Group:
    if missing := [path for place, path in enumerate(rule.paths) if place not in paths]:
        raise ValueError(
            f"{who}: {rule.names[0]} joins several leaves; the tree has {', '.join(paths.values())} but no "
            f"{', '.join(filled(path, values) for path in missing)}"
        )
    ordered = tuple(paths[place] for place in range(len(rule.paths)))
    leaves = tuple(found[path] for path in ordered)
    moves = tuple(rule.moves(path, leaf) for path, leaf in zip(ordered, leaves, strict=True))
    group = Group(rule, values, ordered, leaves, moves)
    _require_alike(who, group)
    return group


def _require_alike(who: str, group: Group) -> None:
    """Raises ValueError unless leaves that are joined differ only along the axis that joins them."""

    def kind(moves: Moves, leaf: Any) -> object:
        sizes = {axis: size for axis, size in moves.file_sizes().items() if axis != group.layout.joined}
        return moves.layout, moves.counts, sizes, isinstance(leaf, QuantizedArray)

    kinds = [kind(moves, leaf) for moves, leaf in zip(group.moves, group.leaves, strict=True)]
    if any(each != kinds[0] for each in kinds):
        shapes = ", ".join(str(moves.shape) for moves in group.moves)
        raise ValueError(
            f"{who}: {group.path} are joined to {group.names[0]} by {group.layout.text!r} and have shapes {shapes}; "
            "they may differ only along the axis with the +, and all or none are quantised"
        )


def merged_shape(layout: Layout, moves: Sequence[Moves], part: int = 0) -> tuple[int, ...]:
    """The shape of the tensor that parts are joined to."""
    sizes = moves[0].file_sizes(part)
    if not layout.splits_leaf and layout.joined is not None:
        many = len(moves) if layout.joined == PLUS else sum(each.file_sizes()[layout.joined] for each in moves)
        sizes = sizes | {layout.joined: many}
    shape = []
    for group in layout.right:
        size = 1
        for axis in group:
            size *= sizes[axis]
        shape.append(size)
    return tuple(shape)


def right_axes(layout: Layout) -> tuple[str, ...]:
    """The tensor's axes, unmerged."""
    return tuple(axis for group in layout.right for axis in group)


def unmerged(array: Any, layout: Layout, moves: Sequence[Moves], part: int) -> Iterator[Any]:
    """Splits a file's tensor back into its leaves: the inverse of joining and merging leaves.

    Arguments:
        array: the tensor.
        layout, moves: how the leaves become it.
        part: which part of a leaf it is, if the leaf is split.
    """
    axes = right_axes(layout)
    sizes = moves[0].file_sizes(part)
    if layout.joined is not None and not layout.splits_leaf:
        parts = [1 if layout.joined == PLUS else each.file_sizes()[layout.joined] for each in moves]
        sizes = sizes | {layout.joined: sum(parts)}
        array, at, begin = array.reshape([sizes[axis] for axis in axes]), axes.index(layout.joined), 0
        for size in parts:
            index = begin if layout.joined == PLUS else slice(begin, begin + size)
            yield array[(*[slice(None)] * at, index)]
            begin += size
        return
    yield array.reshape([sizes[axis] for axis in axes])
