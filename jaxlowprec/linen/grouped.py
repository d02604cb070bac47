"""A linear for each expert, over rows sorted by expert."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from jaxtyping import Array, Float, Int32

from jaxlowprec.layers.delayed_scaling import State, used_and_handed_on
from jaxlowprec.layers.layer_call import uses_key
from jaxlowprec.layers.shared_input import Layer
from jaxlowprec.linen.layers import _loaded, _operands, _quantized, _state, base_call, handed_on, make_state
from jaxlowprec.moe.grouped_linear import MODULE_TYPE, check_fsdp_axis, grouped_linear, whole_kernel
from jaxlowprec.ops.checks import layer_inputs, mesh_axes
from jaxlowprec.recipes.autocast import FROM_CONTEXT, resolve
from jaxlowprec.recipes.roles import Recipe

default_kernel_init = nn.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=(0,))
"""Initialises each expert's kernel like the kernel of a linear of its size."""


class HighPrecisionGroupedDense(nn.Module):
    """`GroupedDense` without a recipe; it makes the parameters."""

    num_experts: int
    features: int
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Any = default_kernel_init
    bias_init: Any = nn.initializers.zeros_init()
    promote_dtype: Any = promote_dtype
    fsdp_axis: Any = None

    @nn.compact
    def __call__(self, inputs: Float[Array, "T K"], group_sizes: Int32[Array, "E"]) -> Float[Array, "T N"]:
        """Rows [T, in], sorted by expert, and the number of rows per expert, to [T, features]."""
        inputs = layer_inputs(type(self).__name__, inputs)
        shape = (self.num_experts, _own_features(self, inputs.shape[-1]), self.features)
        self.param("kernel", self.kernel_init, shape, self.param_dtype)
        if self.use_bias:
            self.param("bias", self.bias_init, (self.num_experts, self.features), self.param_dtype)
        inputs, kernel, bias = _operands(self, inputs, shape)
        layer = Layer(kernel, bias, None, None, None, "", None, self.precision)
        if not self.is_initializing():
            layer = whole_kernel(type(self).__name__, layer, self.fsdp_axis)
        return grouped_linear(type(self).__name__, inputs, group_sizes, layer)


def _own_features(layer: Any, size: int) -> int:
    """How many input features the kernel has here: all when it is initialised, then the device's part."""
    is_quantized = _loaded(layer) is not None or layer.has_variable("quantized", "kernel")
    check_fsdp_axis(type(layer).__name__, layer.fsdp_axis, is_quantized)
    if layer.fsdp_axis is None or layer.is_initializing():
        return size
    mesh_axes(type(layer).__name__, layer.fsdp_axis)
    return size // jax.lax.axis_size(layer.fsdp_axis)


class GroupedDense(HighPrecisionGroupedDense):
    """A Dense per expert under a recipe: `jaxlowprec.grouped_matmul` with parameters.

    The kernel is [experts, in, features], the bias [experts, features].

    Attributes:
        num_experts, features: the number of experts, and the width of the result.
        precision: precision of the three GEMMs, see `jaxlowprec.grouped_matmul`.
        fsdp_axis: the mesh axis in shard_map along which the kernel's input features are split: codes are gathered for
            a call, and each device keeps its part of the gradient's sum, see `jaxlowprec.all_gather_kernel`.
        recipe: see `Dense`, which also has the other attributes. The kernel keeps its dtype: `dtype` is the dtype of
            the computation in high precision and of the result. The state of `DelayedScaling` is one of each expert.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> layer, sizes = jlp.linen.GroupedDense(2, 32), jnp.asarray([5, 3], jnp.int32)
    >>> variables = layer.init(jax.random.key(0), jnp.ones((8, 64)), sizes)
    >>> with jlp.autocast(jlp.NVFP4BlockScaling()):
    ...     layer.apply(variables, jnp.ones((8, 64)), sizes).shape
    (8, 32)
    """

    recipe: Any = FROM_CONTEXT

    @nn.compact
    def __call__(self, inputs: Float[Array, "T K"], group_sizes: Int32[Array, "E"]) -> Float[Array, "T N"]:
        """Rows [T, in], sorted by expert, and the number of rows per expert, to [T, features].

        Rows past the sum of the group sizes are zeros.
        """
        name = "/".join(self.path)
        recipe = resolve(type(self).__name__, self.recipe, name)
        if self.is_initializing():
            make_state(self, recipe, self.num_experts)
        if self.is_initializing() or recipe is None and _loaded(self) is None:
            return base_call(GroupedDense, self)(inputs, group_sizes)
        inputs = layer_inputs(type(self).__name__, inputs)
        inputs, layer = grouped_arguments(self, inputs, inputs.shape[-1])
        return grouped_linear(type(self).__name__, inputs, group_sizes, layer)


def grouped_arguments(layer: GroupedDense, inputs: Array, size: int) -> tuple[Array, Layer]:
    """The promoted inputs, and the other arguments of a function that computes for this layer.

    The layer's kernel is [experts, size, features], whatever inputs it is promoted with. Not a method: Flax would see a
    call of it.
    """
    name = "/".join(layer.path)
    recipe = resolve(type(layer).__name__, layer.recipe, name)
    size = _own_features(layer, size)
    inputs, kernel, bias = _operands(layer, inputs, (layer.num_experts, size, layer.features))
    quantized = _quantized(layer, kernel, 1, 1, recipe, MODULE_TYPE)
    wanted = recipe is not None and uses_key(recipe.roles(MODULE_TYPE, name))
    key = layer.make_rng("sr") if wanted and layer.has_rng("sr") and _loaded(layer) is None else None
    arguments = Layer(kernel, bias, quantized, recipe, key, name, _used_state(layer, recipe), layer.precision)
    return inputs, whole_kernel(type(layer).__name__, arguments, layer.fsdp_axis)


def _used_state(layer: GroupedDense, recipe: Recipe | None) -> State | None:
    """The state for a call, which the layer hands on at once: the call may be in a branch."""
    before = (
        None
        if recipe is None or recipe.delayed is None or _loaded(layer) is not None
        else _state(layer, recipe.delayed)
    )
    if before is None:
        return None
    used, after = used_and_handed_on(before)
    handed_on(layer, (used, after), before)
    return used
