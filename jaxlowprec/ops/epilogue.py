"""The epilogue of all GEMMs, applied to float32 sums after their scales: + bias, activation, + accumulate, one cast
(numerics.md 9)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Required, TypedDict

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxlowprec.arguments import a_flag, array, one_of
from jaxlowprec.ops.activations.reference import gelu, gelu_with_derivative
from jaxlowprec.ops.checks import a_sharding, float_array, float_dtype
from jaxlowprec.ops.rounding import rounded, widened
from jaxlowprec.wiring.sharding_rule import spec_of

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
    out_dtype: jax.typing.DTypeLike
    out_spec: PartitionSpec | None = None

    @property
    def is_plain(self) -> bool:
        """Whether sums are only rounded."""
        return not self.bias and not self.accumulate and self.activation is None

    def operands(self, m: str, n: str) -> list[str]:
        """The operands in a wiring rule: bias float32 [..., N], accumulate [..., M, N] and the activation's input
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
        """The names of the epilogue's operands: bias, accumulate, the activation's input."""
        given = iter(extras)
        present = self.bias, self.accumulate, self.activation == "dgelu"
        bias, accumulate, activation_input = (next(given) if there else None for there in present)
        return bias, accumulate, activation_input

    def finish(self, y: jax.Array, extras: Sequence[jax.Array]) -> list[jax.Array]:
        """float32 [..., M, N] -> the results. The platform divides: only CPUs' sums have bytes, and CPUs are exact."""
        bias, accumulate, activation_input = self.split(extras)
        if bias is not None:
            y = y + bias[..., None, :]
        before = y
        if self.activation == "gelu":
            y = gelu(y, divide=jnp.divide)
        elif activation_input is not None:
            y = rounded(y * gelu_with_derivative(widened(activation_input), divide=jnp.divide)[1])
        if accumulate is not None:
            y = y + widened(accumulate)
        return [y.astype(self.out_dtype)] + ([before.astype(self.out_dtype)] if self.pre_activation else [])

    @property
    def accumulators_only(self) -> Epilogue:
        """An epilogue that does nothing, for partial sums that are added up later."""
        return Epilogue(False, False, None, False, jnp.dtype("float32"))


class EpilogueOptions(TypedDict, total=False):
    """Options of `checked_epilogue`, as `scaled_matmul` documents them."""

    bias: Required[Any]
    activation: Activation
    accumulate: Any
    preferred_element_type: Required[jax.typing.DTypeLike]
    return_pre_activation: bool
    activation_input: Any
    out_sharding: Required[Any]


def checked_epilogue(
    who: str,
    shape: tuple[int, ...],
    *,
    bias: Any,
    activation: Activation = None,
    accumulate: Any = None,
    preferred_element_type: jax.typing.DTypeLike,
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
    dtype = float_dtype(who, "preferred_element_type", preferred_element_type)
    present = bias is not None, accumulate is not None
    return Epilogue(*present, activation, return_pre_activation, dtype, spec_of(out_sharding)), extras
