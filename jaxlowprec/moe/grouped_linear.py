"""What the grouped layers of Linen and NNX compute."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxlowprec import wiring
from jaxlowprec.grouped import grouped_matmul
from jaxlowprec.grouped_products import biased
from jaxlowprec.quantized_array import QuantizedArray
from jaxlowprec.recipes import Recipe

MODULE_TYPE = "grouped_linear"
"""What recipes call these layers, see `QuantizerRole`."""


def grouped_linear(
    who: str,
    x: Float[Array, "T K"],
    kernel: Any,
    bias: Float[Array, "E N"] | None,
    group_sizes: Int32[Array, "E"],
    recipe: Recipe | None,
    key: jax.Array | None,
    name: str,
    precision: Any,
) -> Float[Array, "T N"]:
    """Rows sorted by expert times each expert's kernel [E, K, N], and its bias; rows past the groups' sum are zeros.

    `precision` is that of the products in high precision, forward and backward, as for `jax.lax.ragged_dot`, which
    then computes them.
    """
    if x.ndim != 2 or group_sizes.shape != kernel.shape[:1] or x.shape[1] != kernel.shape[1]:
        raise ValueError(
            f"{who}: x {x.shape}, kernel {kernel.shape} and group_sizes {group_sizes.shape}: needs x [T, K] sorted by "
            "expert, a kernel [E, K, N] and group_sizes [E]"
        )
    if recipe is None and precision is not None and not isinstance(kernel, QuantizedArray):
        x, kernel, bias, group_sizes = wiring.align_varying(x, kernel, bias, group_sizes)
        return _precise(x, kernel.astype(x.dtype), bias, group_sizes, precision)
    return grouped_matmul(x, kernel, group_sizes, bias, recipe, key, name=name)


def _precise(x: Array, kernel: Array, bias: Array | None, group_sizes: Array, precision: Any) -> Array:
    """XLA's own grouped product, which takes a precision."""
    y = jax.lax.ragged_dot(x, kernel, group_sizes, precision=precision, preferred_element_type=jnp.float32)
    some_groups = (jnp.arange(x.shape[0]) < jnp.sum(group_sizes))[:, None]
    return jnp.where(some_groups, biased(y, bias, group_sizes), 0).astype(x.dtype)
