"""The block-scaled GEMM as one product of XLA's, for platforms without kernels (numerics.md 9.3).

    NVFP4, MXFP4, MXFP8, powers of two    decoded to bfloat16, which is exact
    Float8Tensor, Float8Rows              FP8 codes as they are, where XLA multiplies FP8; else bfloat16
    Int8Rows                              integers as they are, which is exact; by MXFP4 in bfloat16, by Int4 in float32
    blocks with any float32 scales        decoded to float32, multiplied at the highest precision; by MXFP4, too

The terms are those of the reference; XLA adds them up in an order of its own.

On a TPU each operand is decoded in one pass over its codes, and stored in bfloat16. Left to XLA, every element's scale
would be stored in float32, 32 bits beside a code of 4 or 8, and copied to another layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from jaxlowprec.arrays.formats import Format
from jaxlowprec.ops.dequantize import code_values, scale_values
from jaxlowprec.ops.exact import e2m1_value
from jaxlowprec.ops.scaled_matmul.reference import exact_dot, integer_dot

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
    return values.astype(jnp.bfloat16) if is_exact_in_bfloat16(fmt) and fmt.element != "int4" else values


def decoded_on_tpu(data: jax.Array, scale: jax.Array, fmt: Format, halves: bool = False) -> jax.Array:
    """`decoded`, of blocks that bfloat16 holds exactly, as [..., 1, R, K].

    A NaN among float32 scales makes all of its line NaN, as a product does.

    Arguments:
        halves: the result is [..., 2, R, K / 2], the low nibbles of all bytes and the high ones.
    """
    values = [e2m1_value(data & 15), e2m1_value(data >> 4)] if halves else [code_values(data, fmt)]
    length = fmt.length // len(values)
    scales = scale_values(repeated_on_tpu(scale, length, values[0].shape[-1]), fmt, data.shape[-2])
    rows_major = Layout(major_to_minor=tuple(range(data.ndim)))  # as codes are: XLA would copy them to another one
    found = [with_layout_constraint((each * scales).astype(jnp.bfloat16), rows_major) for each in values]
    # Behind a barrier: XLA would decode an operand again for each tile of the product.
    return jnp.stack(jax.lax.optimization_barrier(found), axis=-3)


@functools.partial(jax.jit, static_argnums=(1, 2))
def repeated_on_tpu(scale: jax.Array, length: int, columns: int) -> jax.Array:
    """Scales [..., B] repeated that often, [..., columns], as a product with ones and zeros.

    It leaves the matrix unit in the layout of codes, and what follows is part of its pass. Bytes and powers of two are
    exact in bfloat16.
    """
    is_byte = scale.dtype.itemsize == 1
    numbers = jax.lax.bitcast_convert_type(scale, jnp.uint8) if is_byte else scale
    ones = jnp.arange(columns)[:, None] // length == jnp.arange(scale.shape[-1])
    found = exact_dot(numbers.astype(jnp.bfloat16), ones.astype(jnp.bfloat16))
    return jax.lax.bitcast_convert_type(found.astype(jnp.uint8), scale.dtype) if is_byte else found


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
    on_one_tpu: bool = False,
) -> jax.Array:
    """`reference.products`, by one product.

    Arguments:
        multiply: (a, b, precision=) -> float32 [..., M, N], where the operands are not two matrices.
        float8: FP8 codes are multiplied as they are.
        on_one_tpu: blocks are decoded by `decoded_on_tpu`, which XLA does not split well over devices, for a product
            without `multiply`.
    """
    if a_format.element == b_format.element == "int8" and multiply is None:
        return integer_dot(a_data, b_data).astype(jnp.float32)
    without_blocks = ("tensor", "rows")
    # Exact operands need one pass, whatever `jax.default_matmul_precision` says.
    exact = all(is_exact_in_bfloat16(fmt) and fmt.element != "int4" for fmt in (a_format, b_format))
    precision = jax.lax.Precision.DEFAULT if exact else jax.lax.Precision.HIGHEST
    if a_format.scaling in without_blocks and b_format.scaling in without_blocks and float8:
        return (multiply or _multiply)(a_data, b_data, precision=precision)
    decode: Callable[..., jax.Array] = decoded
    if on_one_tpu and exact and not {a_format.scaling, b_format.scaling} & {*without_blocks}:
        decode = functools.partial(decoded_on_tpu, halves=a_format.packed and b_format.packed)
        multiply = functools.partial(_multiply, parts=True)
    a, b = decode(a_data, a_scale, a_format), decode(b_data, b_scale, b_format)
    depth = min(a.shape[-1], b.shape[-1])  # packed codes may be padded
    a, b = (v[..., :depth].astype(jnp.promote_types(a.dtype, b.dtype)) for v in (a, b))
    return (multiply or _multiply)(a, b, precision=precision)


def _multiply(a: jax.Array, b: jax.Array, precision: jax.lax.Precision, parts: bool = False) -> jax.Array:
    """[..., M, K] by [..., N, K] -> float32 [..., M, N]. `parts`: they are [..., P, M, K] and [..., P, N, K]."""
    batch = tuple(range(a.ndim - 2 - parts))
    contracted = (*range(len(batch), a.ndim - 2), a.ndim - 1)
    dims = ((contracted, contracted), (batch, batch))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def by_platform(body: Callable, float8: bool) -> Mapping[str | None, Callable]:
    """The bodies of an op for `wiring.define(portable=)`: body(*operands, float8=).

    `float8`: whether FP8 codes may be multiplied as they are on platforms that can.
    """
    as_codes = functools.partial(body, float8=float8)
    return {None: functools.partial(body, float8=False), **dict.fromkeys(FLOAT8_DOTS, as_codes)}
