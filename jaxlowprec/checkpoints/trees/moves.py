"""The moves of a layout for leaves of given sizes: parts of leaves to tensors, and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxlowprec.arguments import as_array
from jaxlowprec.checkpoints.trees.layout import PLUS, Layout, flat, parsed

__all__ = ["Moves", "joined", "merged", "parsed", "stacked"]


@dataclasses.dataclass(frozen=True)
class Moves:
    """A layout with the sizes of a leaf: takes parts of leaves to tensors and back.

    Attributes:
        layout: the layout.
        shape: the leaf's shape.
        shares: the parts of a leaf that is split, as proportions of the joined axis; for other leaves (1,).
        sizes: sizes that axes have in the tensor.
        padded: those of them that may be larger in the leaf, whose rest the tensor lacks.

    >>> moves = Moves(parsed("D +N -> N D")[0], (2, 6), shares=(2, 1))
    >>> [moves.out(np.arange(12).reshape(2, 6), {}, part).shape for part in (0, 1)]
    [(4, 2), (2, 2)]
    """

    layout: Layout
    shape: tuple[int, ...]
    shares: tuple[int, ...] = (1,)
    sizes: tuple[tuple[str, int], ...] = ()
    padded: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """How many tensors there are for each axis that counts them."""
        counted = self.layout.counted
        pairs = zip(self.layout.left, self.shape, strict=True)
        return {group[0]: size for group, size in pairs if group[0] in counted}

    def file_sizes(self, part: int = 0) -> dict[str, int]:
        """The size of each axis in the tensor."""
        sizes = self._leaf_sizes(part)
        return sizes | {axis: size for axis, size in self.sizes if axis in self.padded and axis in sizes}

    def taken(self, leaf: Any, counts: Mapping[str, int], part: int = 0) -> Any:
        """The smallest slice of the leaf that has the part, with the axes that count tensors gone."""
        sizes = self.file_sizes(part)
        index: list[int | slice] = []
        for group in self.layout.left:
            if group[0] in counts:
                index.append(counts[group[0]])
            elif group == (PLUS,):
                index.append(part)
            elif group == (self.layout.joined,) and self.layout.splits_leaf:
                begin = self._begin(part)
                index.append(slice(begin, begin + sizes[group[0]]))
            elif group[0] in self.padded:
                index.append(slice(0, sizes[group[0]]))
            else:
                index.append(slice(None))
        whole = all(isinstance(i, slice) and i == slice(None) for i in index)
        return leaf if whole else leaf[tuple(index)]

    def out(self, leaf: Any, counts: Mapping[str, int], part: int = 0) -> Any:
        """A part of the leaf with the tensor's axes, unmerged."""
        return self.arranged(self.taken(leaf, counts, part), part)

    def arranged(self, taken: Any, part: int = 0) -> Any:
        """What `taken` returned, with the tensor's axes, unmerged."""
        left = tuple(axis for axis in self._left if axis != PLUS)
        inner = self._inner_join
        sizes = self.file_sizes(part) | ({self.layout.joined: sum(self.shares)} if inner else {})
        array = taken.reshape([sizes[axis] for axis in left])
        if inner:
            at, begin = left.index(str(self.layout.joined)), self._begin(part)
            array = array[(*[slice(None)] * at, slice(begin, begin + self.shares[part]))]
        return array.transpose([left.index(axis) for axis in self._right])

    def back(self, parts: Sequence[Any]) -> Any:
        """The inverse of `out` for all parts: the leaf without the axes that count tensors."""
        left, right = self._left, self._right
        inner = tuple(axis for axis in left if axis != PLUS)
        arrays = [part.transpose([right.index(axis) for axis in inner]) for part in parts]
        array = joined(arrays, left, self.layout.joined) if self.layout.splits_leaf else arrays[0]
        widths = [(0, self._padding(axis)) if axis in self.padded else (0, 0) for axis in left]
        if any(after for _, after in widths):
            array = (np if isinstance(array, np.ndarray) else jnp).pad(array, widths)
        groups = [group for group in self.layout.left if group[0] not in self.layout.counted]
        return merged(array, left, groups)

    @property
    def _left(self) -> tuple[str, ...]:
        """The leaf's axes, unmerged, without those that count tensors."""
        return tuple(axis for axis in flat(self.layout.left) if axis not in self.layout.counted)

    @property
    def _right(self) -> tuple[str, ...]:
        """The tensor's axes, unmerged; the axis that counts parts is not one of a part's."""
        return tuple(axis for axis in flat(self.layout.right) if axis != PLUS)

    @property
    def _inner_join(self) -> bool:
        """Whether the leaf is split along an axis that is merged with others."""
        layout = self.layout
        return layout.splits_leaf and layout.joined != PLUS and (layout.joined,) not in layout.left

    def _padding(self, axis: str) -> int:
        return self._leaf_sizes(0)[axis] - self.file_sizes(0)[axis]

    def _begin(self, part: int) -> int:
        unit = 1 if self._inner_join else self._total() // sum(self.shares)
        return unit * sum(self.shares[:part])

    def _total(self) -> int:
        """The size of the joined axis in a leaf that is split."""
        return self.shape[self.layout.left.index((str(self.layout.joined),))]

    def _leaf_sizes(self, part: int) -> dict[str, int]:
        """The size of each axis in a part of the leaf. Raises ValueError if the layout does not fit."""
        layout, known = self.layout, dict(self.sizes)
        sizes: dict[str, int] = {}
        for group, size in zip(layout.left, self.shape, strict=True):
            if group == (PLUS,):
                if size != len(self.shares):
                    raise ValueError(self._misfit(f"its axis + has {size} parts; needs {len(self.shares)}"))
                continue
            if group == (layout.joined,) and layout.splits_leaf:
                if size % sum(self.shares):
                    wanted = " : ".join(map(str, self.shares))
                    raise ValueError(self._misfit(f"its axis {group[0]}, {size}, cannot be split {wanted}"))
                size = size // sum(self.shares) * self.shares[part]
            asked = len(group) > 1 or group[0].isdigit()
            given = {axis: self._said(axis, known) for axis in group} if asked else {}
            fixed = {axis: n for axis, n in given.items() if n is not None}
            rest, product = [axis for axis in group if axis not in fixed], math.prod(fixed.values())
            if len(rest) > 1:
                raise ValueError(
                    self._misfit(f"of {' '.join(rest)} only one size can be found; give sizes of the others")
                )
            if not product or size % product or (not rest and size != product):
                raise ValueError(
                    self._misfit(f"its axis ({' '.join(group)}) has {size}; needs a multiple of {product}")
                )
            sizes |= fixed | {axis: size // product for axis in rest}
            if self._inner_join and layout.joined in group:
                sizes[str(layout.joined)] = self.shares[part]
        for axis, size in known.items():
            least = axis in self.padded and axis in sizes
            if axis in sizes and (sizes[axis] < size if least else sizes[axis] != size):
                needed = f"at least {size}" if least else size
                raise ValueError(self._misfit(f"its axis {axis} has {sizes[axis]}; needs {needed}"))
        return sizes

    def _said(self, axis: str, known: Mapping[str, int]) -> int | None:
        """An axis's size as far as the rule says it."""
        if axis.isdigit():
            return int(axis)
        return sum(self.shares) if axis == self.layout.joined and self._inner_join else known.get(axis)

    def _misfit(self, why: str) -> str:
        return f"shape {list(self.shape)} does not fit the layout {self.layout.text!r}: {why}"


def joined(parts: Sequence[Any], axes: Sequence[str], axis: str | None) -> Any:
    """Unmerged parts along an axis, or along a new one, "+", that counts them."""
    module = np if all(isinstance(part, np.ndarray) for part in parts) else jnp
    if axis is None:
        return parts[0]
    at = list(axes).index(axis)
    return module.stack(parts, at) if axis == PLUS else module.concatenate(parts, at)


def merged(array: Any, axes: Sequence[str], groups: Sequence[tuple[str, ...]]) -> Any:
    """An array with the axes of each group merged."""
    sizes = dict(zip(axes, array.shape, strict=True))
    return array.reshape([math.prod(sizes[axis] for axis in group) for group in groups])


def stacked(arrays: Sequence[Any], counts: Mapping[str, int], layout: Layout) -> Any:
    """Leaves without the axes that count tensors, in the order of their indices, as one leaf with these axes."""
    if not counts:
        return arrays[0]
    array = jnp.stack([as_array(array) for array in arrays])
    array = array.reshape((*counts.values(), *array.shape[1:]))
    places = [at for at, group in enumerate(layout.left) if group[0] in counts]
    return jnp.moveaxis(array, range(len(places)), places)
