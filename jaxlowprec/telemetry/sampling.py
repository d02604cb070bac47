"""Samples for telemetry: results of GEMMs, for their error, and codes of weights, for whether they change.

A GEMM's operands are matrices whose lines its sum runs along, [..., lines, k]. Lines of all parts are taken, and their
products, by the decoded operands and in high precision, are compared.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.ops.dequantize import dequantize
from jaxlowprec.ops.grouped_matmul.api import GroupedQuantizedArray
from jaxlowprec.ops.grouped_matmul.groups import Groups, Slots
from jaxlowprec.ops.grouped_matmul.in_slots import in_slots, taken_rows
from jaxlowprec.ops.split_rows import merged_columns
from jaxlowprec.wiring.sharding_rule import replicated, sharding_of

LINES = 16
"""Lines that are taken of an operand, if it has so many."""

CODES = 1024
"""Codes that are taken of a weight, if it has so many."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=("x", "quantized"), meta_fields=("axis",))
@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand of a GEMM, of which lines are taken.

    Attributes:
        x: the operand in high precision, or lines of it that have been taken already.
        quantized: what it was quantised to; None if the GEMM reads x. Of rows in groups (`group_sampling`) a
            GroupedQuantizedArray.
        axis: of x, that the GEMM contracts: -1 or -2; None if x is lines.
    """

    x: jax.Array
    quantized: Any
    axis: int | None

    def exact(self) -> jax.Array:
        """[..., n, k], in high precision."""
        return self.x if self.axis is None else lines(self.x, self.axis)

    def decoded(self) -> jax.Array:
        """float32 [..., n, k]: the same lines as the GEMM reads them."""
        exact, q = self.exact(), self.quantized
        if q is None:
            return exact.astype(jnp.float32)
        q = q if q.axis == -1 else q.mT
        fmt, taken = q.format, places(q.shape[-2], exact.shape[-2])
        blocks = taken // fmt.length if fmt.tiles else taken
        scale = replicated(q.scale) if fmt.scaling == "tensor" else _taken(q.scale, blocks)
        zero_point = None if q.zero_point is None else _taken(q.zero_point, blocks)
        amax = _taken(q.amax[..., None], taken)[..., 0] if fmt.row_scaled else replicated(q.amax)
        rows = dataclasses.replace(fmt, block=(1, fmt.length)) if fmt.tiles else fmt
        static = rows, (len(taken), q.shape[-1]), q.dtype, -1, q.hadamard
        made = QuantizedArray(_taken(q.data, taken), scale, amax, zero_point, *static, replicated(q.signs))
        return dequantize(made, dtype=jnp.float32)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("a", "b"), meta_fields=("parts",))
@dataclasses.dataclass(frozen=True)
class Gemm:
    """The operands of a GEMM: lines of `a` by lines of `b`.

    Attributes:
        parts: which operands are in parts [..., S, lines, k]: "", "a" for a `b` that all parts share, or "ab", whose
            products are added up over the parts.
    """

    a: Operand
    b: Operand
    parts: Literal["", "a", "ab"] = ""

    def error(self, axes: tuple[Hashable, ...] = ()) -> jax.Array:
        """The energy of the error of a sample of the result over the energy of the sample; float32.

        Arguments:
            axes: of `jax.shard_map`, over which both are added up.
        """
        exact = self._products(self.a.exact(), self.b.exact())
        decoded = self._products(self.a.decoded(), self.b.decoded())
        return relative_square_error(exact, decoded, axes)

    def _products(self, a: jax.Array, b: jax.Array) -> jax.Array:
        if self.parts == "ab":
            a, b = merged_columns(a), merged_columns(b)
        elif self.parts == "a":
            b = b[..., None, :, :]
        return products(a, b)


def products(a: jax.Array, b: jax.Array) -> jax.Array:
    """The products of all lines of a [..., m, k] by those of b [..., n, k], in float32."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.einsum("...mk,...nk->...mn", a, b, precision=jax.lax.Precision.HIGHEST)


def relative_square_error(exact: jax.Array, decoded: jax.Array, axes: tuple[Hashable, ...] = ()) -> jax.Array:
    """The energy of decoded - exact over that of exact, each added up over the axes of `jax.shard_map`."""
    largest = jnp.abs(exact).max(initial=0)
    largest = jax.lax.pmax(largest, axes) if axes else largest
    unit = jnp.where(largest > 0, largest, 1)  # squares stay within float32's range
    sums = jnp.stack([jnp.square(v / unit).sum() for v in (decoded - exact, exact)])
    off, energy = jax.lax.psum(sums, axes) if axes else sums
    return jnp.where(energy == 0, jnp.where(off > 0, jnp.inf, 0), off / jnp.where(energy == 0, 1, energy))


def lines(x: jax.Array, axis: int) -> jax.Array:
    """Lines of a matrix [..., M, K] along its last axis (-1), or along the one before it (-2): [..., n, k]."""
    if axis == -1:
        return _taken(x, places(x.shape[-2], LINES))
    return jnp.swapaxes(_at(x, (..., places(x.shape[-1], LINES))), -1, -2)  # the whole is not transposed


