"""What the grouped layers of Linen and NNX compute."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxlowprec import wiring
from jaxlowprec.grouped import grouped_matmul
from jaxlowprec.recipes import Recipe


def grouped_linear(
    who: str,
    x: Float[Array, "T K"],
    kernel: Any,
    bias: Float[Array, "E N"] | None,
    group_sizes: Int32[Array, "E"],
    recipe: Recipe | None,
    key: jax.Array | None,
    precision: Any,
) -> Float[Array, "T N"]:
    """Rows sorted by expert times each expert's kernel [E, K, N], and its bias; rows past the groups' sum are zeros.

    `precision` is that of the product in high precision, as for `jax.lax.ragged_dot`.
    """
    if x.ndim != 2 or group_sizes.shape != kernel.shape[:1] or x.shape[1] != kernel.shape[1]:
        raise ValueError(
            f"{who}: x {x.shape}, kernel {kernel.shape} and group_sizes {group_sizes.shape}: needs x [T, K] sorted by "
            "expert, a kernel [E, K, N] and group_sizes [E]"
        )
    x, kernel, bias, group_sizes = wiring.align_varying(x, kernel, bias, group_sizes)
    if recipe is None and precision is not None and hasattr(kernel, "astype"):
        y = jax.lax.ragged_dot(x, kernel.astype(x.dtype), group_sizes, precision=precision)
    else:
        y = grouped_matmul(x, kernel, group_sizes, recipe=recipe, key=key)
    return y if bias is None else _with_bias(y, bias, group_sizes)


def _with_bias(y: Float[Array, "T N"], bias: Float[Array, "E N"], group_sizes: Int32[Array, "E"]) -> Array:
    """Added in float32, in which its gradient is added up too."""
    ends = jnp.cumsum(group_sizes)
    expert = jnp.searchsorted(ends, jnp.arange(y.shape[0]), side="right")
    of_rows = bias.astype(jnp.float32).at[expert].get(mode="fill", fill_value=0)
    return (y.astype(jnp.float32) + of_rows).astype(y.dtype)
