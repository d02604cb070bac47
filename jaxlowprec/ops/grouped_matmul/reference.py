"""Quantisation and products of rows in groups, in pure JAX: the byte oracle. There are no batch axes.

Each group is quantised as a separate tensor, as `quantize` would: rowwise results row by row, columnwise ones in slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlowprec import wiring
from jaxlowprec.arrays.formats import BLOCK, Format
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.ops.amax import amax_of_matrices as matrix_amax
from jaxlowprec.ops.dequantize import code_values, scale_values
from jaxlowprec.ops.grouped_matmul.groups import Groups, Slots
from jaxlowprec.ops.hadamard import rotate_padded
from jaxlowprec.ops.quantize import lines
from jaxlowprec.ops.quantize.random_bits import Draws
from jaxlowprec.ops.quantize.reference import quantize_rows, tensor_factors
from jaxlowprec.ops.rounding import from_bits, magnitude_bits, rounded, widened
from jaxlowprec.ops.scaled_matmul.reference import exact_dot, integer_dot

CHUNK = 128  # rows that are multiplied together


def largest_of(amax: jax.Array, group: jax.Array, groups: int) -> jax.Array:
    """The largest amax [T, ...] per group, without rows in no group. Bits are compared: NaN is above infinity."""
    return from_bits(jax.ops.segment_max(magnitude_bits(amax), group, groups + 1)[:groups])


def amax(x: jax.Array, sizes: jax.Array, plain: bool, hadamard: Hadamard | None) -> list[jax.Array]:
    """x [T, C] -> float32 [E]: the amax of each group's rows, and after their rotation along the rows."""
    groups, experts = Groups.of(sizes, x.shape[0]), sizes.shape[0]
    if x.size == 0:
        return [jnp.zeros(experts)] * (plain + (hadamard is not None))
    found = [largest_of(matrix_amax(x[:, None, :]), groups.of_rows(), experts)] if plain else []
    if hadamard:
        slots = Slots.of(groups, BLOCK)
        rotated = rotate_padded(jnp.swapaxes(slots.take(x, BLOCK), -1, -2), hadamard)
        found.append(largest_of(matrix_amax(rotated), slots.group, experts))
    return found


