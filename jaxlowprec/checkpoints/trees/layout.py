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
import re

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
