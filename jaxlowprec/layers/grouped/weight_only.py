"""Quantised products of rows in groups by a weight per group, with their custom_vjp: the core of `grouped_matmul`.

    fprop   y_e  = x_e row-quantised            @ w_e
    dgrad   dx_e = dy_e row-quantised           @ w_e transposed
    wgrad   dw_e = x_e column-quantised, transposed @ dy_e column-quantised

The rules are those of `quantized_matmul` and `weight_only`, for each group. Residuals have the same checkpoint
names.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.layers.operands import Gemms, both_ways, groups_both_ways, role_of
from jaxlowprec.layers.residuals import (
    CHECKPOINT_NAMES,
    decoded,
    differentiated_once,
    dtype_marker,
    in_profiles,
    named,
    product,
)
from jaxlowprec.layers.watching.measured import measured_backward, measured_forward, measured_weight
from jaxlowprec.layers.weight_only import Served, quantize_weight, through_estimator
from jaxlowprec.ops.dequantize.reference import dequantize_rows
from jaxlowprec.ops.grouped_matmul.api import (
    GroupedQuantizedArray,
    group_amaxes,
    multiply_groups,
    multiply_within_groups,
)
from jaxlowprec.ops.grouped_matmul.groups import Groups
from jaxlowprec.ops.grouped_matmul.op import bias_of_rows
from jaxlowprec.ops.grouped_matmul.plain import plain_rows, plain_wgrad
from jaxlowprec.ops.grouped_matmul.quantize_op import over_batches
from jaxlowprec.ops.grouped_matmul.weight_only import grouped_weight_only
from jaxlowprec.wiring.out_sharding import resharded


@dataclasses.dataclass(frozen=True)
class GroupedProductSpec(Gemms):
    """The static description of a product; see `quantized_matmul.ProductSpec`.

    Attributes:
        out_dtype: the dtype of the result.
        shardings: those of x, w and bias, which their gradients get, too.
        precision: precision of all three GEMMs, checked.
    """

    out_dtype: Any
    shardings: tuple[Any, Any, Any]
    precision: Any


def _fprop(spec: GroupedProductSpec, x, w, bias, sizes, keep: bool):
    """The result, x row- and columnwise, and the weights, quantised as far as they are needed now or kept."""
    with in_profiles("quantize input"):
        x_row, x_column = groups_both_ways(x, sizes, role_of(spec.fprop, 0), role_of(spec.wgrad, 0, keep))
    with in_profiles("quantize weight"):
        w_row, w_column = both_ways(w, role_of(spec.dgrad, 1, keep), role_of(spec.fprop, 1))
    with in_profiles("fprop"):
        if spec.fprop:
            y = multiply_groups(x_row, w_column.mT, bias, spec.out_dtype, precision=spec.precision)
        else:
            y = plain_rows(x, w.astype(x.dtype), sizes, jnp.float32, spec.precision)
            y = biased(y, bias, sizes).astype(spec.out_dtype)
    return y, (x_row, x_column), (w_row, w_column)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(spec: GroupedProductSpec, x, w, bias, randomness, sizes, probe):
    return _fprop(spec, x, w, bias, sizes, False)[0]


def _forward(spec: GroupedProductSpec, x, w, bias, randomness, sizes, probe):
    x, w, bias = differentiated_once((x, w, bias))
    y, (x_row, x_column), (w_row, w_column) = _fprop(spec, x, w, bias, sizes, True)
    kept_x = x_column if spec.wgrad else x_row if spec.decodes("wgrad") else x
    kept_w = w_row if spec.dgrad else w_column if spec.decodes("dgrad") else w
    kept = tuple(named(q, name) for q, name in zip((kept_x, kept_w), CHECKPOINT_NAMES, strict=True))
    found = None
    if probe is not None:
        found = measured_forward(probe, x, w, (x_row, x_column), (w_row, w_column), sizes=sizes)
    return product(y), (kept, tuple(dtype_marker(a) for a in (x, w, bias)), randomness, sizes, found)


def _quantized_gradient(spec: GroupedProductSpec, dy, randomness, sizes):
    """The gradient of the result, row- and columnwise, as dgrad and wgrad need it."""
    row, column = role_of(spec.dgrad, 0), role_of(spec.wgrad, 1)
    tensor_scales = [role for role in (row, column) if role is not None and role.format.has_tensor_scale]
    amaxes = None
    if tensor_scales:
        found = group_amaxes(dy, sizes, True, column.hadamard if column in tensor_scales else None)
        amaxes = found[0], found[-1]
    words = None
    if randomness is not None:
        words = randomness.words_for(lambda: (amaxes or group_amaxes(dy, sizes, True, None))[0])
    return groups_both_ways(dy, sizes, row, column, words=words, amaxes=amaxes)


def _backward(spec: GroupedProductSpec, residuals, dy):
    (x, w), (like_x, like_w, like_bias), randomness, sizes, found = residuals
    x_sharding, w_sharding, bias_sharding = spec.shardings
    dy = differentiated_once(dy)
    dy_row: Any = None
    dy_column: Any = None
    if spec.dgrad or spec.wgrad:
        with in_profiles("quantize gradient"):
            dy_row, dy_column = _quantized_gradient(spec, dy, randomness, sizes)
    # JAX does not check these dtypes: they must be those of the primals.
    with in_profiles("dgrad"):
        if spec.dgrad:
            dx = multiply_groups(dy_row, w, None, like_x.dtype, precision=spec.precision)
        else:
            transposed = jnp.swapaxes(decoded(w, dy.dtype), -1, -2)
            dx = plain_rows(dy, transposed, sizes, like_x.dtype, spec.precision)
    with in_profiles("wgrad"):
        if spec.wgrad:
            dw = multiply_within_groups(x, dy_column, like_w.dtype, precision=spec.precision)
        else:
            rows = dequantize_groups(x, dy.dtype) if isinstance(x, GroupedQuantizedArray) else x.astype(dy.dtype)
            dw = plain_wgrad(rows, dy, sizes, like_w.dtype, spec.precision)
    dbias = bias_gradient(dy, like_bias, sizes, bias_sharding)
    if found is not None:
        found = measured_backward(found, (x, w), dy, (dy_row, dy_column), sizes=sizes)
    return resharded(dx, x_sharding), resharded(dw, w_sharding), dbias, None, None, found


_matmul.defvjp(_forward, _backward)
quantized_groups = jax.jit(_matmul, static_argnums=0)  # layers with equal specs are traced once, whatever their names
"""GroupedProductSpec, x [T, K], w [E, K, N], bias [E, N] or None, Randomness or None, sizes [E], telemetry's Probe or
None -> [T, N]."""


# --- only the weights are quantised


@dataclasses.dataclass(frozen=True)
class GroupedWeightOnlyProductSpec:
    """The static description of a product with only its weights quantised; see `weight_only`.

    Attributes:
        served: how the weights are served.
        out_dtype, shardings: see `GroupedProductSpec`.
        precision: precision of the backward GEMMs, checked; the forward GEMM always has float32 sums.
    """

    served: Served
    out_dtype: Any
    shardings: tuple[Any, Any, Any]
    precision: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weight_only(spec: GroupedWeightOnlyProductSpec, x, w, bias, q, sizes, probe):
    return _weight_only_fprop(spec, x, w, bias, q, sizes)[0]


def _weight_only_fprop(spec: GroupedWeightOnlyProductSpec, x, w, bias, q, sizes):
    if q is None:
        with in_profiles("quantize weight"):
            q = quantize_weight(w, spec.served.format, spec.served.served_dtype)
    added = None if bias is None else bias.astype(jnp.float32)
    with in_profiles("fprop"):
        return grouped_weight_only(x, q.mT, sizes, added, spec.out_dtype), q


def _weight_only_forward(spec: GroupedWeightOnlyProductSpec, x, w, bias, q, sizes, probe):
    x, w, bias = differentiated_once((x, w, bias))
    y, q = _weight_only_fprop(spec, x, w, bias, q, sizes)
    like = tuple(dtype_marker(a) for a in (x, w, bias))
    kept = None if w is None else x, named(q, CHECKPOINT_NAMES[1]), w if spec.served.ste == "clipped" else None
    found = None if probe is None else measured_weight(probe, x, w, q, sizes=sizes)
    return product(y), (kept, like, sizes, found)


def _weight_only_backward(spec: GroupedWeightOnlyProductSpec, residuals, dy):
    (x, q, clipped), (like_x, like_w, like_bias), sizes, found = residuals
    x_sharding, w_sharding, bias_sharding = spec.shardings
    dy = differentiated_once(dy)
    with in_profiles("dgrad"):
        dx = plain_rows(dy, jnp.swapaxes(q.dequantize(dy.dtype), -1, -2), sizes, like_x.dtype, spec.precision)
    dw: Any = None
    if like_w is not None:
        with in_profiles("wgrad"):
            dw = plain_wgrad(x, dy, sizes, like_w.dtype, spec.precision)
        if clipped is not None:
            dw = through_estimator(dw, clipped, spec.served)
        dw = resharded(dw, w_sharding)
    dbias = bias_gradient(dy, like_bias, sizes, bias_sharding)
    return resharded(dx, x_sharding), dw, dbias, None, None, found


_weight_only.defvjp(_weight_only_forward, _weight_only_backward)
weight_only_groups = jax.jit(_weight_only, static_argnums=0)
"""GroupedWeightOnlyProductSpec, x [T, K], w [E, K, N] or None, bias or None, QuantizedArray [E, K, N] or None, sizes,
telemetry's Probe or None -> [T, N]."""


