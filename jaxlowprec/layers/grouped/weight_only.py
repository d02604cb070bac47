"""Products of rows in groups by a weight per group, of which only the weights are quantised, with their custom_vjp.

The rules are those of `weight_only`, for each group. Residuals have the same checkpoint names.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.layers.residuals import (
    QUANTIZED_WEIGHT,
    differentiated_once,
    dtype_marker,
    in_profiles,
    named,
    product,
    read,
)
from jaxlowprec.layers.rows import RowsInGroups
from jaxlowprec.layers.watching.measured import measured_weight
from jaxlowprec.layers.weight_only import Served, quantize_weight, through_estimator
from jaxlowprec.ops.grouped_matmul.weight_only import grouped_weight_only
from jaxlowprec.wiring.out_sharding import resharded


@dataclasses.dataclass(frozen=True)
class WeightOnlyGroupsSpec:
    """The static description of a product with only its weights quantised; see `weight_only`.

    Attributes:
        served: how the weights are served.
        out_dtype, shardings: see `ProductSpec`.
        precision: precision of the backward GEMMs, checked; the forward GEMM always has float32 sums.
    """

    served: Served
    out_dtype: Any
    shardings: tuple[Any, Any, Any]
    precision: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weight_only(spec: WeightOnlyGroupsSpec, x, w, bias, q, sizes, probe):
    return _weight_only_fprop(spec, x, w, bias, q, sizes)[0]


def _weight_only_fprop(spec: WeightOnlyGroupsSpec, x, w, bias, q, sizes):
    if q is None:
        with in_profiles("quantize weight"):
            q = quantize_weight(w, spec.served.format, spec.served.served_dtype)
    added = None if bias is None else bias.astype(jnp.float32)
    with in_profiles("fprop"):
        return grouped_weight_only(x, q.mT, sizes, added, spec.out_dtype), q


def _weight_only_forward(spec: WeightOnlyGroupsSpec, x, w, bias, q, sizes, probe):
    x, w, bias = differentiated_once((x, w, bias))
    y, q = _weight_only_fprop(spec, x, w, bias, q, sizes)
    like = tuple(dtype_marker(a) for a in (x, w, bias))
    kept = None if w is None else x, named(q, QUANTIZED_WEIGHT), w if spec.served.ste == "clipped" else None
    found = None if probe is None else measured_weight(probe, x, w, q, sizes=sizes)
    return product(y), (kept, like, sizes, found)


def _weight_only_backward(spec: WeightOnlyGroupsSpec, residuals, dy):
    (x, q, clipped), (like_x, like_w, like_bias), sizes, found = residuals
    x_sharding, w_sharding, bias_sharding = spec.shardings
    rows = RowsInGroups(sizes, spec.precision)
    dy = differentiated_once(dy)
    with in_profiles("dgrad"):
        dx = rows.plain_by_weight(dy, jnp.swapaxes(read(q).dequantize(dy.dtype), -1, -2), like_x.dtype, x_sharding)
    dw: Any = None
    if like_w is not None:
        with in_profiles("wgrad"):
            dw = rows.plain_wgrad(x, dy, like_w.dtype, None)
        if clipped is not None:
            dw = through_estimator(dw, clipped, spec.served)
        dw = resharded(dw, w_sharding)
    dbias = rows.bias_gradient(dy, like_bias, bias_sharding)
    return dx, dw, dbias, None, None, found


_weight_only.defvjp(_weight_only_forward, _weight_only_backward)
weight_only_groups = jax.jit(_weight_only, static_argnums=0)
"""WeightOnlyGroupsSpec, x [T, K], w [E, K, N] or None, bias or None, QuantizedArray [E, K, N] or None, sizes,
telemetry's Probe or None -> [T, N]."""
