"""Int4 in the public `quantize`, `dequantize` and `fake_quantize`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.formats import Int4
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.ops.implementation import Implementation
from jaxlowprec.ops.int4 import reference
from jaxlowprec.ops.int4.op import dequantize_op, fake_quantize_op, quantize_op


@functools.partial(jax.jit, static_argnames=("fmt", "axis", "implementation"))
def quantize_int4(x: jax.Array, fmt: Int4, axis: int, implementation: Implementation) -> QuantizedArray:
    """Quantises x [..., M, K] or [K]."""
    rows = jax.lax.stop_gradient(x if x.ndim > 1 else x[None])
    op = quantize_op(fmt, axis == -2, x.shape[axis] % fmt.group_size != 0, implementation)
    data, scale, *zero = (a if x.ndim > 1 else a[0] for a in op(rows))
    return QuantizedArray(data, scale, None, zero[0] if zero else None, fmt, x.shape[-2:], x.dtype, axis, None)


@functools.partial(jax.jit, static_argnames=("dtype", "implementation"))
def dequantize_int4(q: QuantizedArray, dtype: Any, implementation: Implementation) -> jax.Array:
    """The array that q approximates."""
    vector, fmt, length = len(q.matrix_shape) == 1, q.format, q.matrix_shape[q.axis]
    arrays = jax.lax.stop_gradient([a for a in (q.data, q.scale, q.zero_point) if a is not None])
    ragged_length = length if length % fmt.group_size else None
    op = dequantize_op(fmt, q.axis == -2, ragged_length, jnp.dtype(dtype), implementation)
    (values,) = op(*[a[..., None, :] for a in arrays] if vector else arrays)
    return values[..., 0, :] if vector else values


def fake_quantize_int4(x: jax.Array, fmt: Int4, axis: int, implementation: Implementation) -> jax.Array:
    """x quantised and decoded, in one pass."""
    op = fake_quantize_op(fmt, axis == -2, x.shape[axis] % fmt.group_size != 0, implementation)
    return op(x)[0] if x.ndim > 1 else op(x[None])[0][0]


def clipped_int4(x: jax.Array, fmt: Int4, axis: int) -> jax.Array:
    """Mask of the elements of x that the code range clips; all False where the scale covers the largest magnitude."""
    if fmt.symmetric and fmt.rule == "deploy":
        return jnp.zeros(x.shape, bool)
    if axis == -1:
        return reference.clipped(x, fmt)
    return jnp.swapaxes(reference.clipped(jnp.swapaxes(x, -1, -2), fmt), -1, -2)
