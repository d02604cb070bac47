"""The computation of the grouped layers of Linen and NNX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import jax
from jaxtyping import Array, Float, Int32

from jaxlowprec.arguments import shown
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.layers.blocks import common_of_all
from jaxlowprec.layers.fused_mlp_product import Saved
from jaxlowprec.layers.gathered_kernel import all_gather_kernel
from jaxlowprec.layers.grouped_matmul import grouped_matmul, integer_sizes
from jaxlowprec.layers.grouped_mlp import grouped_mlp_of
from jaxlowprec.layers.shared_input import Layer
from jaxlowprec.recipes.roles import ModuleType

MODULE_TYPE: ModuleType = "grouped_linear"
"""The kind of these layers for recipes, see `QuantizerRole`."""


def grouped_linear(
    who: str, x: Float[Array, "T K"], group_sizes: Int32[Array, "E"], layer: Layer
) -> Float[Array, "T N"]:
    """Rows sorted by expert times each expert's kernel [E, K, N], plus its bias; rows past the groups' sum are zero."""
    kernel, bias, quantized = layer.kernel, layer.bias, layer.quantized_kernel
    group_sizes = integer_sizes(who, group_sizes)
    shape = (kernel if kernel is not None or quantized is None else quantized).shape
    if x.ndim != 2 or group_sizes.shape != shape[:1] or x.shape[1] != shape[1]:
        raise ValueError(
            f"{who}: x {x.shape}, kernel {shape} and group_sizes {group_sizes.shape}: needs x [T, K] sorted by "
            "expert, a kernel [E, K, N] and group_sizes [E]"
        )
    options: Any = {
        "quantized_kernel": quantized,
        "name": layer.name,
        "state": layer.state,
        "precision": layer.precision,
    }
    y = grouped_matmul(x, kernel, group_sizes, bias, layer.recipe, key=layer.key, **options)
    return y if layer.state is None else y[0]


def whole_kernel(who: str, layer: Layer, fsdp_axis: Hashable | None) -> Layer:
    """The layer with its whole kernel, of which it has a shard along K if there is an `fsdp_axis`."""
    if fsdp_axis is None:
        return layer
    check_fsdp_axis(who, fsdp_axis, layer.quantized_kernel is not None or isinstance(layer.kernel, QuantizedArray))
    options: Any = {"name": layer.name, "key": layer.key, "module_type": MODULE_TYPE}
    kernel, quantized = all_gather_kernel(layer.kernel, fsdp_axis, layer.recipe, **options)
    return layer._replace(kernel=kernel, quantized_kernel=quantized)


def check_fsdp_axis(who: str, fsdp_axis: Any, is_quantized: bool = False) -> None:
    """Raises TypeError unless it may be a mesh axis, a tuple of them, or None.

    Raises ValueError if there is one and the kernel is quantised already: a shard of it cannot be told from the whole.
    """
    if not isinstance(fsdp_axis, Hashable):
        raise TypeError(f"{who}: fsdp_axis={shown(fsdp_axis)}; needs an axis of the mesh, a tuple of them, or None")
    if fsdp_axis is not None and is_quantized:
        raise ValueError(
            f"{who}: fsdp_axis={fsdp_axis!r} and a kernel that is quantised already; needs the master kernel's shard: "
            "leave the axis out to serve, and call it outside of quantized_kernels"
        )


def hidden_activation(activation: Callable[..., jax.Array], gated: bool | Literal["joint"]) -> Callable[..., jax.Array]:
    """The activation as a function of the results of gate and up, or of up; see `jaxlowprec.nnx.MoE`."""
    return GatedActivation(activation) if gated is True else activation


@dataclasses.dataclass(frozen=True)
class GatedActivation:
    """activation(gate) * up as one function, equal to others of the same activation: equal blocks are traced once."""

    activation: Callable[..., jax.Array]

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """The hidden layer of a gated expert."""
        return self.activation(gate) * up


def fused_experts(
    who: str, x: Float[Array, "T K"], group_sizes: Any, layers: Sequence[Layer], activation: Any, saved: Saved
) -> Float[Array, "T N"]:
    """The layers of an expert, down's last, as one function; see `grouped_mlp`. x: rows as all of the layers take them.

    `activation`: of the results of the layers before down.
    """
    options: Any = {"activation": activation, "saved": saved, "out_dtype": x.dtype}
    return grouped_mlp_of(who, x, group_sizes, layers, **options)[0]


def is_plain(activation: Any, operands: int, features: int, dtype: Any) -> bool:
    """Whether an activation of so many operands of these features can be computed again in the backward pass.

    It cannot if it has arrays of its own, which would get no gradient, or gives another shape or dtype.
    """
    try:
        hash(activation)
    except TypeError:
        return False
    like = jax.ShapeDtypeStruct((8, features), dtype)
    traced = jax.make_jaxpr(activation)(*[like] * operands)
    results = [(result.shape, result.dtype) for result in traced.out_avals]
    return not traced.consts and results == [(like.shape, like.dtype)]


def common_inputs(
    inputs: Array, promoted: Sequence[Callable[[Array], Array | None]], activation: Any, hidden: int
) -> Array | None:
    """The inputs as all layers of an expert take them, if one function can compute for them; else None.

    Arguments:
        promoted: of each layer, down's last, gives inputs in the dtype in which it takes them, or None.
        hidden: the features of the activation.
    """
    x = common_of_all(inputs, promoted)
    return x if x is not None and is_plain(activation, len(promoted) - 1, hidden, x.dtype) else None
