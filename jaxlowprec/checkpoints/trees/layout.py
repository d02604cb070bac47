"""How a leaf's axes become a tensor's: a notation, and the moves that it stands for.

    D N -> N D             a kernel [D, N] is the weight [N, D]
    D H d -> (H d) D       heads of a kernel [D, H, d] are merged to rows of the weight
    i D N -> N D           the leaf's first axis counts what {i} in the name stands for: one tensor for each
    D N -> +N D            several leaves are joined along N to one tensor, one after the other
    D +N -> N D            the reverse: one leaf is split along N to several tensors
    + D N -> N D           the leaf's first axis counts the tensors that it is split to
    E D N -> E D (N +)     two leaves are joined with their columns in turn: gate, up, gate, up
    D H (d 2) -> (H 2 d) D a number is an axis of that size

An axis of a name in brackets is merged, in row-major order. Alternatives with different numbers of axes are separated
by "|". No move changes a number, and each has an exact inverse.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxlowprec.arguments import as_array

Groups = tuple[tuple[str, ...], ...]

PLUS = "+"
_TOKEN = re.compile(r"\s*(\(|\)|\+?[A-Za-z]\w*|\+|\d+)")


@dataclasses.dataclass(frozen=True)
class Layout:
    """One arrangement.

    Attributes:
        text: as it is written.
        left: the leaf's axes; each is the tuple of the axes that it merges, of which most are only one.
        right: the tensor's axes, alike.
        joined: the axis along which parts are joined: its name, or "+" if it counts the parts; None: there are none.
        splits_leaf: whether the leaf is what is split to parts, and not the tensor.

    >>> layout, = parsed("D +N -> N D")
    >>> layout.left, layout.right, layout.joined, layout.splits_leaf
    ((('D',), ('N',)), (('N',), ('D',)), 'N', True)
    """

    text: str
    left: Groups
    right: Groups
    joined: str | None = None
    splits_leaf: bool = False

    @property
    def rank(self) -> int:
        """The number of the leaf's axes."""
        return len(self.left)

    @property
    def counted(self) -> tuple[str, ...]:
        """Axes that only the leaf has: each index of them has a tensor of its own."""
        return tuple(axis for axis in flat(self.left) if axis not in flat(self.right) and axis != PLUS)

    @property
    def is_identity(self) -> bool:
        """Whether the tensor has the leaf's axes in their order, except for those that count tensors."""
        return tuple(group for group in self.left if group[0] not in self.counted) == self.right

    @property
    def holds_matrices(self) -> bool:
        """Whether each tensor is a transposed matrix of the leaf, so that the leaf's last axes may be quantised."""
        if len(self.right) != 2 or len(self.left) < 2 or any(len(group) > 1 for group in (*self.left, *self.right)):
            return False
        (rows,), (columns,) = self.right
        return self.left[-2:] == ((columns,), (rows,)) and PLUS not in self.right[0] and self.joined != columns

    def of_rows(self) -> Layout:
        """The layout of a quantised leaf's codes [..., N, K], whose last axes are in the file's order."""
        return dataclasses.replace(self, left=(*self.left[:-2], *self.right))

    def of_batch(self) -> Layout:
        """The layout of a number for each matrix."""
        counts = self.joined == PLUS and self.splits_leaf
        return dataclasses.replace(
            self, left=self.left[:-2], right=(), joined=PLUS if counts else None, splits_leaf=counts
        )


@functools.lru_cache(maxsize=1024)
def parsed(text: str) -> tuple[Layout, ...]:
    """The alternatives of a layout. Raises ValueError if it isn't one.

    >>> [layout.rank for layout in parsed("D N -> N D | D H d -> (H d) D")]
    [2, 3]
    """
    found = tuple(_parsed(part.strip()) for part in text.split("|"))
    if len({layout.rank for layout in found}) < len(found):
        raise ValueError(f"layout {text!r}: two alternatives have the same number of axes; needs different ones")
    return found


def _parsed(text: str) -> Layout:
    sides = text.split("->")
    if len(sides) != 2:
        raise ValueError(f"layout {text!r}: needs the leaf's axes, \"->\" and the tensor's axes")
    (left, from_left), (right, from_right) = (_side(text, side) for side in sides)
    if from_left and from_right:
        raise ValueError(f"layout {text!r}: both sides have a +; either the leaf or the tensor has parts")
    for side in (left, right):
        if len(set(flat(side))) < len(flat(side)):
            raise ValueError(f"layout {text!r}: an axis occurs twice on one side")
    if unknown := [axis for axis in flat(right) if axis != PLUS and axis not in flat(left)]:
        raise ValueError(f"layout {text!r}: the leaf has no axis {', '.join(unknown)}")
    if any(len(group) > 1 and PLUS in group for group in left):
        raise ValueError(f"layout {text!r}: the leaf's + is merged with another axis; it needs to be alone")
    layout = Layout(text, left, right, from_left or from_right, from_left is not None)
    if any(len(group) > 1 and set(group) & set(layout.counted) for group in left):
        raise ValueError(f"layout {text!r}: an axis that counts tensors is merged with another; it needs to be alone")
    return layout


def _side(text: str, side: str) -> tuple[Groups, str | None]:
    """The axes of one side, and the joined one."""
    groups: list[tuple[str, ...]] = []
    inside: list[str] | None = None
    joined: list[str] = []
    position = 0
    side = side.strip()
    while position < len(side):
        match = _TOKEN.match(side, position)
        if match is None:
            raise ValueError(
                f"layout {text!r}: {side[position:]!r} is not understood; needs names, (, ), + and numbers"
            )
        token, position = match[1], match.end()
        if token in "()":
            if (token == "(") != (inside is None):
                raise ValueError(f"layout {text!r}: brackets within brackets, or one without the other")
            if inside is not None:
                groups.append(tuple(inside))
            inside = [] if token == "(" else None
            continue
        name = token if token == PLUS else token.removeprefix(PLUS)
        if token.startswith(PLUS):
            joined.append(name)
        if inside is None:
            groups.append((name,))
        else:
            inside.append(name)
    if inside is not None or len(joined) > 1:
        raise ValueError(f"layout {text!r}: a bracket is open, or there are several +")
    return tuple(groups), joined[0] if joined else None


def flat(groups: Groups) -> tuple[str, ...]:
    """The axes of all groups in order."""
    return tuple(axis for group in groups for axis in group)


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
        """The array that `taken` returned, with the tensor's axes, unmerged."""
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
        return f"shape {list(self.shape)} and does not fit the layout {self.layout.text!r}: {why}"


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
