"""A stand-in of the grouped product, in high precision."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxlowprec import wiring
from jaxlowprec.autocast import FROM_CONTEXT


def grouped_matmul(
    x: Float[Array, "T K"],
    kernels: Float[Array, "E K N"],
    group_sizes: Int32[Array, "E"],
    bias: Float[Array, "E N"] | None = None,
    recipe: Any = FROM_CONTEXT,
    key: jax.Array | None = None,
    *,
    name: str = "",
) -> Float[Array, "T N"]:
    """Rows sorted by expert times each expert's kernel."""
    del recipe, key, name
    x, kernels, group_sizes, bias = wiring.align_varying(x, kernels, group_sizes, bias)
    y = jax.lax.ragged_dot(x, kernels.astype(x.dtype), group_sizes, preferred_element_type=jnp.float32)
    if bias is not None:
        expert = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(y.shape[0]), side="right")
        y = y + bias.astype(jnp.float32).at[expert].get(mode="fill", fill_value=0)
    return y.astype(x.dtype)