def quantize_rowwise(
    x: jax.Array,
    sizes: jax.Array,
    fmt: Format,
    tensor: jax.Array | None,
    *,
    draws: Draws | None = None,
    eden: bool = False,
    encode_scale_given: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """x [T, C], sizes [E], amaxes or encode scales [E] -> codes [T, bytes], scales [T, blocks] (a tensor's: [E]).

    `tensor`: where rows have scales, their amaxes [T] if they go on elsewhere. `draws` has the words [E, 2] of each
    group; its indices along T are counted from a group's first row.
    """
    groups, experts = Groups.of(sizes, x.shape[0]), sizes.shape[0]
    group = groups.of_rows()
    there, group = (group < experts)[:, None], jnp.minimum(group, experts - 1)
    if draws is not None:
        local = draws.lines[jnp.arange(x.shape[0]) - groups.start[group]]
        draws = draws._replace(words=draws.words[group], lines=local[:, None])
    if fmt.scaling == "rows":
        data, scale = lines.quantize_lines(x[:, None, :], fmt, None if tensor is None else tensor[:, None], draws)
    else:
        of_row = None if tensor is None else tensor[group]
        data, scale = quantize_rows(x[:, None, :], fmt, of_row, encode_scale_given, draws, eden=eden)
    data = where_else_zero(there, data[:, 0])
    if fmt.scaling == "tensor":
        return data, _tensor_scales(tensor, groups, fmt, encode_scale_given)
    return data, where_else_zero(there, scale[:, 0])


def quantize_columnwise(
    x: jax.Array,
    sizes: jax.Array,
    fmt: Format,
    hadamard: Hadamard | None,
    tensor: jax.Array | None,
    *,
    draws: Draws | None = None,
    eden: bool = False,
    encode_scale_given: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Groups quantised along their rows: packed codes [C, slots * bytes], 8-bit ones [C, T], scales [C, slots].

    Scales of a tensor are [E], those of lines, of which each group has its own, [E, C, 1].
    """
    block = max(fmt.length, BLOCK)  # at least a sixteen of random bytes
    groups = Groups.of(sizes, x.shape[0])
    slots = Slots.of(groups, block)
    values = jnp.swapaxes(slots.take(x, block), -1, -2)
    if hadamard:
        values = rotate_padded(values, hadamard)
    if draws is not None:
        within = slots.within[:, None] * (block // BLOCK) + jnp.arange(block // BLOCK)
        within = jnp.minimum(within, draws.sixteens.shape[0] - 1)  # the draws of padding do not matter
        draws = draws._replace(words=draws.words[slots.group], sixteens=draws.sixteens[within])
    if fmt.scaling == "rows":
        amaxes = largest_of(widened(x), groups.of_rows(), sizes.shape[0])  # [E, C]
        data, _ = lines.quantize_lines(values, fmt, amaxes[slots.group], draws)
        scale = lines.stored_scales(amaxes, fmt)
    else:
        of_slot = None if tensor is None else tensor[slots.group]
        data, scale = quantize_rows(values, fmt, of_slot, encode_scale_given, draws, eden=eden)
    used = (slots.valid > 0)[:, None, None]
    if fmt.packed:
        data = jnp.moveaxis(where_else_zero(used, data), 0, -2)
        data = data.reshape(x.shape[1], data.shape[-2] * data.shape[-1])
    else:
        group = groups.of_rows()
        there, group = (group < sizes.shape[0])[:, None], jnp.minimum(group, sizes.shape[0] - 1)
        local = jnp.arange(x.shape[0]) - groups.start[group]
        slot = groups.start[group] // block + group + local // block
        data = where_else_zero(there, data[slot, :, local % block]).T
    if fmt.scaling == "tensor":
        return data, _tensor_scales(tensor, groups, fmt, encode_scale_given)
    if fmt.scaling == "rows":
        return data, scale
    return data, where_else_zero(used, scale)[..., 0].T


def _tensor_scales(tensor: Any, groups: Groups, fmt: Format, encode_scale_given: bool) -> jax.Array:
    """One scale per group; 1 where it is empty."""
    return jnp.where(groups.count > 0, tensor_factors(tensor, fmt, encode_scale_given).decode, 1.0)


def where_else_zero(there: jax.Array, x: jax.Array) -> jax.Array:
    """x where `there`, zero bytes elsewhere (float8_e8m0fnu has no zero)."""
    bits = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])
    return jax.lax.bitcast_convert_type(jnp.where(there, bits, jnp.zeros((), bits.dtype)), x.dtype)


# --- products


def by_chunks(
    sizes: jax.Array, rows: int, columns: int, dtype: jax.typing.DTypeLike, multiply: Callable, chunk: int = CHUNK
) -> jax.Array:
    """[rows, columns] of products of up to `chunk` rows of one group: multiply(first row, group) -> [chunk, columns].

    A chunk's result reaches beyond its group; the next one writes over that.
    """
    groups = Groups.of(sizes, rows)
    slots = Slots.of(groups, chunk).used()

    def step(out: jax.Array, slot: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        row, group = slot
        return jax.lax.dynamic_update_slice(out, multiply(row, group).astype(dtype), (row, jnp.int32(0))), None

    empty = jnp.zeros((rows + chunk, columns), dtype)
    out, _ = jax.lax.scan(step, empty, (jnp.where(slots.valid > 0, slots.row, rows), slots.group))
    there = (groups.of_rows() < sizes.shape[0])[:, None]
    return jnp.where(there, out[:rows], jnp.zeros((), dtype))


def chunk_of(x: jax.Array, chunk: int = CHUNK) -> Callable:
    """A function of a row: `chunk` rows of x [T, C] from that row on, zeros beyond the end."""
    padded = jnp.pad(x, ((0, chunk), (0, 0)))
    return lambda row: jax.lax.dynamic_slice_in_dim(padded, row, chunk)


def columns_of(x: jax.Array, at: jax.Array, count: int, valid: jax.Array) -> jax.Array:
    """`count` columns of codes or scales x [M, T] from `at` on; zero bytes after the first `valid`."""
    padded = jnp.pad(wiring.as_bytes(x), ((0, 0), (0, count)))
    found = jax.lax.dynamic_slice_in_dim(padded, at, count, axis=1)
    return wiring.from_bytes([where_else_zero(jnp.arange(count) < valid, found)], [x.dtype])[0]


def sums_within_groups(
    a: jax.Array, b: jax.Array, sizes: jax.Array, add: Callable | None = None, chunk: int = CHUNK
) -> jax.Array:
    """The sums of products of 8-bit codes a [M, T] and b [N, T] over the rows of each group, [E, M, N], without scales.

    Those of integers are exact, in int32; others are in float32.

    Arguments:
        add: (total [M, N], a [M, chunk], b [N, chunk]) -> the total and their product; only for floats.
        chunk: rows that are multiplied together.
    """
    slots = Slots.of(Groups.of(sizes, a.shape[-1]), chunk).used()
    integers = a.dtype == jnp.int8

    def one_more(total: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return total + (integer_dot(a, b) if integers else exact_dot(a.astype(jnp.float32), b.astype(jnp.float32)))

    def step(totals: jax.Array, slot: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        group, row, valid = slot
        parts = (columns_of(codes, row, chunk, valid) for codes in (a, b))
        by = one_more if integers or add is None else add
        return totals.at[group].set(by(totals[group], *parts)), None

    zero = jnp.zeros((sizes.shape[0], a.shape[0], b.shape[0]), jnp.int32 if integers else jnp.float32)
    return jax.lax.scan(step, zero, (slots.group, slots.row, slots.valid))[0]


class Columns(NamedTuple):
    """Rows in groups, quantised columnwise: codes, scales and what they are."""

    data: jax.Array
    scale: jax.Array
    format: Format


def wgrad_terms(a: Columns, b: Columns, sizes: jax.Array, rows: int) -> jax.Array:
    """float32 [E, M, N] of a and b, without amaxes: y = y + the term of each slot in order."""
    scaling, packed = a.format.scaling, a.format.packed and b.format.packed
    block = max(a.format.length, BLOCK)
    slots = Slots.of(Groups.of(sizes, rows), block)

    def by_slot(operand: Columns) -> tuple[jax.Array, jax.Array]:
        data, scale, fmt = operand
        values = code_values(data, fmt)
        if fmt.packed:
            lines, length = values.shape
            values = jnp.moveaxis(values.reshape(lines, length // block, block), 1, 0)  # [S, M, block]
        else:
            values = jnp.swapaxes(slots.take(values.T, block), -1, -2)
        scales = jnp.zeros(values.shape[:2]) if fmt.scaling == "tensor" else scale_values(scale, fmt, 0).T
        return values, scales

    a_values, a_scales = by_slot(a)
    b_values, b_scales = by_slot(b)

    def add(y: jax.Array, slot: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        va, vb, sa, sb, group, valid = slot
        if scaling == "e8m0" and not packed:
            va, vb = rounded(va * sa[:, None]), rounded(vb * sb[:, None])
        term = exact_dot(va, vb)
        if scaling == "two_level":
            term = term * (sa[:, None] * sb[None, :])
        elif scaling == "float32" or packed:
            term = rounded(rounded(term * sa[:, None]) * sb[None, :])
        return y.at[group].add(jnp.where(valid > 0, term, 0.0)), None

    zero = jnp.zeros((sizes.shape[0], a.data.shape[0], b.data.shape[0]), jnp.float32)
    return jax.lax.scan(add, zero, (a_values, b_values, a_scales, b_scales, slots.group, slots.valid))[0]
