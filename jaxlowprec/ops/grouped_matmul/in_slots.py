"""Quantised rows in groups as a batch of quantised matrices, each of one group."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.formats import BLOCK
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.ops.grouped_matmul.api import GroupedQuantizedArray
from jaxlowprec.ops.grouped_matmul.groups import Groups, Slots
from jaxlowprec.ops.grouped_matmul.reference import where_else_zero


class InSlots(NamedTuple):
    """Slots of rows [T, C] in groups, as matrices.

    Attributes:
        slots: where they lie.
        block: rows of a slot.
        quantized: batch [S] of [block, C]. Rows that a slot does not have are zero bytes, if they are not rotated.
    """

    slots: Slots
    block: int
    quantized: QuantizedArray

    def take(self, x: jax.Array) -> jax.Array:
        """x [T, C] -> [S, block, C], zeros where a slot has no row."""
        return self.slots.take(x, self.block)

    def rows(self) -> jax.Array:
        """int32: how many rows were quantised, those included that fill a group's last rotation."""
        rotation = self.quantized.hadamard
        return self.slots.valid.sum() if rotation is None else self.block * (self.slots.valid > 0).sum()


def in_slots(q: GroupedQuantizedArray, tensor_block: int = BLOCK) -> InSlots:
    """The array's slots. Without batch axes.

    Arguments:
        tensor_block: rows of a slot, of a columnwise array with one scale for each group, or for each of its columns: a
            multiple of 16.
    """
    fmt, groups = q.format, Groups.of(q.sizes, q.rows)
    block = BLOCK
    if q.columnwise:
        block = tensor_block if fmt.scaling in ("tensor", "rows") else fmt.length
    slots = Slots.of(groups, block)
    amax = q.amax
    if amax is not None:
        amax = _take(slots, amax[:, None], block)[..., 0] if fmt.row_scaled else amax[slots.group]
    if not q.columnwise:
        data = _take(slots, q.data, block)
        scale = q.scale[slots.group] if fmt.scaling == "tensor" else _take(slots, q.scale, block)
    else:
        if fmt.packed:
            data = jnp.moveaxis(q.data.reshape(q.columns, -1, block // 2), 0, 1)
        else:
            data = jnp.swapaxes(_take(slots, q.data.T, block), -1, -2)
        scale = q.scale[slots.group] if fmt.scaling in ("tensor", "rows") else q.scale.T[..., None]
    axis, shape = -2 if q.columnwise else -1, (block, q.columns)
    made = QuantizedArray(data, scale, amax, None, fmt, shape, jnp.dtype("float32"), axis, q.hadamard)
    return InSlots(slots, block, made)


def taken_rows(q: GroupedQuantizedArray, rows: jax.Array) -> QuantizedArray:
    """Some rows of a rowwise array without batch axes: batch [n] of [1, C]. Rows in no group decode to zeros."""
    group = jnp.minimum(Groups.of(q.sizes, q.rows).of_rows()[rows], q.sizes.shape[0] - 1)
    scale = q.scale[group] if q.format.scaling == "tensor" else q.scale[rows][:, None]
    amax = None if q.amax is None else q.amax[rows][:, None] if q.format.row_scaled else q.amax[group]
    shape = (1, q.columns)
    return QuantizedArray(q.data[rows][:, None], scale, amax, None, q.format, shape, jnp.dtype("float32"), -1, None)


def _take(slots: Slots, x: jax.Array, block: int) -> jax.Array:
    """Codes or scales of rows, in slots; zero bytes where a slot has no row."""
    offset = jnp.arange(block, dtype=jnp.int32)
    rows = jnp.clip(slots.row[:, None] + offset, 0, max(x.shape[0] - 1, 0))
    return where_else_zero((offset < slots.valid[:, None])[..., None], x[rows])
