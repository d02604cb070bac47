"""Products of rows in groups by `jax.lax.ragged_dot`, for TPUs, whose compiler has a kernel for it.

On CPUs and GPUs `ragged_dot` multiplies all rows by all weights. There are no batch axes.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxlowprec.ops.grouped_matmul.groups import Groups
from jaxlowprec.ops.rounding import rounded
from jaxlowprec.ops.scaled_matmul import portable
from jaxlowprec.ops.scaled_matmul.reference import alpha, apply_line_scales
from jaxlowprec.ops.weight_only_matmul import reference as weight_only_reference
from jaxlowprec.ops.weight_only_matmul.portable import exact_dtype

if TYPE_CHECKING:
    from jaxlowprec.ops.grouped_matmul.op import GroupedMatmulSpec
    from jaxlowprec.ops.grouped_matmul.weight_only import GroupedWeightOnlySpec


def matmul(
    spec: GroupedMatmulSpec,
    a_data: jax.Array,
    sizes: jax.Array,
    a_scale: jax.Array,
    b_data: jax.Array,
    b_scale: jax.Array,
    *rest: jax.Array,
) -> jax.Array:
    """`grouped_matmul_op`, sizes second."""
    operands = a_data, a_scale, spec.a_format, b_data, b_scale, spec.b_format
    multiply = functools.partial(_multiply, sizes)
    y = portable.products(*operands, multiply=multiply, float8=not spec.float32_sums)  # type: ignore[arg-type]
    if spec.per_group:
        y = rounded(rounded(y * _of_rows(a_scale, sizes, y)) * _of_rows(b_scale, sizes, y))
    if spec.two_level:
        y = rounded(y * _of_rows(alpha(*rest[:2]), sizes, y))
    if spec.by_lines:
        if spec.b_format.scaling == "rows":
            y = rounded(y * _of_rows(b_scale[..., 0].astype(jnp.float32), sizes, y)[:, 0])
        y = apply_line_scales(y, a_scale)
    return _finished(y, sizes, rest[-1] if spec.bias else None, spec.out_dtype)


def weight_only(
    spec: GroupedWeightOnlySpec, x: jax.Array, sizes: jax.Array, data: jax.Array, scale: jax.Array, *rest: jax.Array
) -> jax.Array:
    """`grouped_weight_only_op`, sizes second."""
    fmt = spec.format
    amax = rest[0] if fmt.scaling == "two_level" else None
    zero_point = rest[0] if fmt.has_zero_point else None
    dtype = exact_dtype(fmt, x)
    w = weight_only_reference.decoded(data, scale, zero_point, fmt)[..., : x.shape[-1]].astype(dtype)
    y = _multiply(sizes, x.astype(dtype), w, precision=jax.lax.Precision.HIGHEST)
    factor = weight_only_reference.alpha(scale, amax, fmt)
    y = y if factor is None else rounded(y * _of_rows(factor, sizes, y))
    return _finished(y, sizes, rest[-1] if spec.bias else None, spec.out_dtype)


def plain_rows(
    out_dtype: jax.typing.DTypeLike, precision: jax.lax.PrecisionLike, x: jax.Array, sizes: jax.Array, w: jax.Array
) -> jax.Array:
    """x [T, K] by w [E, K, N] in high precision."""
    y = jax.lax.ragged_dot(x, w, sizes, precision=precision, preferred_element_type=jnp.float32)
    return _finished(y, sizes, None, out_dtype)


def _multiply(sizes: jax.Array, a: jax.Array, b: jax.Array, precision: jax.lax.Precision) -> jax.Array:
    """a [T, K] by b [E, N, K] -> float32 [T, N]."""
    b = jnp.swapaxes(b, -1, -2)
    return jax.lax.ragged_dot(a, b, sizes, precision=precision, preferred_element_type=jnp.float32)


def _of_rows(numbers: jax.Array, sizes: jax.Array, y: jax.Array) -> jax.Array:
    """Numbers of each group [E, ...] for its rows [T, 1, ...]; 0 for rows in no group."""
    group = Groups.of(sizes, y.shape[0]).of_rows()
    return jnp.take(numbers, group, axis=0, mode="fill", fill_value=0)[:, None]


def _finished(y: jax.Array, sizes: jax.Array, bias: jax.Array | None, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Adds the bias [E, N] and rounds; rows in no group are 0, whatever the product has there."""
    group = Groups.of(sizes, y.shape[0]).of_rows()
    if bias is not None:
        y = y + jnp.take(bias, group, axis=0, mode="fill", fill_value=0)
    return jnp.where((group < sizes.shape[0])[:, None], y, 0.0).astype(dtype)
