"""Rows in groups, quantised on NVIDIA GPUs by the kernels that quantise a matrix in tiles of 128 rows.

    rows --gather--> [S, 128, C], a matrix per slot --kernel--> results per slot --gather--> the layout of `reference`

A slot has the amax, the key and the indices of its group. The copy of x, up to 128 * E rows larger than x, lives until
the kernel has run; so do the kernel's results. Group sizes stay on the device. There are no batch axes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.formats import BLOCK
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.ops.amax import op as amax_op
from jaxlowprec.ops.amax.wanted import Amaxes
from jaxlowprec.ops.grouped_matmul.groups import Groups, Slots
from jaxlowprec.ops.grouped_matmul.reference import largest_of, where_else_zero
from jaxlowprec.ops.quantize import op as quantize_op

TILE = 128  # rows of a kernel's tile; a multiple of every block


def amax(plain: bool, hadamard: Hadamard | None, x: jax.Array, sizes: jax.Array) -> list[jax.Array]:
    """As `reference.amax`."""
    slots = Slots.of(Groups.of(sizes, x.shape[0]), TILE)
    found = amax_op.native_call(Amaxes(plain, hadamard), slots.take(x, TILE), vmap_method="expand_dims")
    return [largest_of(of_slots, slots.group, sizes.shape[0]) for of_slots in found]


def quantize(spec: Any, x: jax.Array, sizes: jax.Array, *operands: jax.Array) -> list[jax.Array]:
    """The op of `quantize_op.py`, on the operands that it documents."""
    groups = Groups.of(sizes, x.shape[0])
    slots = Slots.of(groups, TILE)
    of_slots = [amax[slots.group] for amax in operands[: spec.tensors]]
    of_slots += _random(spec, slots, operands[spec.tensors :])
    directions = spec.rowwise, spec.columnwise
    options = {"encode_scale_given": spec.encode_scale_given, "ragged_rows": False, "ragged_columns": False}
    matrices = quantize_op.QuantizeSpec(
        spec.format, *directions, spec.hadamard, spec.stochastic, **options, eden=spec.eden
    )
    found = quantize_op.native_call(matrices, slots.take(x, TILE), *of_slots, vmap_method="expand_dims")
    results: list[jax.Array] = []
    for i in range(spec.directions):
        lay_out = _rows if i == 0 and spec.rowwise else _columns
        data, scale = found[2 * i : 2 * i + 2]
        results += lay_out(groups, spec.format, data, scale)
    return results


def _random(spec: Any, slots: Slots, random: tuple[jax.Array, ...]) -> list[jax.Array]:
    """Keys and indices of lines and sixteens of each slot; along the rows they are counted within its group."""
    if not spec.stochastic:
        return []

    def along_rows(ids, length):  # [T / length] -> [S, TILE / length]; the indices of padding do not matter
        count = TILE // length
        return ids[jnp.minimum(slots.within[:, None] * count + jnp.arange(count), ids.shape[0] - 1)]

    words, *ids = random
    found = [words[slots.group]]
    if spec.rowwise:
        found += [along_rows(ids[0], 1), ids[1]]
    if spec.columnwise:
        found += [ids[-2], along_rows(ids[-1], BLOCK)]
    return found


def _places_of_rows(groups: Groups) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[T]: the slot of each row, its place in the slot, and whether it is in a group."""
    group = groups.of_rows()
    there, group = group < groups.start.shape[0], jnp.minimum(group, groups.start.shape[0] - 1)
    local = jnp.arange(groups.rows, dtype=jnp.int32) - groups.start[group]
    return groups.first_slots(TILE)[group] + local // TILE, local % TILE, there


def _rows(groups: Groups, fmt: Any, data: jax.Array, scale: jax.Array) -> list[jax.Array]:
    """Codes [S, TILE, bytes] and scales, of rows -> as `reference.quantize_rowwise`."""
    slot, row, there = _places_of_rows(groups)

    def of_rows(a):
        return where_else_zero(there[:, None], a[slot, row])

    return [of_rows(data), _tensor_scales(groups, scale) if fmt.scaling == "tensor" else of_rows(scale)]


def _columns(groups: Groups, fmt: Any, data: jax.Array, scale: jax.Array) -> list[jax.Array]:
    """Codes [S, C, bytes] and scales, of columns -> as `reference.quantize_columnwise`."""
    blocks = Slots.of(groups, max(fmt.length, BLOCK))
    used, in_slot = blocks.valid > 0, TILE // max(fmt.length, BLOCK)
    slot = jnp.minimum(groups.first_slots(TILE)[blocks.group] + blocks.within // in_slot, data.shape[0] - 1)

    def of_blocks(a):  # [S, C, in_slot * n] -> [C, blocks, n]
        pieces = a.reshape(*a.shape[:2], in_slot, a.shape[-1] // in_slot)[slot, :, blocks.within % in_slot]
        return jnp.swapaxes(where_else_zero(used[:, None, None], pieces), 0, 1)

    if fmt.packed:
        codes = of_blocks(data)
        codes = codes.reshape(data.shape[1], codes.shape[-2] * codes.shape[-1])
    else:
        slot_of_row, row, there = _places_of_rows(groups)
        codes = where_else_zero(there[:, None], data[slot_of_row, :, row]).T
    if fmt.scaling == "tensor":
        return [codes, _tensor_scales(groups, scale)]
    return [codes, of_blocks(scale)[..., 0]]


def _tensor_scales(groups: Groups, scale: jax.Array) -> jax.Array:
    """Scales of the slots [S] -> one per group, 1 where the group is empty."""
    first = jnp.minimum(groups.first_slots(TILE), scale.shape[0] - 1)
    return jnp.where(groups.count > 0, scale[first], 1.0)
