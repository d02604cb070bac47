"""Activations in float32: the rules of numerics.md 12. Every operation is rounded separately."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlowprec.ops.exact import quotient
from jaxlowprec.ops.rounding import flush, rounded, widened


def exponential(z: jax.Array) -> jax.Array:
    """exp(z), 0 below -87, infinity above 88: Cody-Waite reduction and a polynomial of degree 6."""
    f = jnp.float32
    n = jax.lax.round(jnp.clip(z, -100, 100) * f(1.44269502162933349609375), jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    r = (z - rounded(n * f(0.693359375))) - rounded(n * f(-2.12194440e-4))
    p = f(1.38888893e-3)
    for coefficient in (8.33333377e-3, 4.16666679e-2, 0.16666667, 0.5, 1.0, 1.0):
        p = rounded(p * r) + f(coefficient)
    power = jax.lax.bitcast_convert_type((n.astype(jnp.int32) + 127) << 23, jnp.float32)
    return jnp.where(z < -87, 0.0, jnp.where(z > 88, jnp.inf, p * power))


def gelu(x: jax.Array, divide: Callable[..., jax.Array] = quotient) -> jax.Array:
    """tanh-GELU as x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3)."""
    f = jnp.float32
    cubic = rounded((x * x) * f(0.0356774069368839263916015625))
    u = x * (cubic + f(0.797884583473205566406250))
    return divide(x, exponential(u * f(-2.0)) + f(1.0))


def gelu_with_derivative(x: jax.Array, divide: Callable[..., jax.Array] = quotient) -> tuple[jax.Array, jax.Array]:
    """x s, and s + x s (1 - s) 2u' with s = 1 / (1 + e), e = exp(-2u), and so 1 - s = e s.

    Operations come in the order of xla_ffi/numerics/activations.h. At the clamp s is below the normal numbers, so the
    derivative is exactly 0 or 1 beyond it.
    """
    f = jnp.float32
    clamped = jnp.clip(x, f(-10.015625), f(10.015625))
    square = clamped * clamped
    u = clamped * (rounded(square * f(0.0356774069368839263916015625)) + f(0.797884583473205566406250))
    e = exponential(u * f(-2.0))
    s = flush(divide(f(1.0), e + f(1.0)))
    slope = rounded(square * f(0.2140644490718841552734375)) + f(1.59576916694641113281250)
    return x * s, s + rounded((clamped * s) * ((e * s) * slope))


def silu(x: jax.Array) -> jax.Array:
    """x / (exp(-x) + 1)."""
    return quotient(x, exponential(-x) + jnp.float32(1.0))


def silu_with_derivative(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """t = x s, and s + t (1 - s), with s = 1 / (1 + e), e = exp(-x), and so 1 - s = e s; x from -87 on."""
    x = jnp.maximum(x, jnp.float32(-87.0))
    e = exponential(-x)
    s = quotient(1.0, e + jnp.float32(1.0))
    t = x * s
    return t, s + rounded(t * (e * s))


def relu_squared(x: jax.Array) -> jax.Array:
    """max(x, 0)^2."""
    positive = jnp.maximum(x, jnp.float32(0.0))
    return positive * positive


def relu_squared_with_derivative(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """max(x, 0)^2 and 2 max(x, 0)."""
    positive = jnp.maximum(x, jnp.float32(0.0))
    return positive * positive, positive * jnp.float32(2.0)


class NamedActivation(NamedTuple):
    """An activation with defined bits.

    Attributes:
        name: as `activation_kind` of the bindings spells it; a gated activation has its plain rule's.
        value: float32 -> float32, of the forward pass.
        with_derivative: float32 -> value and derivative, of the backward pass, whose value may differ in the last bits.
        gated: whether it is multiplied by a second operand.
    """

    name: str
    value: Callable[[jax.Array], jax.Array]
    with_derivative: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    gated: bool = False


NAMED_ACTIVATIONS = {
    "gelu": NamedActivation("gelu", gelu, gelu_with_derivative),
    "silu": NamedActivation("silu", silu, silu_with_derivative),
    "relu_squared": NamedActivation("relu_squared", relu_squared, relu_squared_with_derivative),
    "geglu": NamedActivation("gelu", gelu, gelu_with_derivative, gated=True),
    "swiglu": NamedActivation("silu", silu, silu_with_derivative, gated=True),
}


def activation(kind: str, x: jax.Array, up: jax.Array | None = None) -> jax.Array:
    """The activation of x, times `up` if it is gated, rounded once to x's dtype."""
    y = NAMED_ACTIVATIONS[kind].value(widened(x))
    return (y if up is None else y * widened(up)).astype(x.dtype)


def activation_gradient(kind: str, dy: jax.Array, x: jax.Array, up: jax.Array | None = None) -> list[jax.Array]:
    """The gradient of x and, if it is gated, of `up`, rounded once to x's dtype."""
    value, derivative = NAMED_ACTIVATIONS[kind].with_derivative(widened(x))
    dy = widened(dy)
    if up is None:
        return [(dy * derivative).astype(x.dtype)]
    dx = (dy * widened(up)) * derivative
    return [dx.astype(x.dtype), (dy * value).astype(x.dtype)]
