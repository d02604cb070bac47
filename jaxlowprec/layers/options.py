"""Options of the products under a recipe, as types: overloads of a function differ only in `state=` or `states=`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

import jax

if TYPE_CHECKING:
    from jaxlowprec.layers.delayed_scaling import State
    from jaxlowprec.layers.fused_mlp_product import Activation, Saved
    from jaxlowprec.layers.product import QuantizedKernel
    from jaxlowprec.recipes.roles import Recipe
    from jaxlowprec.wiring.sharding_rule import ShardingLike


class _Options(TypedDict, total=False):
    key: jax.Array | None
    precision: jax.lax.PrecisionLike


class LayerSettings(TypedDict):
    """The arguments that every product under a recipe has; those of `layer_call`."""

    recipe: Recipe | None
    key: jax.Array | None
    name: str
    state: State | None
    precision: jax.lax.PrecisionLike


class DotOptions(TypedDict):
    """The options of `jax.lax.dot_general` and `jax.numpy.einsum`."""

    precision: jax.lax.PrecisionLike
    preferred_element_type: jax.typing.DTypeLike | None
    out_sharding: ShardingLike


class LinearOptions(_Options, total=False):
    """Options of `linear`."""

    quantized_kernel: QuantizedKernel | None
    name: str
    out_sharding: ShardingLike


class GroupedMatmulOptions(_Options, total=False):
    """Options of `grouped_matmul`."""

    quantized_kernel: QuantizedKernel | None
    name: str
    preferred_element_type: jax.typing.DTypeLike | None


class DotGeneralOptions(TypedDict, total=False):
    """Options of `dot_general` that are given by name only."""

    out_sharding: ShardingLike
    recipe: Recipe | None
    key: jax.Array | None
    quantized_kernel: QuantizedKernel | None
    name: str


class EinsumOptions(_Options, total=False):
    """Options of `einsum`."""

    preferred_element_type: jax.typing.DTypeLike | None
    out_sharding: ShardingLike
    recipe: Recipe | None
    name: str


class LinearsOptions(_Options, total=False):
    """Options of `linears`."""

    quantized_kernels: Sequence[QuantizedKernel | None] | None
    names: Sequence[str] | None
    out_sharding: ShardingLike


class MlpOptions(LinearsOptions, total=False):
    """Options of `mlp`."""

    activation: Activation
    saved: Saved


class GroupedMlpOptions(_Options, total=False):
    """Options of `grouped_mlp`."""

    activation: Activation
    saved: Saved
    quantized_kernels: Sequence[QuantizedKernel | None] | None
    names: Sequence[str] | None
    preferred_element_type: jax.typing.DTypeLike | None
