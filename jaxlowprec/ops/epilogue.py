"""The epilogue of all GEMMs, applied to float32 sums after their scales: + bias, activation, + accumulate, one cast
(numerics.md 9)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxlowprec.arguments import a_flag, array, one_of
from jaxlowprec.ops.checks import a_sharding, float_array, float_dtype
from jaxlowprec.ops.rounding import flush, rounded
from jaxlowprec.wiring.out_sharding import spec_of

Activation = Literal["gelu", "dgelu"] | None


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """One variant of the epilogue.

    Attributes:
        bias, accumulate: whether these operands are given.
        activation: None, "gelu" after the bias, or "dgelu": times GELU's derivative at a further operand.
        pre_activation: whether the input of GELU is a second result.
        out_dtype: of the results.
        out_spec: in explicit mode, the wanted partition of the results; see `wiring.define`.
    """

    bias: bool
    accumulate: bool
    activation: Activation
    pre_activation: bool
    out_dtype: Any
    out_spec: PartitionSpec | None = None

    def operands(self, m: str, n: str) -> list[str]:
        """Its operands in a wiring rule: bias float32 [..., N], accumulate [..., M, N] and the activation's input
        [..., M, N], each where it is given."""
        return [f"... {n}"] * self.bias + [f"... {m} {n}"] * (self.accumulate + (self.activation == "dgelu"))

    def results(self, m: str, n: str) -> list[str]:
        """The results in a wiring rule."""
        return [f"... {m} {n}"] * (1 + self.pre_activation)

    def outputs(self, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], Any]]:
        """Shapes and dtypes of the results."""
        return [(shape, self.out_dtype)] * (1 + self.pre_activation)

    @property
    def attributes(self) -> dict[str, Any]:
        """The epilogue for a native call."""
        return {"activation": self.activation or "none", "bias": self.bias, "accumulate": self.accumulate}

    def split(self, extras: Sequence[jax.Array]) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
        """Its operands by name: bias, accumulate, the activation's input."""
        given = iter(extras)
        present = self.bias, self.accumulate, self.activation == "dgelu"
        bias, accumulate, activation_input = (next(given) if there else None for there in present)
        return bias, accumulate, activation_input

    def finish(self, y: jax.Array, extras: Sequence[jax.Array]) -> list[jax.Array]:
        """float32 [..., M, N] -> the results."""
        bias, accumulate, activation_input = self.split(extras)
        if bias is not None:
            y = y + bias[..., None, :]
        before = y
        if self.activation == "gelu":
            y = gelu_tanh(y)
        elif activation_input is not None:
            y = rounded(y * gelu_tanh_gradient(activation_input.astype(jnp.float32)))
        if accumulate is not None:
            y = y + accumulate.astype(jnp.float32)
        return [y.astype(self.out_dtype)] + ([before.astype(self.out_dtype)] if self.pre_activation else [])

    @property
    def sums_only(self) -> Epilogue:
        """An epilogue that does nothing, for partial sums that are added up later."""
        return Epilogue(False, False, None, False, jnp.dtype("float32"))


def checked_epilogue(
    who: str,
    shape: tuple[int, ...],
    *,
    bias: Any,
    activation: Activation = None,
    accumulate: Any = None,
    out_dtype: Any,
    return_pre_activation: bool = False,
    activation_input: Any = None,
    out_sharding: Any,
) -> tuple[Epilogue, list[jax.Array]]:
    """The checked epilogue of a public function whose result has `shape` [..., M, N], and its operands."""
    *batch, _, columns = shape
    one_of(who, "activation", activation, None, "gelu", "dgelu")
    a_flag(who, return_pre_activation=return_pre_activation)
    a_sharding(who, "out_sharding", out_sharding)
    if return_pre_activation and activation != "gelu":
        raise ValueError(f'{who}: return_pre_activation=True with activation={activation!r}; it is for "gelu"')
    if (activation_input is None) == (activation == "dgelu"):
        given = "missing" if activation_input is None else "given"
        needs = '"dgelu" needs it, other activations take none'
        raise ValueError(f"{who}: activation_input= is {given} and activation={activation!r}; {needs}")
    extras = []
    if bias is not None:
        bias = array(who, "bias", bias)
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise TypeError(f"{who}: bias has dtype {bias.dtype}; needs floats")
        if bias.shape not in ((columns,), (*batch, columns)):
            raise ValueError(f"{who}: bias has shape {bias.shape}; needs {(columns,)} or {(*batch, columns)}")
        extras.append(jnp.broadcast_to(bias.astype(jnp.float32), (*batch, columns)))
    for name, value in (("accumulate", accumulate), ("activation_input", activation_input)):
        if value is not None:
            value = float_array(who, name, value)
            if value.shape != shape:
                raise ValueError(f"{who}: {name} has shape {value.shape}; needs {shape}")
            extras.append(value)
    dtype = float_dtype(who, "out_dtype", out_dtype)
    present = bias is not None, accumulate is not None
    return Epilogue(*present, activation, return_pre_activation, dtype, spec_of(out_sharding)), extras


def gelu_tanh(x: jax.Array) -> jax.Array:
    """tanh-GELU as x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3), every operation rounded separately."""
    f = jnp.float32
    cubic = rounded((x * x) * f(0.0356774069368839263916015625))
    u = x * (cubic + f(0.797884583473205566406250))
    return x / (_exp(u * f(-2.0)) + f(1.0))


def gelu_tanh_gradient(x: jax.Array) -> jax.Array:
    """The derivative of gelu_tanh: s + x s (1 - s) 2u' with s = 1 / (1 + e), e = exp(-2u), and so 1 - s = e s.

    Operations come in the order of xla_ffi/numerics/gelu.h. At the clamp s is below the normal numbers, so the result
    is exactly 0 or 1 beyond it.
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
