"""Quantised matrices, whose codes and scales are joined and split as arrays are: by rows, or by columns of experts.

A leaf of experts is [E, K, N], quantised along K. A file's array has the columns of one leaf, or those of several in
turn.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.arrays.formats import Format
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.trees.groups import Group
from jaxlowprec.checkpoints.trees.layout import PLUS, Layout, Moves, stacked


def field_moves(moves: Moves, shape: Sequence[int], layout: Layout) -> Moves:
    """The moves of a leaf for one of its fields, such as its scales, whose sizes are proportional to the leaf's."""
    unit = math.gcd(*moves.shares)
    return Moves(layout, tuple(shape), tuple(share // unit for share in moves.shares))


def has_tensor_scale(q: QuantizedArray) -> bool:
    """Whether a whole matrix has one scale, which is then not the scale of some rows.

    >>> import jaxlowprec as jlp
    >>> [has_tensor_scale(jlp.quantize(jnp.ones((2, 32)), fmt)) for fmt in (jlp.Float8Tensor(), jlp.MXFP8())]
    [True, False]
    """
    return q.scale.ndim == q.data.ndim - 2


def require_whole_tiles(path: str, fmt: Format, sizes: Sequence[int]) -> None:
    """Raises ValueError if a scale covers rows of two parts.

    Arguments:
        path: the leaf's path.
        fmt: its format.
        sizes: the numbers of rows of the parts.
    """
    if fmt.tiles and any(size % fmt.length for size in sizes[:-1]):
        raise ValueError(
            f"{path} is quantised in tiles of {fmt.length} rows, and its parts have {', '.join(map(str, sizes))}; "
            "needs multiples of that, or a format with a scale for each row"
        )


def rows_joined(group: Group, parts: Sequence[QuantizedArray]) -> QuantizedArray:
    """Matrices [N, K] below each other as one. Raises ValueError if they have different formats or tensor scales."""
    first = parts[0]
    if len(parts) == 1:
        return first
    require_whole_tiles(group.path, first.format, [part.shape[0] for part in parts])
    statics = {(part.format, part.matrix_shape[1], part.hadamard) for part in parts}
    if len(statics) > 1 or first.signs is not None:
        raise ValueError(f"{group.path} are quantised in different formats; one tensor needs one format")
    _require_one_scale(group.path, parts)

    def joined(name: str) -> Any:
        arrays = [getattr(part, name) for part in parts]
        return None if arrays[0] is None else jnp.concatenate(arrays)

    matrix = (sum(part.shape[0] for part in parts), first.shape[1])
    scale = first.scale if has_tensor_scale(first) else joined("scale")
    return dataclasses.replace(
        first, matrix_shape=matrix, data=joined("data"), scale=scale, zero_point=joined("zero_point")
    )


def rows_split(group: Group, q: QuantizedArray) -> list[QuantizedArray]:
    """The inverse of `rows_joined`: each leaf's rows."""
    if len(group.moves) == 1:
        return [q]
    sizes = [moves.file_sizes()[str(group.layout.joined)] for moves in group.moves]
    require_whole_tiles(group.path, q.format, sizes)
    made, begin = [], 0
    for size in sizes:
        fields: dict[str, Any] = {}
        for name in ("data", "zero_point") if has_tensor_scale(q) else ("data", "scale", "zero_point"):
            array = getattr(q, name)
            unit = q.format.length if q.format.tiles and name == "scale" else 1
            fields[name] = None if array is None else array[begin // unit : -(-(begin + size) // unit)]
        made.append(dataclasses.replace(q, matrix_shape=(size, q.shape[1]), **fields))
        begin += size
    return made


def leaf_of_rows(group: Group, moves: Moves, matrices: Sequence[QuantizedArray]) -> QuantizedArray:
    """A leaf [.., K, N] of the matrices [N, K] of all its tensors, part by part for each index."""
    layout, parts = group.layout, len(group.rule.names)
    first = matrices[0]
    by_rows = layout.splits_leaf and layout.joined != PLUS
    if by_rows:
        require_whole_tiles(group.path, first.format, [matrix.shape[0] for matrix in matrices[:parts]])
        for begin in range(0, len(matrices), parts):
            _require_one_scale(group.path, matrices[begin : begin + parts])

    def field(name: str, arrangement: Layout) -> Any:
        arrays = [getattr(matrix, name) for matrix in matrices]
        if arrays[0] is None:
            return None
        taken = parts if arrangement.splits_leaf and arrangement.joined is not None else 1
        like = Moves(arrangement, ())
        made = [like.back(arrays[begin : begin + taken]) for begin in range(0, len(arrays), parts)]
        return stacked(made, moves.counts, arrangement)

    batch, by_row = layout.of_batch(), layout.of_rows()
    fields: dict[str, Any] = {name: field(name, by_row) for name in ("data", "zero_point")}
    fields["scale"] = field("scale", batch if has_tensor_scale(first) else by_row)
    amax = field("amax", batch)
    rows = sum(matrix.shape[0] for matrix in matrices[:parts]) if by_rows else first.shape[0]
    return dataclasses.replace(first, **fields, amax=amax, matrix_shape=(first.shape[1], rows), axis=-2)


def _require_one_scale(path: str, parts: Sequence[QuantizedArray]) -> None:
    """Raises ValueError if matrices that one tensor holds have different scales of a whole matrix."""
    _require_equal(path, "amax", [part.amax for part in parts])
    if has_tensor_scale(parts[0]):
        _require_equal(path, "scale", [part.scale for part in parts])


def _require_equal(path: str, what: str, values: Sequence[jax.Array | None]) -> None:
    if values[0] is None:
        return
    found = [np.asarray(value) for value in values]
    if any(not np.array_equal(value, found[0]) for value in found):
        shown = ", ".join(f"{float(value.max()):.6g}" for value in found)
        raise ValueError(
            f"{path}: the parts have tensor scales of {what} {shown}, and one tensor has one; quantise them with the "
            "same amax=, the largest"
        )


def holds_expert_arrays(group: Group) -> bool:
    """Whether the tensor of a group is such an array."""
    left, right = group.layout.left, group.layout.right
    if len(left) != 3 or len(right) != 3 or not group.paths[0].endswith("kernel"):
        return False
    return left[:2] == right[:2] and right[2] in (left[2], (*left[2], PLUS))


def columns_split(group: Group, q: QuantizedArray) -> list[QuantizedArray]:
    """The leaves of a file's array [E, K, N], whose columns they share in turn."""
    count = len(group.moves)
    rows = q.shape[-1] // count
    return [
        dataclasses.replace(q, data=q.data[:, n::count], scale=q.scale[:, n::count], matrix_shape=(q.shape[-2], rows))
        for n in range(count)
    ]


def columns_joined(group: Group, leaves: Sequence[QuantizedArray]) -> QuantizedArray:
    """The inverse of `columns_split`. Raises ValueError if formats differ or hold more than codes and scales."""
    first = leaves[0]
    if any(leaf.format != first.format or leaf.axis != -2 for leaf in leaves):
        raise ValueError(f"{group.path} are quantised in different formats or along N; one array needs one format")
    if first.amax is not None or first.zero_point is not None or first.hadamard is not None:
        raise ValueError(f"{group.path} is quantised to {first.format}; arrays of experts hold codes and scales only")

    def in_turn(name: str) -> Any:
        fields = [getattr(leaf, name) for leaf in leaves]
        return jnp.stack(fields, axis=2).reshape(fields[0].shape[0], -1, *fields[0].shape[2:])

    shape = first.shape[-2], first.shape[-1] * len(leaves)
    return dataclasses.replace(first, data=in_turn("data"), scale=in_turn("scale"), matrix_shape=shape)
