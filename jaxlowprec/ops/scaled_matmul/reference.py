"""The block-scaled GEMM in pure JAX (numerics.md 9): the byte oracle where bytes are defined."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.formats import Format
from jaxlowprec.ops.dequantize import code_values, scale_values
from jaxlowprec.ops.rounding import flush, rounded


def products(
    a_data: jax.Array, a_scale: jax.Array, a_format: Format, b_data: jax.Array, b_scale: jax.Array, b_format: Format
) -> jax.Array:
    """float32 [..., M, N] without the amaxes of two-level formats.

    y = 0; for each block of K in order, with p the dot product of its codes: y = y + p * s_a * s_b. For E2M1 codes p is
    exact, so the bytes are defined; for 8-bit codes the order of additions within p is XLA's. MX scales, powers of two,
    go into the operands where one has 8-bit codes, and p is over all of K; so it is with the scales of lines, where p
    of integers is exact. An MXFP4 weight of FP8 blocks has its scales in the operand, and none for a block.
    """
    if a_format.scaling == "rows" and b_format.scaling != "rows":
        return apply_line_scales(integers_by_groups(a_data, b_data, b_scale, b_format), a_scale)
    values = [code_values(a_data, a_format), code_values(b_data, b_format)]
    scales = [scale_values(a_scale, a_format, a_data.shape[-2]), scale_values(b_scale, b_format, b_data.shape[-2])]
    if a_format.scaling == "tensor":
        return apply_tensor_scales(exact_dot(*values), a_scale, b_scale)
    if a_format.scaling == "rows":
        y = integer_dot(a_data, b_data).astype(jnp.float32) if a_format.element == "int8" else exact_dot(*values)
        return apply_line_scales(y, a_scale, b_scale)

    if a_format.scaling == "e8m0" and not (a_format.packed and b_format.packed):
        depth = min(v.shape[-1] for v in values)
        scales = [jnp.repeat(s, a_format.length, axis=-1) for s in scales]
        return exact_dot(*(rounded(v[..., :depth] * s[..., :depth]) for v, s in zip(values, scales, strict=True)))

    if a_format.scaling != b_format.scaling:
        values[1] = rounded(values[1] * jnp.repeat(scales[1], b_format.length, axis=-1))[..., : values[0].shape[-1]]
        scales[1] = jnp.ones((*values[1].shape[:-1], scales[0].shape[-1]), jnp.float32)

    def by_block(v: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        missing = scale.shape[-1] * a_format.length - v.shape[-1]
        v = jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, missing)])
        v = v.reshape(*v.shape[:-1], scale.shape[-1], a_format.length)
        return jnp.moveaxis(v, -2, 0), jnp.moveaxis(scale, -1, 0)

    def term(block: Any) -> jax.Array:
        (a, sa), (b, sb) = block
        sa, sb = sa[..., :, None], sb[..., None, :]
        if a_format.scaling == "two_level":
            return exact_dot(a, b) * (sa * sb)  # exact, so a fused multiply-add gives the same
        return rounded(rounded(exact_dot(a, b) * sa) * sb)

    blocks = tuple(map(by_block, values, scales))
    if blocks[0][0].shape[0] == 0:
        return jnp.zeros((*a_data.shape[:-2], a_data.shape[-2], b_data.shape[-2]), jnp.float32)
    first = term(jax.tree.map(lambda v: v[0], blocks))
    first = jnp.where(first == 0, 0, first)  # 0 + -0 is 0, but XLA takes 0 + x to be x
    rest = jax.tree.map(lambda v: v[1:], blocks)
    return jax.lax.scan(lambda y, block: (y + term(block), None), first, rest)[0]


def exact_dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """[..., M, K] by [..., N, K], float32 numbers that bfloat16 holds exactly: one pass is enough, whatever
    `jax.default_matmul_precision` says."""
    precision = jax.lax.Precision.DEFAULT
    return jnp.einsum("...mk,...nk->...mn", a, b, precision=precision, preferred_element_type=jnp.float32)


def integer_dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """int8 [..., M, K] by [..., N, K] -> int32 [..., M, N], exact for K up to 131,072."""
    return jnp.einsum("...mk,...nk->...mn", a, b, preferred_element_type=jnp.int32)


def integers_by_groups(a_data: jax.Array, b_data: jax.Array, b_scale: jax.Array, b_format: Format) -> jax.Array:
    """8-bit integers [..., M, K] by a 4-bit weight [..., N, K] -> float32 [..., M, N], without the scales of a's lines.

    y = 0; for each group of K in order, with p the exact sum of its products: y = fma(p, s_b, y). XLA may round the
    product of an Int4 scale, of up to 11 bits, before it adds; with MXFP4's powers of two that changes nothing.
    """
    groups, length = b_scale.shape[-1], b_format.length
    values = a_data.astype(jnp.float32), code_values(b_data, b_format)

    def by_group(v: jax.Array) -> jax.Array:
        v = jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, groups * length - v.shape[-1])])
        return jnp.moveaxis(v.reshape(*v.shape[:-1], groups, length), -2, 0)

    def add(y: jax.Array, group: Any) -> tuple[jax.Array, None]:
        a, b, scale = group
        return y + exact_dot(a, b) * scale[..., None, :], None

    scales = jnp.moveaxis(scale_values(b_scale, b_format, b_data.shape[-2]), -1, 0)
    zero = jnp.zeros((*a_data.shape[:-1], b_data.shape[-2]), jnp.float32)
    return jax.lax.scan(add, zero, (*map(by_group, values), scales))[0]


def apply_line_scales(y: jax.Array, a_scale: jax.Array, b_scale: jax.Array | None = None) -> jax.Array:
    """Sums [..., M, N] times the scales of columns [..., N, 1], if they are given, then of rows [..., M, 1]."""
    if b_scale is not None:
        y = rounded(y * jnp.swapaxes(b_scale, -1, -2).astype(jnp.float32))
    return rounded(y * a_scale.astype(jnp.float32))


def alpha(a_amax: jax.Array, b_amax: jax.Array) -> jax.Array:
    """The product of the tensor scales of two-level operands, which multiplies the sums."""
    return flush(flush(a_amax * b_amax) * jnp.float32(1 / 7225344))


def apply_tensor_scales(y: jax.Array, a_scale: jax.Array, b_scale: jax.Array) -> jax.Array:
    """The sums of two Float8Tensors times their scales [...]."""
    return rounded(rounded(y * a_scale[..., None, None]) * b_scale[..., None, None])


def apply_amaxes(y: jax.Array, a_amax: jax.Array, b_amax: jax.Array) -> jax.Array:
    """acc * alpha."""
    return rounded(y * alpha(a_amax, b_amax)[..., None, None])
