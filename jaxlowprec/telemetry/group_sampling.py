"""Samples of the GEMMs of rows in groups, for their errors; see `sampling`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable

import jax
import jax.numpy as jnp

from jaxlowprec.ops.dequantize.api import dequantize
from jaxlowprec.ops.grouped_matmul.api import GroupedQuantizedArray
from jaxlowprec.ops.grouped_matmul.groups import Groups, Slots
from jaxlowprec.ops.grouped_matmul.in_slots import in_slots, taken_rows
from jaxlowprec.telemetry.sampling import LINES, Operand, fractions, lines, places, products, relative_square_error
from jaxlowprec.wiring.out_sharding import replicated


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
        decoded = exact if q is None else dequantize(taken_rows(jax.tree.map(replicated, q), rows), jnp.float32)
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
        scale = q.scale if q.format.scaling == "tensor" else q.scale[taken]
        slots = in_slots(dataclasses.replace(q, data=q.data[taken], scale=scale, columns=len(taken)))
        return slots.take(exact.T), dequantize(slots.quantized, jnp.float32)

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
