"""The block-scaled GEMM as one product of XLA's, for platforms without kernels (numerics.md 9.3).

    NVFP4, MXFP4, MXFP8, powers of two    decoded to bfloat16, which is exact
    Float8Tensor, Float8Rows              FP8 codes as they are, where XLA multiplies FP8; else bfloat16
    Int8Rows                              integers as they are, which is exact
    blocks with any float32 scales        decoded to float32, multiplied at the highest precision

The terms are those of the reference; XLA adds them up in an order of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.formats import Format
from jaxlowprec.ops.dequantize import code_values, scale_values
from jaxlowprec.ops.scaled_matmul.reference import integer_dot

FLOAT8_DOTS = ("tpu", "cuda", "rocm")
"""Platforms on which XLA takes FP8 operands: it multiplies them or, on devices that cannot, converts them."""


def is_exact_in_bfloat16(fmt: Format) -> bool:
    """Whether a code times its block's scale is a bfloat16 number: at most 8 significant bits.

    The scales of a tensor and of lines are left out.
    """
    return fmt.scaling != "float32" or fmt.power_of_two


def decoded(data: jax.Array, scale: jax.Array, fmt: Format) -> jax.Array:
    """Codes times the scales of their blocks, [..., R, K] in the narrowest dtype that holds them exactly.

    The scales of a tensor and of lines are left out.
    """
    values = code_values(data, fmt)
    if fmt.scaling not in ("tensor", "rows"):
        scales = jnp.repeat(scale_values(scale, fmt, data.shape[-2]), fmt.length, axis=-1)
        values = values * scales[..., : values.shape[-1]]
    return values.astype(jnp.bfloat16) if is_exact_in_bfloat16(fmt) else values


def products(
    a_data: jax.Array,
    a_scale: jax.Array,
    a_format: Format,
    b_data: jax.Array,
    b_scale: jax.Array,
    b_format: Format,
    *,
    multiply: Callable[..., jax.Array] | None = None,
    float8: bool = False,
) -> jax.Array:
    """`reference.products`, by one product.

    Arguments:
        multiply: (a, b, precision=) -> float32 [..., M, N], where the operands are not two matrices.
        float8: FP8 codes are multiplied as they are.
    """
    if a_format.element == "int8" and multiply is None:
        return integer_dot(a_data, b_data).astype(jnp.float32)
    if a_format.scaling in ("tensor", "rows") and float8:
        a, b = a_data, b_data
    else:
        a, b = decoded(a_data, a_scale, a_format), decoded(b_data, b_scale, b_format)
        depth = min(a.shape[-1], b.shape[-1])  # packed codes may be padded
        a, b = a[..., :depth], b[..., :depth]
    # Exact operands need one pass, whatever `jax.default_matmul_precision` says.
    exact = is_exact_in_bfloat16(a_format) and is_exact_in_bfloat16(b_format)
    precision = jax.lax.Precision.DEFAULT if exact else jax.lax.Precision.HIGHEST
    return (multiply or _multiply)(a, b, precision=precision)


def _multiply(a: jax.Array, b: jax.Array, precision: jax.lax.Precision) -> jax.Array:
    batch = tuple(range(a.ndim - 2))
    dims = (((a.ndim - 1,), (b.ndim - 1,)), (batch, batch))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def by_platform(body: Callable, float8: bool) -> Mapping[str | None, Callable]:
    """The bodies of an op for `wiring.define(portable=)`: body(*operands, float8=).

    `float8`: whether FP8 codes may be multiplied as they are on platforms that can.
    """
    as_codes = functools.partial(body, float8=float8)
    return {None: functools.partial(body, float8=False), **dict.fromkeys(FLOAT8_DOTS, as_codes)}
