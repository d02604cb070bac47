"""Row-scaled arrays, seen as a batch of matrices of one line: the same bytes, with an amax for each matrix."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.quantized_array import QuantizedArray


def by_tensor(fmt: Any) -> Any:
    """The format with an amax per tensor."""
    return dataclasses.replace(fmt, row_scaled=False)


def lines_of(x: jax.Array, axis: int) -> jax.Array:
    """The lines of x [..., M, K] along `axis` as matrices [..., L, 1, C]."""
    return (jnp.swapaxes(x, -1, -2) if axis == -2 else x)[..., None, :]


def as_matrices(q: QuantizedArray) -> QuantizedArray:
    """q [..., M, K] with an amax per line as its L lines [..., L, 1, C], along axis -1, with an amax per matrix."""
    shape = 1, q.matrix_shape[q.axis]
    data, scale = q.data[..., None, :], q.scale[..., None, :]
    return dataclasses.replace(q, data=data, scale=scale, format=by_tensor(q.format), matrix_shape=shape, axis=-1)
