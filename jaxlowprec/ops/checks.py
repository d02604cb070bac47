"""Argument checks that several ops share. Every message says who, what was given, what is needed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

FLOATS = (jnp.dtype("bfloat16"), jnp.dtype("float16"), jnp.dtype("float32"))


def float_array(who: str, name: str, x: Any) -> jax.Array:
    """`x` as an array of one of the three float types the kernels take."""
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        x = jnp.asarray(x)
    if x.dtype not in FLOATS:
        raise TypeError(
            f"{who}: {name} has dtype {x.dtype}; needs bfloat16, float16 or float32: cast it with .astype(...) first"
        )
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def float_dtype(who: str, name: str, dtype: Any) -> jnp.dtype:
    """A dtype that a result can have."""
    dtype = jnp.dtype(dtype)
    if dtype not in FLOATS:
        raise TypeError(f"{who}: {name}={dtype.name}; needs bfloat16, float16 or float32")
    return dtype


def last_axis(who: str, axis: int, ndim: int) -> int:
    """-1 or -2, from any spelling of the last or second last axis."""
    if not isinstance(axis, int) or isinstance(axis, bool):
        raise TypeError(f"{who}: axis={axis!r}; needs an int")
    if not -ndim <= axis < ndim:
        raise ValueError(f"{who}: axis={axis} is out of range for an array of {ndim} dimensions")
    normal = axis - ndim if axis >= 0 else axis
    if normal < -2:
        raise ValueError(
            f"{who}: axis={axis} of {ndim} dimensions is a batch axis; needs the last or second last: "
            "move it there with jnp.moveaxis"
        )
    return normal
