"""How rows meet weights: all rows times one weight, or each group of rows times its own.

`product` computes both alike. What depends on it is here, with the same methods: quantisation of rows, and GEMMs.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.layers import residuals
from jaxlowprec.layers.operands import FormOptions, amaxes_both_ways, both_ways, for_both_ways, groups_both_ways
from jaxlowprec.ops.amax import Amaxes
from jaxlowprec.ops.amax import amax as tensor_amax
from jaxlowprec.ops.dequantize import dequantize_rows
from jaxlowprec.ops.grouped_matmul import plain
from jaxlowprec.ops.grouped_matmul.api import (
    GroupedQuantizedArray,
    group_amaxes,
    multiply_groups,
    multiply_within_groups,
)
from jaxlowprec.ops.grouped_matmul.groups import Groups
from jaxlowprec.ops.grouped_matmul.op import bias_of_rows
from jaxlowprec.ops.grouped_matmul.quantize_op import over_batches
from jaxlowprec.ops.scaled_matmul.api import scaled_matmul_of_rows
from jaxlowprec.ops.sums.kinds import IN_FLOAT32, SumOverDevices
from jaxlowprec.recipes.roles import Role
from jaxlowprec.wiring.sharding_rule import ShardingLike, resharded


@dataclasses.dataclass(frozen=True)
class AllRows:
    """Rows [..., T, K], all times a weight [..., K, N].

    Attributes:
        split: rows are [..., S, T, K] for a weight without S.
        precision: precision of the GEMMs, checked.
    """

    split: bool
    precision: jax.lax.PrecisionLike

    def both_ways(
        self, x: jax.Array, row: Role | None, column: Role | None, **options: Unpack[FormOptions]
    ) -> tuple[Any, Any]:
        """See `operands.both_ways`."""
        return both_ways(x, row, column, rows_split=self.split, **options)

    def amaxes(self, x: jax.Array, wanted: Amaxes | None) -> tuple[jax.Array, jax.Array] | None:
        """The amaxes of x rowwise and columnwise, as `both_ways` takes them; None if none are wanted."""
        return amaxes_both_ways(x, wanted)

    def amax(self, x: jax.Array) -> jax.Array:
        """The amax of x: what delayed scaling records, and what random bits are derived from without a key."""
        return tensor_amax(x, True, None, rows_split=self.split)[0]

    def by_weight(
        self,
        a: QuantizedArray,
        b: QuantizedArray,
        bias: jax.Array | None,
        out_dtype: jax.typing.DTypeLike,
        sharding: ShardingLike,
        sums: SumOverDevices = IN_FLOAT32,
    ) -> jax.Array:
        """a, quantised rowwise, times b, quantised along the same axis. `sums`: see `SumOverDevices`."""
        return self._multiply(a, b, bias, out_dtype, sharding, sums)

    def wgrad(
        self,
        x: QuantizedArray,
        dy: QuantizedArray,
        out_dtype: jax.typing.DTypeLike,
        sharding: ShardingLike,
        total: jax.Array | None = None,
        sums: SumOverDevices = IN_FLOAT32,
    ) -> jax.Array:
        """x transposed times dy, both quantised columnwise; plus `total`, in the GEMM."""
        return self._multiply(x.mT, dy.mT, None, out_dtype, sharding, sums, accumulate=total)

    def _multiply(
        self,
        a: QuantizedArray,
        b: QuantizedArray,
        bias: jax.Array | None,
        out_dtype: jax.typing.DTypeLike,
        sharding: ShardingLike,
        sums: SumOverDevices,
        accumulate: jax.Array | None = None,
    ) -> Any:
        options: Any = {"out_sharding": sharding, "precision": self.precision, "sums": sums}
        options["preferred_element_type"] = out_dtype
        return scaled_matmul_of_rows(a, b, bias, rows_split=self.split, accumulate=accumulate, **options)

    def plain_by_weight(
        self, x: jax.Array, w: jax.Array, out_dtype: jax.typing.DTypeLike, sharding: ShardingLike
    ) -> jax.Array:
        """x times w in high precision, accumulated in float32."""
        return residuals.plain_matmul(x, w, out_dtype, sharding, self.precision)

    def plain_wgrad(
        self, x: jax.Array | QuantizedArray, dy: jax.Array, out_dtype: jax.typing.DTypeLike, sharding: ShardingLike
    ) -> jax.Array:
        """x transposed times dy, likewise; x may be quantised."""
        x = residuals.decoded(x, dy.dtype)
        return residuals.plain_wgrad(x, dy, self.split, out_dtype, sharding, self.precision)

    def biased(self, y: jax.Array, bias: jax.Array | None) -> jax.Array:
        """y in float32 plus the bias [N]."""
        if bias is None:
            return y
        return y + jnp.expand_dims(bias.astype(jnp.float32), tuple(range(y.ndim - 1)))

    def bias_gradient(
        self, dy: jax.Array | None, marker: jax.Array | None, sharding: ShardingLike, row_sums: jax.Array | None = None
    ) -> jax.Array | None:
        """See `residuals.bias_gradient`; `row_sums`: those of dy, if they are known."""
        return residuals.bias_gradient(dy, marker, sharding, row_sums)


@dataclasses.dataclass(frozen=True)
class RowsInGroups:
    """Rows [..., T, K] in E groups, each times its own weight of [..., E, K, N]. Rows in no group give zeros.

    Attributes:
        sizes: int32 [..., E], of the groups.
        precision: precision of the GEMMs, checked.
    """

    sizes: jax.Array
    precision: jax.lax.PrecisionLike

    def both_ways(
        self, x: jax.Array, row: Role | None, column: Role | None, **options: Unpack[FormOptions]
    ) -> tuple[Any, Any]:
        """See `operands.groups_both_ways`."""
        own: Any = {"words": options.get("words"), "amaxes": options.get("amax"), "encode": options.get("encode")}
        return groups_both_ways(x, self.sizes, row, column, **own)  # groups have no drawn signs

    def amaxes(self, x: jax.Array, wanted: Amaxes | None) -> tuple[jax.Array, jax.Array] | None:
        """See `AllRows.amaxes`: [..., E]."""
        return None if wanted is None else for_both_ways(group_amaxes(x, self.sizes, wanted.plain, wanted.hadamard))

    def amax(self, x: jax.Array) -> jax.Array:
        """See `AllRows.amax`: [..., E]."""
        return group_amaxes(x, self.sizes, True, None)[0]

    def by_weight(
        self,
        a: GroupedQuantizedArray,
        b: QuantizedArray,
        bias: jax.Array | None,
        out_dtype: jax.typing.DTypeLike,
        sharding: ShardingLike,
        sums: SumOverDevices = IN_FLOAT32,
    ) -> jax.Array:
        """See `AllRows.by_weight`; sums of groups are in float32."""
        del sums
        return resharded(multiply_groups(a, b, bias, out_dtype, precision=self.precision), sharding)

    def wgrad(
        self,
        x: GroupedQuantizedArray,
        dy: GroupedQuantizedArray,
        out_dtype: jax.typing.DTypeLike,
        sharding: ShardingLike,
        total: jax.Array | None = None,
        sums: SumOverDevices = IN_FLOAT32,
    ) -> jax.Array:
        """See `AllRows.wgrad`: [..., E, K, N]. No mesh splits the rows of groups."""
        del sums
        return resharded(multiply_within_groups(x, dy, out_dtype, precision=self.precision, accumulate=total), sharding)

    def plain_by_weight(
        self, x: jax.Array, w: jax.Array, out_dtype: jax.typing.DTypeLike, sharding: ShardingLike
    ) -> jax.Array:
        """See `AllRows.plain_by_weight`."""
        return resharded(plain.plain_rows(x, w, self.sizes, out_dtype, self.precision), sharding)

    def plain_wgrad(
        self,
        x: jax.Array | GroupedQuantizedArray,
        dy: jax.Array,
        out_dtype: jax.typing.DTypeLike,
        sharding: ShardingLike,
    ) -> jax.Array:
        """See `AllRows.plain_wgrad`: [..., E, K, N]."""
        x = dequantize_groups(x, dy.dtype) if isinstance(x, GroupedQuantizedArray) else x.astype(dy.dtype)
        return resharded(plain.plain_wgrad(x, dy, self.sizes, out_dtype, self.precision), sharding)

    def biased(self, y: jax.Array, bias: jax.Array | None) -> jax.Array:
        """y [..., T, N] in float32 plus, for each row, the bias [..., E, N] of its group."""
        return y if bias is None else y + bias_of_rows(bias.astype(jnp.float32), self.sizes, y.shape[-2])

    def bias_gradient(
        self, dy: jax.Array, marker: jax.Array | None, sharding: ShardingLike, row_sums: jax.Array | None = None
    ) -> jax.Array | None:
        """The sum over each group's rows in float32, [..., E, N]. It is never known before."""
        if marker is None:
            return None

        def one_batch(dy: jax.Array, sizes: jax.Array) -> jax.Array:
            group = Groups.of(sizes, dy.shape[0]).of_rows()
            return jax.ops.segment_sum(dy.astype(jnp.float32), group, sizes.shape[0] + 1)[: sizes.shape[0]]

        return resharded(over_batches(one_batch)(dy, self.sizes).astype(marker.dtype), sharding)


def dequantize_groups(x: GroupedQuantizedArray, dtype: jax.typing.DTypeLike) -> jax.Array:
    """A rowwise array [..., T, C] decoded to `dtype`; rows outside the groups are zeros."""

    def one_batch(data: jax.Array, sizes: jax.Array, scale: jax.Array, amax: jax.Array | None) -> jax.Array:
        group = jnp.minimum(Groups.of(sizes, x.rows).of_rows(), sizes.shape[0] - 1)
        scales = scale[group] if x.format.scaling == "tensor" else scale[:, None]
        amaxes = amax if amax is None or x.format.row_scaled else amax[group]
        return dequantize_rows(data[:, None], scales, amaxes, x.format, x.columns, None, dtype)[:, 0]

    return over_batches(one_batch)(x.data, x.sizes, x.scale, x.amax)
