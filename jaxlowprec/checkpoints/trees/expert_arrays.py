"""Quantised kernels of experts, and the arrays that hold all of a layer's experts under one name in a file.

A leaf is [E, K, N], quantised along K. A file's array has the columns of one leaf, or those of several in turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.trees.groups import Group
from jaxlowprec.checkpoints.trees.layout import PLUS


def holds_expert_arrays(group: Group) -> bool:
    """Whether the tensor of a group is such an array."""
    left, right = group.layout.left, group.layout.right
    if len(left) != 3 or len(right) != 3 or not group.paths[0].endswith("kernel"):
        return False
    return left[:2] == right[:2] and right[2] in (left[2], (*left[2], PLUS))


def columns_split(group: Group, q: QuantizedArray) -> list[QuantizedArray]:
    """What a file's array [E, K, N] has of each leaf."""
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
