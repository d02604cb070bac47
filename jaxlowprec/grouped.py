"""A stand-in of the grouped product, in high precision."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Float, Int32

from jaxlowprec.autocast import FROM_CONTEXT


def grouped_matmul(
    x: Float[Array, "T K"],
    kernels: Float[Array, "E K N"],
    group_sizes: Int32[Array, "E"],
    *,
    recipe: Any = FROM_CONTEXT,
    key: jax.Array | None = None,
) -> Float[Array, "T N"]:
    """Rows sorted by expert times each expert's kernel."""
    del recipe, key
    return jax.lax.ragged_dot(x, kernels.astype(x.dtype), group_sizes)
