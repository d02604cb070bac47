"""Activations with defined bits, whose backward pass keeps their operands alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlowprec import wiring
from jaxlowprec.arguments import shown
from jaxlowprec.ops.activations.op import activation_gradient_op, activation_op
from jaxlowprec.ops.amax import NO_AMAXES, Amaxes
from jaxlowprec.ops.checks import Implementation, check_implementation, float_array, no_derivative
from jaxlowprec.wiring.sharding_rule import resharded, sharding_of


def gelu(
    x: Float[Array, "..."], *, approximate: bool = True, implementation: Implementation = None
) -> Float[Array, "..."]:
    """The tanh form of GELU, x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)).

    Computed in float32 and rounded once to x's dtype, as its gradient is. The backward pass keeps x alone.

    Arguments:
        x: bfloat16, float16 or float32.
        approximate: True, as `jax.nn.gelu` has it; the exact form is not there.
        implementation: None, "ffi", "portable" or "reference": see `quantize`.

    Raises:
        TypeError: x is no float array of those dtypes.
        NotImplementedError: `approximate=False`; a second derivative; `implementation="ffi"` where there is no kernel.

    Source: numerics.md 12; arXiv 1606.08415.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> jlp.gelu(jnp.array([-1.0, 0.0, 1.0]))
    Array([-0.158808,  0.      ,  0.841192], dtype=float32)
    """
    if approximate is not True:
        raise NotImplementedError(
            f"gelu: approximate={shown(approximate)}; only the tanh form, True, is there: use "
            "jax.nn.gelu(x, approximate=False)"
        )
    return _activation("gelu", implementation, x)


def silu(x: Float[Array, "..."], *, implementation: Implementation = None) -> Float[Array, "..."]:
    """x sigmoid(x), also called swish.

    Computed in float32 and rounded once to x's dtype, as its gradient is. The backward pass keeps x alone.

    Arguments:
        x: bfloat16, float16 or float32.
        implementation: None, "ffi", "portable" or "reference": see `quantize`.

    Raises:
        TypeError: x is no float array of those dtypes.
        NotImplementedError: a second derivative; `implementation="ffi"` where there is no kernel.

    Source: numerics.md 12; arXiv 1702.03118.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> jlp.silu(jnp.array([-1.0, 0.0, 1.0]))
    Array([-0.26894143,  0.        ,  0.7310586 ], dtype=float32)
    """
    return _activation("silu", implementation, x)


def relu_squared(x: Float[Array, "..."], *, implementation: Implementation = None) -> Float[Array, "..."]:
    """max(x, 0)^2.

    Computed in float32 and rounded once to x's dtype, as its gradient is. The backward pass keeps x alone.

    Arguments:
        x: bfloat16, float16 or float32.
        implementation: None, "ffi", "portable" or "reference": see `quantize`.

    Raises:
        TypeError: x is no float array of those dtypes.
        NotImplementedError: a second derivative; `implementation="ffi"` where there is no kernel.

    Source: numerics.md 12; arXiv 2109.08668.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> jlp.relu_squared(jnp.array([-1.0, 0.5, 3.0]))
    Array([0.  , 0.25, 9.  ], dtype=float32)
    """
    return _activation("relu_squared", implementation, x)


def swiglu(
    gate: Float[Array, "..."], up: Float[Array, "..."], *, implementation: Implementation = None
) -> Float[Array, "..."]:
    """silu(gate) * up.

    Computed in float32 and rounded once to the operands' dtype, as the gradients are. `jax.nn.silu(gate) * up` in
    bfloat16 rounds after each operation and has 1.7 times the error. The backward pass keeps the two operands alone.

    Arguments:
        gate, up: of one shape and dtype: bfloat16, float16 or float32.
        implementation: None, "ffi", "portable" or "reference": see `quantize`.

    Raises:
        TypeError: an operand is no float array of those dtypes, or their dtypes differ.
        ValueError: their shapes differ.
        NotImplementedError: a second derivative; `implementation="ffi"` where there is no kernel.

    Source: numerics.md 12; arXiv 2002.05202.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> jlp.swiglu(jnp.array([-1.0, 0.0, 1.0]), jnp.array([2.0, 2.0, 2.0]))
    Array([-0.53788286,  0.        ,  1.4621172 ], dtype=float32)
    """
    return _activation("swiglu", implementation, gate, up)


def geglu(
    gate: Float[Array, "..."], up: Float[Array, "..."], *, implementation: Implementation = None
) -> Float[Array, "..."]:
    """gelu(gate) * up, of GELU's tanh form.

    Computed in float32 and rounded once to the operands' dtype, as the gradients are. The backward pass keeps the two
    operands alone.

    Arguments:
        gate, up: of one shape and dtype: bfloat16, float16 or float32.
        implementation: None, "ffi", "portable" or "reference": see `quantize`.

    Raises:
        TypeError: an operand is no float array of those dtypes, or their dtypes differ.
        ValueError: their shapes differ.
        NotImplementedError: a second derivative; `implementation="ffi"` where there is no kernel.

    Source: numerics.md 12; arXiv 2002.05202.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> jlp.geglu(jnp.array([-1.0, 0.0, 1.0]), jnp.array([2.0, 2.0, 2.0]))
    Array([-0.317616,  0.      ,  1.682384], dtype=float32)
    """
    return _activation("geglu", implementation, gate, up)


ACTIVATIONS = {"geglu": geglu, "gelu": gelu, "relu_squared": relu_squared, "silu": silu, "swiglu": swiglu}
"""The functions by their names, which layers take."""


def _activation(kind: str, implementation: Implementation, *operands: Any) -> jax.Array:
    """The activation of operands that are checked here: x, or gate and up."""
    check_implementation(kind, implementation)
    names = ("gate", "up") if len(operands) == 2 else ("x",)
    arrays = [float_array(kind, name, x) for name, x in zip(names, operands, strict=True)]
    first, last = arrays[0], arrays[-1]
    if first.shape != last.shape:
        raise ValueError(f"{kind}: gate has shape {first.shape}, up {last.shape}; needs one shape")
    if first.dtype != last.dtype:
        raise TypeError(f"{kind}: gate has dtype {first.dtype}, up {last.dtype}; needs one dtype: cast one of them")
    aligned = wiring.align_varying(*(jnp.atleast_2d(x) for x in arrays))
    return _activate(kind, implementation, *aligned).reshape(first.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _activate(kind: str, implementation: Implementation, *operands: jax.Array) -> jax.Array:
    return activation_op(kind, implementation)(*operands)[0]


def _forward(
    kind: str, implementation: Implementation, *operands: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    operands = _differentiated_once(operands)
    return activation_op(kind, implementation)(*operands)[0], operands


def _backward(
    kind: str, implementation: Implementation, operands: tuple[jax.Array, ...], dy: jax.Array
) -> tuple[jax.Array, ...]:
    gradients = activation_gradient_op(kind, implementation)(_differentiated_once(dy), *operands)
    return tuple(resharded(g, sharding_of(x)) for g, x in zip(gradients, operands, strict=True))


_activate.defvjp(_forward, _backward)
_differentiated_once = no_derivative("activations of jaxlowprec have no second derivative; use those of jax.nn for one")


# What linears call inside of their own derivatives. Operands are checked already: arrays [..., R, C] of one shape and
# dtype, x, or gate and up; with amaxes whose rows are split, [..., S, R, C].


def activated(
    kind: str, operands: Sequence[jax.Array], amaxes: Amaxes | None, implementation: Implementation = None
) -> tuple[jax.Array, list[jax.Array]]:
    """The activation, and the wanted amaxes of it, as `ops.amax.amax` gives them: float32 [...]. No pass over the
    result is taken for them. Without a derivative."""
    amaxes = (amaxes or NO_AMAXES).of_rows(operands[0].shape[-2])
    y, *found = activation_op(kind, implementation, amaxes)(*wiring.align_varying(*operands))
    return y, found


def activation_gradients(
    kind: str,
    dy: jax.Array,
    operands: Sequence[jax.Array],
    amaxes: Amaxes | None,
    implementation: Implementation = None,
    *,
    row_sums: bool = False,
) -> tuple[list[jax.Array], list[list[jax.Array]], list[jax.Array]]:
    """The gradient of each operand; the wanted amaxes of each gradient, see `activated`; and, if `row_sums`, its sum
    over rows, float32 [..., C], which is the gradient of a bias that the operand had."""
    amaxes = (amaxes or NO_AMAXES).of_rows(dy.shape[-2])
    results = activation_gradient_op(kind, implementation, amaxes, row_sums)(*wiring.align_varying(dy, *operands))
    count, each = len(operands), amaxes.count
    gradients, found = list(results[:count]), list(results[count:])
    return gradients, [found[i * each : (i + 1) * each] for i in range(count)], found[count * each :]
