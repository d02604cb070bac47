"""A linear for each expert, over rows sorted by expert."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype
from jaxtyping import Array, Float, Int32

from jaxlowprec.layers.delayed_scaling import State, used_and_handed_on
from jaxlowprec.layers.layer_call import uses_key
from jaxlowprec.layers.shared_input import Layer
from jaxlowprec.moe.grouped_linear import MODULE_TYPE, check_fsdp_axis, grouped_linear, whole_kernel
from jaxlowprec.nnx.layers import _Quantizing
from jaxlowprec.ops.checks import FLOATS, layer_inputs
from jaxlowprec.recipes.autocast import FROM_CONTEXT
from jaxlowprec.recipes.roles import Recipe

default_kernel_init = nnx.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=(0,))
"""Initialises each expert's kernel like the kernel of a linear of its size."""


class GroupedLinear(_Quantizing, nnx.Module):
    """A linear per expert under a recipe: `jaxlowprec.grouped_matmul` with parameters.

    The kernel is [experts, in_features, out_features], the bias [experts, out_features].

    Arguments:
        num_experts, in_features, out_features: the number of experts, and the widths of rows and results.
        precision: precision of the three GEMMs, see `jaxlowprec.grouped_matmul`.
        fsdp_axis: the mesh axis in shard_map along which the kernel's in_features are split: codes are gathered for a
            call, and each device keeps its part of the gradient's sum, see `jaxlowprec.all_gather_kernel`.
        recipe, name: see `Linear`, which also has the other arguments. The kernel keeps its dtype: `dtype` is the dtype
            of the computation in high precision and of the result. The state of `DelayedScaling` is one of each expert.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> from flax import nnx
    >>> layer = jlp.nnx.GroupedLinear(2, 64, 32, rngs=nnx.Rngs(0))
    >>> with jlp.autocast(jlp.NVFP4BlockScaling()):
    ...     layer(jnp.ones((8, 64)), jnp.asarray([5, 3], jnp.int32)).shape
    (8, 32)
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Any = default_kernel_init,
        bias_init: Any = nnx.initializers.zeros,
        promote_dtype: Any = flax_promote_dtype,
        recipe: Any = FROM_CONTEXT,
        name: str = "",
        fsdp_axis: Any = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
    ):
        kernel = kernel_init(rngs.params(), (num_experts, in_features, out_features), param_dtype)
        self.kernel = nnx.Param(kernel, **kernel_metadata)
        self.bias = nnx.data(None)
        if use_bias:
            self.bias = nnx.Param(bias_init(rngs.params(), (num_experts, out_features), param_dtype), **bias_metadata)
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features
        self.use_bias, self.dtype, self.param_dtype, self.precision = use_bias, dtype, param_dtype, precision
        check_fsdp_axis(type(self).__name__, fsdp_axis)
        self.promote_dtype, self.fsdp_axis = promote_dtype, fsdp_axis
        self._set_up(recipe, name, rngs)

    _module_type = MODULE_TYPE

    def _kernel_axes(self) -> tuple[int, int]:
        return 1, 1

    def __call__(self, inputs: Float[Array, "T K"], group_sizes: Int32[Array, "E"]) -> Float[Array, "T N"]:
        """Rows [T, in_features], sorted by expert, and the number of rows per expert, to [T, out_features].

        Rows past the sum of the group sizes are zeros.
        """
        inputs = layer_inputs(type(self).__name__, inputs)
        inputs, *_ = self._operands(inputs)
        return grouped_linear(type(self).__name__, inputs, group_sizes, self.arguments(inputs))

    def promoted(self, inputs: Array) -> Array | None:
        """The inputs in the dtype in which a function takes them that computes for this layer; None if none can."""
        operands = self._operands(inputs)
        return operands[0] if all(a is None or a.dtype in FLOATS for a in operands) else None

    def arguments(self, inputs: Array) -> Layer:
        """The arguments of a function that computes for this layer, beside the promoted inputs and the group sizes."""
        recipe = self._recipe()
        _, kernel, bias = self._operands(inputs)
        wanted = recipe is not None and uses_key(recipe.roles(MODULE_TYPE, self.name))
        key = self.sr() if wanted and self.sr is not None and self._loaded() is None else None
        state = self._used_state(recipe)
        layer = Layer(kernel, bias, self._quantized_kernel(), recipe, key, self.name, state, self.precision)
        return whole_kernel(type(self).__name__, layer, self.fsdp_axis)

    def _used_state(self, recipe: Recipe | None) -> State | None:
        """The state for a call, which the layer hands on at once: the call may be in a branch."""
        before = None if self._loaded() is not None else self._read_state(recipe)
        if before is None:
            return None
        used, after = used_and_handed_on(before)
        self._handed_on((used, after), before)
        return used

    def _own_axes(self) -> int:
        return 3

    def _experts(self) -> int:
        return self.kernel.get_value().shape[-3]
