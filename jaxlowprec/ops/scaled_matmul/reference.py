"""The block-scaled GEMM in pure JAX: the byte oracle (numerics.md 9)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxlowprec.formats import BLOCK
from jaxlowprec.ops.dequantize.reference import e2m1_values, repeat_tiles
from jaxlowprec.ops.rounding import rounded


def accumulate_blocks(a_data, a_scale, b_data, b_scale, a_tiles: bool, b_tiles: bool) -> jax.Array:
    """float32 [..., M, N] without the tensor scales: y = 0; for each block of K in order y = fl(y + term).

    A term, the dot product of 16 E2M1 codes times two E4M3 scales, is exact in float32.
    """

    def by_block(data, scale, tiles):
        values = e2m1_values(data).reshape(*data.shape[:-1], scale.shape[-1], BLOCK)
        return jnp.moveaxis(values, -2, 0), jnp.moveaxis(repeat_tiles(scale, data.shape[-2], tiles), -1, 0)

    def add(y, block):
        (a, sa), (b, sb) = block
        dot = jnp.einsum("...mk,...nk->...mn", a, b, preferred_element_type=jnp.float32)
        return y + dot * (sa[..., :, None] * sb[..., None, :]), None

    shape = (*a_data.shape[:-2], a_data.shape[-2], b_data.shape[-2])
    blocks = (by_block(a_data, a_scale, a_tiles), by_block(b_data, b_scale, b_tiles))
    return jax.lax.scan(add, jnp.zeros(shape, jnp.float32), blocks)[0]


def gelu_tanh(x: jax.Array) -> jax.Array:
    """tanh-GELU as x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3), every operation rounded on its own."""
    f = jnp.float32
    cubic = rounded((x * x) * f(0.0356774069368839263916015625))
    u = x * (cubic + f(0.797884583473205566406250))
    return x / (_exp(u * f(-2.0)) + f(1.0))


def _exp(z: jax.Array) -> jax.Array:
    """exp(z), 0 below -87, infinity above 88: Cody-Waite reduction and a polynomial of degree 6."""
    f = jnp.float32
    n = jax.lax.round(jnp.clip(z, -100, 100) * f(1.44269502162933349609375), jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    r = (z - rounded(n * f(0.693359375))) - rounded(n * f(-2.12194440e-4))
    p = f(1.38888893e-3)
    for coefficient in (8.33333377e-3, 4.16666679e-2, 0.16666667, 0.5, 1.0, 1.0):
        p = rounded(p * r) + f(coefficient)
    power = jax.lax.bitcast_convert_type((n.astype(jnp.int32) + 127) << 23, jnp.float32)
    return jnp.where(z < -87, 0.0, jnp.where(z > 88, jnp.inf, p * power))


def scale_products(y: jax.Array, a_amax: jax.Array, b_amax: jax.Array) -> jax.Array:
    """acc * alpha: the tensor scales of both operands."""
    alpha = (a_amax * b_amax) * jnp.float32(1 / 7225344)
    return rounded(y * alpha[..., None, None])


def finish(y, bias, accumulate, gelu: bool, pre_activation: bool, out_dtype) -> list[jax.Array]:
    """+ bias -> activation -> + accumulate -> one cast, each in float32. A second result is what GELU got."""
    if bias is not None:
        y = y + bias[..., None, :]
    before = y
    if gelu:
        y = gelu_tanh(y)
    if accumulate is not None:
        y = y + accumulate.astype(jnp.float32)
    return [y.astype(out_dtype)] + ([before.astype(out_dtype)] if pre_activation else [])
