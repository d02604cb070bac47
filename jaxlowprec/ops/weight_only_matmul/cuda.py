"""The weight-only GEMM on NVIDIA GPUs: a kernel that decodes the weight in registers takes few rows, XLA takes more.

Numbers differ from the CPU's by float32 rounding: tensor cores add up in another order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxlowprec.ops.weight_only_matmul import reference
from jaxlowprec.wiring import native

if TYPE_CHECKING:
    from jaxlowprec.ops.weight_only_matmul.op import WeightOnlySpec

_CAPABILITIES = (80, 90, 100)  # of the GPUs that a program exported without a GPU may run on


def _plan(spec: WeightOnlySpec, x: jax.Array, scale: jax.Array) -> tuple[str, int]:
    """Why the kernel does not take these operands on the GPUs of this process, or ""; and the bytes of workspace."""
    if not all(isinstance(n, int) for n in (*x.shape, *scale.shape)):
        return "shapes are symbolic, but the way that is taken depends on their sizes: export each size by itself", 0
    plan = native.library().module.cuda_weight_only_plan  # type: ignore[union-attr]
    rows = math.prod(x.shape[:-1]) if spec.shared else x.shape[-2]
    capability = native.compute_capability()
    capabilities = _CAPABILITIES if capability is None else (round(10 * capability),)
    names = (x.dtype.name, scale.dtype.name)
    plans = [plan(spec.format.attributes, *names, rows, x.shape[-1], c) for c in capabilities]
    return next((p for p in plans if not p[0]), plans[0])


def why_not(spec: WeightOnlySpec, x: jax.Array, scale: jax.Array) -> str:
    """Why the kernel does not take these operands; empty if it does."""
    if spec.format.scaling == "rows":
        return "scales of rows have no CUDA kernel yet"
    return _plan(spec, x, scale)[0]


def matmul(
    spec: WeightOnlySpec,
    x: jax.Array,
    data: jax.Array,
    scale: jax.Array,
    amax: jax.Array | None,
    zero_point: jax.Array | None,
    extras: Sequence[jax.Array],
) -> list[jax.Array]:
    """The product by the kernel, which computes the sums times alpha and rounds them; XLA applies another epilogue."""
    lead = x.shape[:-1]
    rows = x.reshape(math.prod(lead), x.shape[-1]) if spec.shared else x
    alpha = reference.alpha(scale, amax, spec.format)
    alpha = alpha if alpha is None else alpha[..., 0, 0]
    dtype = spec.epilogue.out_dtype if spec.epilogue.is_plain else jnp.float32
    results = [
        jax.ShapeDtypeStruct((*rows.shape[:-1], data.shape[-2]), dtype),
        jax.ShapeDtypeStruct((_plan(spec, x, scale)[1],), jnp.uint8),
    ]
    weight = [leaf for leaf in (data, scale, alpha, zero_point) if leaf is not None]
    y, _ = jax.ffi.ffi_call("jaxlowprec_weight_only_matmul", results)(
        rows, *weight, format=spec.format.attributes, asymmetric=spec.format.has_zero_point
    )
    y = y.reshape(*lead, y.shape[-1])
    return [y] if spec.epilogue.is_plain else spec.epilogue.finish(y, extras)