# --- what both share


def dequantize_groups(x: GroupedQuantizedArray, dtype: Any) -> jax.Array:
    """A rowwise array [..., T, C] decoded to `dtype`; rows outside the groups are zeros."""

    def one_batch(data, sizes, scale, amax):
        group = jnp.minimum(Groups.of(sizes, x.rows).of_rows(), sizes.shape[0] - 1)
        scales = scale[group] if x.format.scaling == "tensor" else scale[:, None]
        amaxes = None if amax is None else amax[group]
        return dequantize_rows(data[:, None], scales, amaxes, x.format, x.columns, None, dtype)[:, 0]

    return over_batches(one_batch)(x.data, x.sizes, x.scale, x.amax)


def biased(y: jax.Array, bias: jax.Array | None, sizes: jax.Array) -> jax.Array:
    """y [..., T, N] in float32 plus, for each row, the bias [..., E, N] of its group."""
    return y if bias is None else y + bias_of_rows(bias.astype(jnp.float32), sizes, y.shape[-2])


def bias_gradient(dy: jax.Array, like: jax.Array | None, sizes: jax.Array, sharding: Any) -> jax.Array | None:
    """The sum over each group's rows, [..., E, N] in float32."""
    if like is None:
        return None

    def one_batch(dy, sizes):
        group = Groups.of(sizes, dy.shape[0]).of_rows()
        return jax.ops.segment_sum(dy.astype(jnp.float32), group, sizes.shape[0] + 1)[: sizes.shape[0]]

    return resharded(over_batches(one_batch)(dy, sizes).astype(like.dtype), sharding)
