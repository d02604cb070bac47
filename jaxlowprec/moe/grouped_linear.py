"""The computation of the grouped layers of Linen and NNX."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Float, Int32

from jaxlowprec.layers.grouped.matmul import grouped_matmul, integer_sizes
from jaxlowprec.recipes.roles import Recipe

MODULE_TYPE = "grouped_linear"
"""The kind of these layers for recipes, see `QuantizerRole`."""


def grouped_linear(
    who: str,
    x: Float[Array, "T K"],
    kernel: Any,
    bias: Float[Array, "E N"] | None,
    group_sizes: Int32[Array, "E"],
    *,
    recipe: Recipe | None = None,
    key: jax.Array | None = None,
    name: str = "",
    precision: Any,
) -> Float[Array, "T N"]:
    """Rows sorted by expert times each expert's kernel [E, K, N], plus its bias; rows past the groups' sum are zero."""
    group_sizes = integer_sizes(who, group_sizes)
    if x.ndim != 2 or group_sizes.shape != kernel.shape[:1] or x.shape[1] != kernel.shape[1]:
        raise ValueError(
            f"{who}: x {x.shape}, kernel {kernel.shape} and group_sizes {group_sizes.shape}: needs x [T, K] sorted by "
            "expert, a kernel [E, K, N] and group_sizes [E]"
        )
    return grouped_matmul(x, kernel, group_sizes, bias, recipe, key, name=name, precision=precision)
