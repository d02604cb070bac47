"""GEMM of two quantised operands."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlowprec.formats import BLOCK, NVFP4
from jaxlowprec.ops.checks import float_array, float_dtype
from jaxlowprec.ops.implementation import Implementation
from jaxlowprec.ops.scaled_matmul.op import MatmulSpec, matmul_op
from jaxlowprec.quantized_array import QuantizedArray

Activation = Literal["gelu"] | None


def scaled_matmul(
    a: QuantizedArray,
    b: QuantizedArray,
    bias: Float[Array, "*B N"] | None = None,
    activation: Activation = None,
    accumulate: Float[Array, "*B M N"] | None = None,
    out_dtype: Any = jnp.bfloat16,
    implementation: Implementation = None,
    *,
    return_pre_activation: bool = False,
) -> Float[Array, "*B M N"] | tuple[Float[Array, "*B M N"], Float[Array, "*B M N"]]:
    """`a @ b.mT`, contracted over the quantised axis of both, accumulated in float32.

    acc -> * tensor scales -> + bias -> activation -> + accumulate -> one cast to `out_dtype`, each in float32. On the
    CPU the bytes are defined: exact within a block of 16, sequential over blocks, the same on every instruction set. A
    row of the result does not depend on the other rows. Not differentiable: see `jaxlowprec.linear`.

    Arguments:
        a: [..., M, K], quantised along its last axis.
        b: [..., N, K], quantised along its last axis. A columnwise result of `quantize_both` is one as `.mT`.
        bias: [N] or [..., N], any float dtype.
        activation: None or "gelu" (tanh form).
        accumulate: [..., M, N], bfloat16, float16 or float32.
        out_dtype: bfloat16, float16 or float32.
        implementation: None, "ffi" or "reference".
        return_pre_activation: also return what the activation was applied to, in `out_dtype`.

    Returns:
        [..., M, N]; with `return_pre_activation` a pair of it and the pre-activation.

    Raises:
        TypeError: an operand that is not quantised, or a dtype that does not fit.
        ValueError: operands quantised along another axis, of different length or batch, or rotated differently.
        NotImplementedError: formats without a GEMM, or `implementation="ffi"` where there is no kernel.

    Source: numerics.md 9.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> x, w = jnp.ones((32, 64)), jnp.ones((48, 64))
    >>> jlp.scaled_matmul(jlp.quantize(x, jlp.NVFP4()), jlp.quantize(w, jlp.NVFP4((16, 16)))).shape
    (32, 48)
    """
    who = "scaled_matmul"
    _check_operands(who, a, b)
    batch, (rows, _), (columns, _) = a.shape[:-2], a.matrix, b.matrix
    if activation not in (None, "gelu"):
        raise ValueError(f'{who}: activation={activation!r}; needs None or "gelu"')
    if return_pre_activation and activation is None:
        raise ValueError(f"{who}: return_pre_activation=True without an activation; the result is what you want")
    extras = []
    if bias is not None:
        bias = jnp.asarray(bias)
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise TypeError(f"{who}: bias has dtype {bias.dtype}; needs floats")
        if bias.shape not in ((columns,), (*batch, columns)):
            raise ValueError(f"{who}: bias has shape {bias.shape}; needs {(columns,)} or {(*batch, columns)}")
        extras.append(jnp.broadcast_to(bias.astype(jnp.float32), (*batch, columns)))
    if accumulate is not None:
        accumulate = float_array(who, "accumulate", accumulate)
        if accumulate.shape != (*batch, rows, columns):
            raise ValueError(f"{who}: accumulate has shape {accumulate.shape}; needs {(*batch, rows, columns)}")
        extras.append(accumulate)
    spec = MatmulSpec(
        a.format.tiles,
        b.format.tiles,
        rows % BLOCK != 0,
        columns % BLOCK != 0,
        bias is not None,
        accumulate is not None,
        activation == "gelu",
        return_pre_activation,
        float_dtype(who, "out_dtype", out_dtype),
    )
    out = _multiply((a.data, a.scale, a.amax, b.data, b.scale, b.amax, *extras), spec, implementation)
    return tuple(out) if return_pre_activation else out[0]


@functools.partial(jax.jit, static_argnames=("spec", "implementation"))
def _multiply(operands: tuple[jax.Array, ...], spec: MatmulSpec, implementation: Implementation) -> list[jax.Array]:
    return matmul_op(spec, implementation)(*jax.lax.stop_gradient(operands))


def _check_operands(who: str, a: Any, b: Any) -> None:
    for name, q in (("a", a), ("b", b)):
        if not isinstance(q, QuantizedArray):
            raise TypeError(f"{who}: {name} is a {type(q).__name__}; needs a QuantizedArray: quantise it first")
        if not isinstance(q.format, NVFP4):
            raise NotImplementedError(f"{who}: {name} has the format {q.format}; there is a GEMM for NVFP4 alone")
        if len(q.matrix) != 2:
            raise ValueError(f"{who}: {name} has shape {q.shape}; needs two dimensions or more")
        if q.axis != -1:
            raise ValueError(
                f"{who}: {name} of shape {q.shape} is quantised along axis {q.axis}, but the last axis is contracted: "
                f"quantise it with axis=-1, or pass {name}.mT to contract over its axis of {q.matrix[-2]}"
            )
    if a.matrix[-1] != b.matrix[-1]:
        raise ValueError(
            f"{who}: a {a.shape} and b {b.shape} differ in the contracted last axis: {a.matrix[-1]} and {b.matrix[-1]}"
        )
    if a.shape[:-2] != b.shape[:-2]:
        raise ValueError(
            f"{who}: a {a.shape} and b {b.shape} differ in their batch axes; broadcast them before quantising"
        )
    if a.hadamard != b.hadamard:
        raise ValueError(
            f"{who}: a has hadamard={a.hadamard} and b has {b.hadamard}; "
            "a rotation cancels only if both operands have it, with the same signs"
        )
