"""The block-scaled GEMM in pure JAX (numerics.md 9): the byte oracle where bytes are defined."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxlowprec.formats import Format
from jaxlowprec.ops.dequantize.reference import code_values, scale_values
from jaxlowprec.ops.rounding import flush, rounded


def products(
    a_data: jax.Array, a_scale: jax.Array, a_format: Format, b_data: jax.Array, b_scale: jax.Array, b_format: Format
) -> jax.Array:
    """float32 [..., M, N] without the amaxes of two-level formats.

    y = 0; for each block of K in order, with p the dot product of its codes: y = y + p * s_a * s_b. For E2M1 codes p is
    exact, so the bytes are defined; for 8-bit codes the order of additions within p is XLA's. MX scales, powers of two,
    go into the operands where one has 8-bit codes, and p is over all of K.
    """
    values = [code_values(a_data, a_format), code_values(b_data, b_format)]
    scales = [scale_values(a_scale, a_format, a_data.shape[-2]), scale_values(b_scale, b_format, b_data.shape[-2])]
    if a_format.scaling == "tensor":
        return rounded(rounded(_dot(*values) * scales[0]) * scales[1])

    if a_format.scaling == "e8m0" and not (a_format.packed and b_format.packed):
        depth = min(v.shape[-1] for v in values)
        scales = [jnp.repeat(s, a_format.length, axis=-1) for s in scales]
        return _dot(*(rounded(v[..., :depth] * s[..., :depth]) for v, s in zip(values, scales, strict=True)))

    def by_block(v, scale):
        missing = scale.shape[-1] * a_format.length - v.shape[-1]
        v = jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, missing)])
        v = v.reshape(*v.shape[:-1], scale.shape[-1], a_format.length)
        return jnp.moveaxis(v, -2, 0), jnp.moveaxis(scale, -1, 0)

    def add(y, block):
        (a, sa), (b, sb) = block
        sa, sb = sa[..., :, None], sb[..., None, :]
        if a_format.scaling == "two_level":
            return y + _dot(a, b) * (sa * sb), None  # the term is exact: fused or not is the same
        return y + rounded(rounded(_dot(a, b) * sa) * sb), None

    shape = (*a_data.shape[:-2], a_data.shape[-2], b_data.shape[-2])
    blocks = tuple(map(by_block, values, scales))
    return jax.lax.scan(add, jnp.zeros(shape, jnp.float32), blocks)[0]


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum("...mk,...nk->...mn", a, b, preferred_element_type=jnp.float32)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """tanh-GELU as x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3), every operation rounded on its own."""
    f = jnp.float32
    cubic = rounded((x * x) * f(0.0356774069368839263916015625))
    u = x * (cubic + f(0.797884583473205566406250))
    return x / (_exp(u * f(-2.0)) + f(1.0))


def gelu_tanh_gradient(x: jax.Array) -> jax.Array:
    """The derivative of gelu_tanh: s + x s (1 - s) 2u' with s = 1 / (1 + e), e = exp(-2u), and so 1 - s = e s.

    The order of xla_ffi/numerics/gelu.h. At the clamp s is too small for a normal number: exactly 0 and 1 beyond it.
    """
    f = jnp.float32
    x = jnp.clip(x, f(-10.015625), f(10.015625))
    square = x * x
    u = x * (rounded(square * f(0.0356774069368839263916015625)) + f(0.797884583473205566406250))
    e = _exp(u * f(-2.0))
    s = flush(f(1.0) / (e + f(1.0)))
    slope = rounded(square * f(0.2140644490718841552734375)) + f(1.59576916694641113281250)
    return s + rounded((x * s) * ((e * s) * slope))


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


def alpha(a_amax: jax.Array, b_amax: jax.Array) -> jax.Array:
    """What the sum is multiplied by: the tensor scales of two-level operands."""
    return flush(flush(a_amax * b_amax) * jnp.float32(1 / 7225344))


def apply_amaxes(y: jax.Array, a_amax: jax.Array, b_amax: jax.Array) -> jax.Array:
    """acc * alpha."""
    return rounded(y * alpha(a_amax, b_amax)[..., None, None])


def finish(y, bias, accumulate, activation_input, activation, pre_activation: bool, out_dtype) -> list[jax.Array]:
    """+ bias -> activation -> + accumulate -> one cast, each in float32. A second result is what GELU got."""
    if bias is not None:
        y = y + bias[..., None, :]
    before = y
    if activation == "gelu":
        y = gelu_tanh(y)
    elif activation == "dgelu":
        y = rounded(y * gelu_tanh_gradient(activation_input.astype(jnp.float32)))
    if accumulate is not None:
        y = y + accumulate.astype(jnp.float32)
    return [y.astype(out_dtype)] + ([before.astype(out_dtype)] if pre_activation else [])
