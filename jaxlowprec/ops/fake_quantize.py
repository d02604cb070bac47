"""Fake quantisation: an array quantised and dequantised, with a derivative."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlowprec.arguments import one_of
from jaxlowprec.arrays.formats import Format
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.ops.checks import Implementation, check_implementation, last_axis
from jaxlowprec.ops.dequantize import dequantize
from jaxlowprec.ops.int4.op import clipped_int4, fake_quantize_int4
from jaxlowprec.ops.quantize.api import quantize
from jaxlowprec.ops.quantize.checks import check_holds, check_length, quantizable
from jaxlowprec.ops.rounding import widened

StraightThrough = Literal["identity", "clipped"]


def fake_quantize(
    x: Float[Array, "*B M K"],
    fmt: Format,
    *,
    axis: int = -1,
    ste: StraightThrough = "identity",
    implementation: Implementation = None,
) -> Float[Array, "*B M K"]:
    """x quantised and dequantised: `dequantize(quantize(x, fmt, axis), x.dtype)`, to the bit, with a straight-through
    derivative.

    For Int4 it is one pass that writes no codes. (Int4(rule="slime") is the exception: its numbers differ from those of
    its codes, as in the pipeline that it reproduces.)

    Arguments:
        x: [..., M, K] (or a vector [K]), bfloat16, float16 or float32. For Int4 float32 or the format's scale_dtype:
            the result is rounded to that, whatever dtype holds it.
        fmt: what to quantise to.
        axis: the quantised (contraction) axis, -1 or -2.
        ste: the derivative. "identity": 1 everywhere, the master weight gets the gradient unchanged. "clipped": 0 for
            elements that the format's range cuts off, where rounding to nearest would have left it; 1 elsewhere. Only
            Int4 (asymmetric, and the compressed-tensors rule) and MX formats with scale_rule="floor" cut anything off:
            other scales cover the largest element.
        implementation: None, "ffi", "portable" or "reference": see `quantize`.

    Returns:
        An array like x. Blocks that hold NaN or infinity are NaN throughout; for Float8Tensor the whole slice is.

    Raises:
        TypeError: x is not a float array of those dtypes.
        ValueError: an axis, ste or shape that does not fit.
        NotImplementedError: `implementation="ffi"` where there is no kernel.

    Source: int4_qat.md 1.4; "Estimating or Propagating Gradients Through Stochastic Neurons", arXiv 1308.3432.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> w = jnp.array([0.7, 0.32, -0.26, 0.0])
    >>> jlp.fake_quantize(w, jlp.Int4(group_size=4))
    Array([ 0.69921875,  0.30078125, -0.30078125,  0.        ], dtype=float32)
    >>> jax.grad(lambda w: jlp.fake_quantize(w, jlp.Int4(group_size=4)).sum())(w)
    Array([1., 1., 1., 1.], dtype=float32)
    """
    who = "fake_quantize"
    x = quantizable(who, x, fmt)
    axis = last_axis(who, axis, x.ndim)
    one_of(who, "ste", ste, "identity", "clipped")
    check_implementation(who, implementation)
    check_length(who, x, fmt, axis)
    check_holds(who, x, fmt)
    return _jitted(x, fmt, axis, ste, implementation)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3, 4))
def _fake_quantize(x: jax.Array, fmt: Any, axis: int, ste: str, implementation: Implementation) -> jax.Array:
    if fmt.scaling == "float16":
        return fake_quantize_int4(x, fmt, axis, implementation)
    return dequantize(
        quantize(x, fmt, axis=axis, implementation=implementation), dtype=x.dtype, implementation=implementation
    )


_jitted = jax.jit(_fake_quantize, static_argnums=(1, 2, 3, 4))  # an eager call is one dispatch


@_fake_quantize.defjvp
def _straight_through(
    fmt: Any, axis: int, ste: Any, implementation: Implementation, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    values = _fake_quantize(x, fmt, axis, ste, implementation)
    if ste == "clipped" and fmt.scaling == "float16":
        tangent = jnp.where(clipped_int4(x, fmt, axis), 0, tangent)
    elif ste == "clipped" and fmt.scaling == "e8m0":
        q = quantize(x, fmt, axis=axis, implementation=implementation)
        tangent = jnp.where(_beyond(x, q), 0, tangent)
    return values, tangent


def _beyond(x: jax.Array, q: QuantizedArray) -> jax.Array:
    """Mask of the elements that rounding to nearest takes out of the range of their block's scale, a power of two."""
    fmt = q.format
    middle, beyond = fmt.numbers.overflow
    scale = q.scale.astype(jnp.float32)
    for axis, size in ((-1, fmt.block[1]), (-2, fmt.block[0])):
        scale = jnp.repeat(scale, size, axis=axis) if size > 1 else scale
    scale = scale if q.axis == -1 else jnp.swapaxes(scale, -1, -2)
    limit = middle * scale[tuple(slice(n) for n in x.shape)]
    magnitude = jnp.abs(widened(x))
    return magnitude >= limit if beyond else magnitude > limit
