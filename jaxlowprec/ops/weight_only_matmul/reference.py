"""The weight-only GEMM in pure JAX: the byte oracle for activations in bfloat16 and float16, whose products are exact.

Lane j of 16 sums k = j, j + 16, ... in order with fused multiply-adds from 0; the 16 lanes are added as a tree, j with
j + 8, then + 4, + 2, + 1. So the bytes of a row depend neither on the other rows nor on the platform.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.formats import Format
from jaxlowprec.arrays.layouts import pad_to_multiples
from jaxlowprec.ops.dequantize import code_values, scale_values
from jaxlowprec.ops.int4 import reference as int4
from jaxlowprec.ops.quantize.reference import NVFP4_MAX
from jaxlowprec.ops.rounding import flush, rounded, widened

LANES = 16
_LANES_AT_ONCE = 1 << 24  # float32 sums of the rows that are multiplied together: 64 MiB


def decoded(data: jax.Array, scale: jax.Array, zero_point: jax.Array | None, fmt: Format) -> jax.Array:
    """A weight as float32 [..., N, K], K padded as its codes are, without the scales of a tensor or of lines."""
    if fmt.scaling == "float16":
        columns = scale.shape[-1] * fmt.length
        return int4.dequantize(data, scale, zero_point, fmt, columns, jnp.dtype("float32"))
    codes = code_values(data, fmt)
    if fmt.scaling in ("tensor", "rows"):
        return codes
    scales = jnp.repeat(scale_values(scale, fmt, data.shape[-2]), fmt.length, axis=-1)
    return flush(codes * scales[..., : codes.shape[-1]])


def alpha(scale: jax.Array, amax: jax.Array | None, fmt: Format) -> jax.Array | None:
    """The factor of the sums, float32 [..., 1, 1], or [..., 1, N] of lines' scales: for formats that have one such."""
    if amax is not None:
        return flush(amax * jnp.float32(1 / NVFP4_MAX))[..., None, None]
    if fmt.scaling == "rows":
        return jnp.swapaxes(scale, -1, -2).astype(jnp.float32)
    return scale[..., None, None] if fmt.scaling == "tensor" else None


def products(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [..., M, K], w float32 [..., N, >= K] -> the sums, float32 [..., M, N]."""
    depth, columns = x.shape[-1], w.shape[-2]
    x, w = (pad_to_multiples(v, 1, LANES) for v in (widened(x), w[..., :depth]))

    def steps(v: jax.Array) -> jax.Array:
        return jnp.moveaxis(v.reshape(*v.shape[:-1], v.shape[-1] // LANES, LANES), -2, 0)

    w_steps = steps(w)

    def one_row(row: jax.Array) -> jax.Array:  # [..., K]
        def add(sums: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            x, w = step
            return sums + x[..., None, :] * w, None

        zero = jnp.zeros((*row.shape[:-1], columns, LANES), jnp.float32)
        sums, _ = jax.lax.scan(add, zero, (steps(row), w_steps))
        for half in (8, 4, 2, 1):
            sums = sums[..., :half] + sums[..., half:]
        return sums[..., 0]

    rows = jnp.moveaxis(x, -2, 0)
    at_once = max(1, _LANES_AT_ONCE // max(1, LANES * columns * math.prod(x.shape[:-2])))
    if x.shape[-2] <= at_once:
        return jnp.moveaxis(jax.vmap(one_row)(rows), 0, -2)
    return jnp.moveaxis(jax.lax.map(one_row, rows, batch_size=at_once), 0, -2)


def apply_alpha(sums: jax.Array, alpha: jax.Array | None) -> jax.Array:
    """sums * alpha."""
    return sums if alpha is None else rounded(sums * alpha)