def codes(q: QuantizedArray, axes: tuple[Hashable, ...] = ()) -> jax.Array:
    """A sample of a weight's codes, float32 [CODES], -1 where there are no more.

    Arguments:
        axes: of `jax.shard_map`, that split it: each device fills in its part, of the sum over devices.
    """
    devices = math.prod(jax.lax.axis_size(axis) for axis in axes)
    each = max(CODES // devices, 2)  # what more devices than that have does not fit and is left out
    size, packed = q.data.size, q.format.packed
    data = q.data if packed else jax.lax.bitcast_convert_type(q.data, jnp.uint8)
    count = min(each // 2 if packed else each, size)
    at = np.unravel_index(places(size, count), data.shape)
    taken = _at(data, at)
    if packed:
        taken = jnp.stack([taken & 15, taken >> 4], axis=-1).reshape(-1)
    own = jnp.full(each, -1.0).at[: taken.size].set(taken.astype(jnp.float32))
    if not axes:
        return own
    index = jax.lax.axis_index(axes)
    spread = jnp.zeros(CODES).at[index * each + jnp.arange(each)].set(own)
    rest = jnp.where(jnp.arange(CODES) < devices * each, 0.0, -1.0)
    return jax.lax.psum(spread, axes) + rest


def changed(before: np.ndarray, now: np.ndarray) -> float:
    """The share of two samples of codes that differs."""
    known = (before >= 0) & (now >= 0)
    return float(np.mean(before[known] != now[known])) if known.any() else 0.0


def places(size: int, count: int) -> np.ndarray:
    """At most `count` of so many places: one in each of as many equal parts.

    Where in its part follows the golden ratio, so that no stride of the places meets one of the matrix.
    """
    if size <= count:
        return np.arange(size)
    return np.floor(fractions(count) * (size / count)).astype(np.int64)


def fractions(count: int) -> np.ndarray:
    """The position of `places`, in units of a part."""
    parts = np.arange(count)
    return parts + parts * 0.6180339887498949 % 1


def _taken(x: jax.Array, rows: np.ndarray) -> jax.Array:
    """These rows of x [..., rows, n], whole on every device in explicit mode."""
    return _at(x, (..., rows, slice(None)))


def _at(x: jax.Array, at: tuple[Any, ...]) -> jax.Array:
    sharding = sharding_of(x)
    if sharding is None:
        return x[at]
    return x.at[at].get(out_sharding=sharding.update(spec=PartitionSpec()))


@functools.partial(jax.tree_util.register_dataclass, data_fields=("a", "b", "sizes"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class RowsByWeights:
    """The operands of fprop or dgrad: rows in groups, each by the weight of its group.

    Attributes:
        a: rows [T, K] and a rowwise GroupedQuantizedArray, or None.
        b: weights [E, lines, K], see `Operand`.
        sizes: int32 [E], of the groups.
    """

    a: Operand
    b: Operand
    sizes: jax.Array

    def error(self, axes: tuple[Hashable, ...] = ()) -> jax.Array:
        """See `Gemm.error`. Rows of all groups are taken, in proportion to their sizes."""
        x, q = replicated(self.a.x), self.a.quantized
        groups = Groups.of(self.sizes, x.shape[0])
        rows, there = _spread(groups.ends[-1], x.shape[0])
        group = jnp.minimum(groups.of_rows()[rows], self.sizes.shape[0] - 1)
        exact = x[rows][:, None]
        decoded = exact if q is None else dequantize(taken_rows(jax.tree.map(replicated, q), rows), dtype=jnp.float32)
        pairs = (exact, self.b.exact()), (decoded, self.b.decoded())
        results = [jnp.where(there[:, None, None], products(a, replicated(b)[group]), 0) for a, b in pairs]
        return relative_square_error(results[0], results[1], axes)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("a", "b", "sizes"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class WithinGroups:
    """The operands of wgrad: the columns of two matrices of rows in groups, whose products are summed in each group.

    Attributes:
        a, b: columns [T, C] or lines of them [n, T], and columnwise GroupedQuantizedArrays.
        sizes: int32 [E], of the groups.
    """

    a: Operand
    b: Operand
    sizes: jax.Array

    def error(self, axes: tuple[Hashable, ...] = ()) -> jax.Array:
        """See `Gemm.error`."""
        exact, decoded = zip(*(self._slots(operand) for operand in (self.a, self.b)), strict=True)
        return relative_square_error(self._products(exact), self._products(decoded), axes)

    def _slots(self, operand: Operand) -> tuple[jax.Array, jax.Array]:
        """Columns in slots [S, block, n], exact and decoded."""
        q = operand.quantized
        assert isinstance(q, GroupedQuantizedArray)
        q = jax.tree.map(replicated, q)
        exact = replicated(operand.x if operand.axis is None else lines(operand.x, -2))
        taken = places(q.columns, exact.shape[0])
        scaling = q.format.scaling
        scale = q.scale if scaling == "tensor" else q.scale[:, taken] if scaling == "rows" else q.scale[taken]
        slots = in_slots(dataclasses.replace(q, data=q.data[taken], scale=scale, columns=len(taken)))
        return slots.take(exact.T), dequantize(slots.quantized, dtype=jnp.float32)

    def _products(self, operands: tuple[jax.Array, ...]) -> jax.Array:
        """[E, n, n] of operands [S, block, n]."""
        a, b = (jnp.swapaxes(operand, -1, -2) for operand in operands)
        groups = Groups.of(self.sizes, self.a.x.shape[-1] if self.a.axis is None else self.a.x.shape[0])
        slots = Slots.of(groups, operands[0].shape[1])
        return jax.ops.segment_sum(products(a, b), slots.group, self.sizes.shape[0])


def _spread(size: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Numbers of rows out of the first `size`, as `places`, and which of these are there."""
    count = min(LINES, rows)
    spread = jnp.floor(fractions(count) * (size / count)).astype(jnp.int32)
    taken = jnp.where(size > count, jnp.minimum(spread, size - 1), jnp.arange(count))
    return jnp.clip(taken, 0, rows - 1), jnp.arange(count) < size
