"""The random Hadamard transform as a differentiable function."""

from __future__ import annotations

import functools
from typing import Literal

import jax
from jaxtyping import Array, Float

from jaxlowprec.arguments import a_flag
from jaxlowprec.arrays.hadamard import DEFAULT_SIGNS, Hadamard
from jaxlowprec.ops.checks import float_array, last_axis
from jaxlowprec.ops.hadamard.op import hadamard_op
from jaxlowprec.ops.hadamard.signs import sign_source, signs_of
from jaxlowprec.ops.implementation import Implementation, check_implementation


def hadamard_transform(
    x: Float[Array, "*B R C"],
    axis: int = -1,
    size: int = 16,
    signs: tuple[int, ...] | Literal["drawn"] | None = DEFAULT_SIGNS,
    inverse: bool = False,
    implementation: Implementation = None,
    *,
    sign_key: jax.Array | None = None,
) -> Float[Array, "*B R C"]:
    """`((x * signs) @ H) / sqrt(size)` on each `size` consecutive elements of an axis.

    Computed in float32 and rounded once to x's dtype. Its inverse (`inverse=True`: first H, then the signs) is its
    transpose, which is also its gradient.

    Arguments:
        x: bfloat16, float16 or float32, of one or more dimensions.
        axis: the last or second last axis; its length is a multiple of `size`.
        size: 16, 32, 64, 128 or 256.
        signs: see `Hadamard`; None for plain H, "drawn" for those of `sign_key`.
        inverse: undo the transform.
        implementation: None, "ffi" or "reference".
        sign_key: of drawn signs, and only of those: see `quantize`.

    Raises:
        TypeError: x is not a float array of those dtypes, or the key is not usable.
        ValueError: an axis, size, signs, sign_key or length that does not fit.
        NotImplementedError: `implementation="ffi"` where there is no kernel.

    Source: numerics.md 3 and 15; arXiv 2509.25149, section 4.2.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> x = jnp.arange(1.0, 17.0)
    >>> jlp.hadamard_transform(x)[:4]
    Array([-15.5,  -7.5,   7.5,  -0.5], dtype=float32)
    """
    who = "hadamard_transform"
    hadamard = Hadamard(size, signs)
    x = float_array(who, "x", x)
    axis = last_axis(who, axis, x.ndim)
    check_implementation(who, implementation)
    a_flag(who, inverse=inverse)
    if x.shape[axis] % size:
        raise ValueError(
            f"{who}: axis {axis} has {x.shape[axis]} elements; needs a multiple of size={size}: pad it with jnp.pad"
        )
    matrix = x[None] if x.ndim == 1 else x
    source = sign_source(who, hadamard, sign_key, matrix.shape[:-2])
    drawn = None if source is None else signs_of(source, matrix.shape[:-2])
    y = _transform(hadamard, axis == -2, inverse, implementation, matrix, drawn)
    return y[0] if x.ndim == 1 else y


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _transform(hadamard: Hadamard, vertical: bool, inverse: bool, implementation: Implementation, x, drawn):
    op = hadamard_op(hadamard, vertical, inverse, implementation)
    return op(x, *([] if drawn is None else [drawn]))[0]


def _forward(hadamard, vertical, inverse, implementation, x, drawn):
    return _transform(hadamard, vertical, inverse, implementation, x, drawn), drawn


def _backward(hadamard, vertical, inverse, implementation, drawn, dy):
    return _transform(hadamard, vertical, not inverse, implementation, dy, drawn), None


_transform.defvjp(_forward, _backward)
