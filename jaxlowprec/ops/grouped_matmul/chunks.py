"""Products of rows in groups by dense GEMMs: each chunk of a group's rows is multiplied as a separate matrix.

    for each chunk:    y[rows of it] = its rows by its group's weight        the dense GEMM's kernels
                       dw[its group] += its rows transposed by its rows      accumulated in float32

Group sizes stay on the device: the number of chunks depends only on the shapes, and some chunks have no rows. Work and
memory are those of the rows and of at most one more chunk per group. Numbers are those of the platform's dense GEMM
(numerics.md 9), on GPUs not the CPU's bytes. There are no batch axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxlowprec import wiring
from jaxlowprec.arrays.formats import BLOCK, Format
from jaxlowprec.ops.checks import Implementation
from jaxlowprec.ops.epilogue import Epilogue
from jaxlowprec.ops.grouped_matmul.groups import Groups, Slots
from jaxlowprec.ops.grouped_matmul.reference import by_chunks, chunk_of, columns_of, sums_within_groups
from jaxlowprec.ops.rounding import widened
from jaxlowprec.ops.scaled_matmul.op import MatmulSpec, matmul_op
from jaxlowprec.ops.weight_only_matmul.op import WeightOnlySpec, weight_only_op

if TYPE_CHECKING:
    from jaxlowprec.ops.grouped_matmul.op import GroupedMatmulSpec
    from jaxlowprec.ops.grouped_matmul.weight_only import GroupedWeightOnlySpec

_LEAST, _MOST = 128, 1024


def chunk_rows(rows: int, experts: int, least: int = _LEAST) -> int:
    """Rows per chunk: those of the average group, rounded up to a power of two."""
    return min(_MOST, max(least, 1 << (-(-rows // max(1, experts)) - 1).bit_length()))


def matmul(
    spec: GroupedMatmulSpec,
    implementation: Implementation,
    a_data: jax.Array,
    sizes: jax.Array,
    a_scale: jax.Array,
    b_data: jax.Array,
    b_scale: jax.Array,
    *rest: jax.Array,
) -> jax.Array:
    """`grouped_matmul_op`, sizes second."""
    rows, columns = a_data.shape[0], b_data.shape[-2]
    epilogue = Epilogue(spec.bias, False, None, False, spec.out_dtype)
    dense = MatmulSpec(spec.a_format, spec.b_format, True, True, True, epilogue, None, spec.float32_sums)
    chunk = chunk_rows(rows, sizes.shape[0])
    data_of = _chunk_of_codes(a_data, chunk)
    scale_of = None if spec.per_group else _chunk_of_codes(a_scale, chunk)

    def multiply(row: jax.Array, group: jax.Array) -> jax.Array:
        a = data_of(row), a_scale[group] if scale_of is None else scale_of(row)
        return matmul_op(dense, implementation)(*a, b_data[group], b_scale[group], *(of[group] for of in rest))[0]

    return by_chunks(sizes, rows, columns, spec.out_dtype, multiply, chunk)


def weight_only(
    spec: GroupedWeightOnlySpec,
    implementation: Implementation,
    x: jax.Array,
    sizes: jax.Array,
    *weight_and_bias: jax.Array,
) -> jax.Array:
    """`grouped_weight_only_op`, sizes second."""
    rows, columns = x.shape[0], weight_and_bias[0].shape[-2]
    epilogue = Epilogue(spec.bias, False, None, False, spec.out_dtype)
    dense = WeightOnlySpec(spec.format, True, True, False, epilogue)
    chunk = chunk_rows(rows, sizes.shape[0], 16)  # as few as the weight-only kernel takes
    rows_of = chunk_of(x, chunk)

    def multiply(row: jax.Array, group: jax.Array) -> jax.Array:
        return weight_only_op(dense, implementation)(rows_of(row), *(of[group] for of in weight_and_bias))[0]

    return by_chunks(sizes, rows, columns, spec.out_dtype, multiply, chunk)


def wgrad(
    spec: GroupedMatmulSpec,
    implementation: Implementation,
    rows: int,
    a_data: jax.Array,
    sizes: jax.Array,
    *operands: jax.Array,
) -> jax.Array:
    """`grouped_wgrad_op`, sizes second; without scales of lines."""
    a_scale, b_data, b_scale, *rest = operands
    amaxes = rest[: 2 * spec.two_level]
    experts, shape = sizes.shape[0], (a_data.shape[0], b_data.shape[0])
    epilogue = Epilogue(False, True, None, False, jnp.dtype("float32"))
    dense = MatmulSpec(spec.a_format, spec.b_format, True, True, True, epilogue, None, spec.float32_sums)
    chunk = chunk_rows(rows, experts)
    groups = Groups.of(sizes, rows)
    slots = Slots.of(groups, chunk).used()
    a_of = _chunk_of_columns(a_data, a_scale, spec.a_format, groups, chunk)
    b_of = _chunk_of_columns(b_data, b_scale, spec.b_format, groups, chunk)

    def add(dw: jax.Array, slot: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        group, _, _, valid = slot
        of_group = [jnp.where(valid > 0, amax[group], 0.0) for amax in amaxes]  # a slot without rows adds 0, not NaN
        (total,) = matmul_op(dense, implementation)(*a_of(*slot), *b_of(*slot), *of_group, dw[group])
        return dw.at[group].set(total), None

    before = widened(rest[-1]) if spec.accumulate else jnp.zeros((experts, *shape), jnp.float32)
    xs = (slots.group, slots.within, slots.row, slots.valid)
    return jax.lax.scan(add, before, xs)[0].astype(spec.out_dtype)


def sums_of_columns(
    spec: GroupedMatmulSpec, implementation: Implementation, sizes: jax.Array, a: jax.Array, b: jax.Array
) -> jax.Array:
    """`sums_within_groups` of columns with a scale each, by the dense GEMM's kernels."""
    epilogue = Epilogue(False, True, None, False, jnp.dtype("float32"))
    dense = MatmulSpec(spec.a_format, spec.b_format, True, True, True, epilogue, None, spec.float32_sums)

    def add(total: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        scales = (jnp.ones((v.shape[0], 1), f.scale_dtype) for v, f in ((a, spec.a_format), (b, spec.b_format)))
        a_scale, b_scale = scales
        return matmul_op(dense, implementation)(a, a_scale, b, b_scale, total)[0]

    return sums_within_groups(a, b, sizes, add, chunk_rows(a.shape[-1], sizes.shape[0]))


def _chunk_of_codes(x: jax.Array, chunk: int) -> Callable[[jax.Array], jax.Array]:
    """`chunk_of` codes or scales."""
    rows_of = chunk_of(wiring.as_bytes(x), chunk)
    return lambda row: wiring.from_bytes([rows_of(row)], [x.dtype])[0]


def _chunk_of_columns(
    data: jax.Array, scale: jax.Array, fmt: Format, groups: Groups, chunk: int
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Codes [M, bytes of `chunk`] and scales [M, blocks] of a slot, given its fields; zero bytes follow its rows."""
    block = max(fmt.length, BLOCK)
    first = groups.first_slots(block)

    def of_slot(group: jax.Array, within: jax.Array, row: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        blocks, slot = -(-valid // block), first[group] + within * (chunk // block)
        if fmt.packed:
            codes = columns_of(data, slot * block // 2, chunk // 2, blocks * block // 2)
        else:
            codes = columns_of(data, row, chunk, valid)
        if fmt.scaling == "tensor":
            return codes, jnp.where(valid > 0, scale[group], 1.0)
        return codes, columns_of(scale, slot, chunk // block, blocks)

    return of_slot
