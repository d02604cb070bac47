"""Products of rows in groups on NVIDIA GPUs: operands decoded to the narrowest type that holds them, multiplied by XLA.

Without the tensor scales every element of NVFP4 and of Float8Tensor is exact in bfloat16, and so is one by a power of
two but for extreme exponents; float32 scales take float32 (numerics.md 9). Numbers are those of the CPU to float32's
rounding, not its bytes. Without batch axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.formats import BLOCK
from jaxlowprec.ops.dequantize.reference import code_values, scale_values
from jaxlowprec.ops.grouped_matmul.groups import Groups, Slots
from jaxlowprec.ops.grouped_matmul.plain import ragged_rows, ragged_wgrad
from jaxlowprec.ops.implementation import Implementation
from jaxlowprec.ops.rounding import flush, rounded
from jaxlowprec.ops.scaled_matmul.reference import alpha
from jaxlowprec.ops.weight_only_matmul import reference
from jaxlowprec.ops.weight_only_matmul.cuda import exact_dtype

_HIGHEST = jax.lax.Precision.HIGHEST


def unless_demanded(implementation: Implementation, body: Callable) -> Callable:
    """`body`, but NotImplementedError where a kernel of the library's own is demanded."""

    def run(*operands):
        if implementation == "ffi":
            raise NotImplementedError(
                'grouped_matmul: implementation="ffi": on GPUs XLA multiplies what lies in groups, no kernel of this '
                "library; use implementation=None"
            )
        return body(*operands)

    return run


def matmul(spec: Any, a_data, sizes, a_scale, b_data, b_scale, *rest) -> jax.Array:
    """`grouped_matmul_op`, sizes second."""
    group = _group_of_rows(sizes, a_data.shape[0])
    dtype = jnp.promote_types(_decoded_dtype(spec.a_format), _decoded_dtype(spec.b_format))
    a = reference.decoded(a_data, a_scale, None, spec.a_format)
    b = reference.decoded(b_data, b_scale, None, spec.b_format)
    depth = min(a.shape[-1], b.shape[-1])  # packed codes may be padded further than the other operand's
    b = jnp.swapaxes(b[..., :depth], -1, -2)
    y = ragged_rows(a[:, :depth].astype(dtype), b.astype(dtype), sizes, _HIGHEST)
    if spec.per_group:
        y = rounded(rounded(y * a_scale[group, None]) * b_scale[group, None])
    if spec.two_level:
        y = rounded(y * alpha(*rest[:2])[group, None])
    return _finished(spec, y, rest[-1] if spec.bias else None, group, sizes)


def weight_only(spec: Any, x, sizes, data, scale, *rest) -> jax.Array:
    """`grouped_weight_only_op`, sizes second."""
    group = _group_of_rows(sizes, x.shape[0])
    amax = rest[0] if spec.format.scaling == "two_level" else None
    zero_point = rest[0] if spec.asymmetric else None
    dtype = exact_dtype(spec.format, x)
    w = reference.decoded(data, scale, zero_point, spec.format)[..., : x.shape[-1]].astype(dtype)
    y = ragged_rows(x.astype(dtype), jnp.swapaxes(w, -1, -2), sizes, _HIGHEST)
    factor = reference.alpha(scale, amax, spec.format)
    if factor is not None:
        y = rounded(y * factor[group, None])
    return _finished(spec, y, rest[-1] if spec.bias else None, group, sizes)


def wgrad(spec: Any, rows: int, a_data, sizes, a_scale, b_data, b_scale, *amaxes) -> jax.Array:
    """`grouped_wgrad_op`, sizes second: contracted over the slots of each group, which hold zeros beyond its rows."""
    groups = Groups.of(sizes, rows)
    block = max(spec.a_format.length, BLOCK)
    slots = Slots.of(groups, block)
    dtype = jnp.promote_types(_decoded_dtype(spec.a_format), _decoded_dtype(spec.b_format))

    def in_slots(data, scale, fmt):
        """[S * block, M]."""
        codes = code_values(data, fmt).T
        codes = codes.reshape(-1, block, codes.shape[1]) if fmt.packed else slots.take(codes, block)
        if fmt.scaling != "tensor":
            codes = flush(codes * scale_values(scale, fmt, 0).T[:, None, :])
        return codes.reshape(-1, codes.shape[-1]).astype(dtype)

    a, b = in_slots(a_data, a_scale, spec.a_format), in_slots(b_data, b_scale, spec.b_format)
    slots_of = jax.ops.segment_sum(jnp.ones_like(slots.group), slots.group, sizes.shape[0])
    y = ragged_wgrad(a, b, slots_of * block, _HIGHEST)
    if spec.per_group:
        y = rounded(rounded(y * a_scale[:, None, None]) * b_scale[:, None, None])
    if spec.two_level:
        y = rounded(y * alpha(*amaxes)[:, None, None])
    return jnp.where((groups.count == 0)[:, None, None], 0.0, y).astype(spec.out_dtype)


def _decoded_dtype(fmt: Any) -> Any:
    return jnp.dtype("float32" if fmt.scaling == "float32" and not fmt.power_of_two else "bfloat16")


def _group_of_rows(sizes: jax.Array, rows: int) -> jax.Array:
    """int32 [T]: of each row; the last one's for rows in none."""
    return jnp.minimum(Groups.of(sizes, rows).of_rows(), sizes.shape[0] - 1)


def _finished(spec: Any, y: jax.Array, bias: jax.Array | None, group: jax.Array, sizes: jax.Array) -> jax.Array:
    """float32 [T, N] + the bias [E, N] of each row's group, cast; zeros for rows in none."""
    y = y if bias is None else y + bias[group]
    there = jnp.arange(y.shape[0]) < Groups.of(sizes, y.shape[0]).ends[-1]
    return jnp.where(there[:, None], y, 0.0).astype(spec.out_dtype)
