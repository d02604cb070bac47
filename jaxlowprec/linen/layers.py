"""Linen layers. Flax makes the parameters and computes without a recipe; under a recipe, `linear` computes.

To quantise a weight once for many calls, make the collection "quantized" mutable once and pass it on:

    _, quantized = model.apply(variables, x, mutable="quantized")
    y = model.apply(variables | quantized, x)      # gradients still reach the kernel in "params"

A kernel in "params" may be a loaded QuantizedArray [batch..., K, N], as `jaxlowprec.quantize_params` puts there. It
needs no recipe, and inputs stay in high precision. It may also be a weight with an adapter, as `jaxlowprec.lora.apply`
puts there.

The state of delayed scaling is in the collection "_overwrite_with_gradient", which `init` makes under the recipe.
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core.tracers import current_trace
from flax.errors import ScopeParamNotFoundError, ScopeParamShapeError
from flax.linen.dtypes import promote_dtype

from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.layers.delayed_scaling import (
    OVERWRITE_WITH_GRADIENT,
    State,
    init_state,
    is_added_up,
    used_in_a_transformation,
)
from jaxlowprec.layers.dot_general import axes_in_order, dot_general, einsum, einsum_of_layer, linear_general
from jaxlowprec.layers.flax_layers import (
    check_own_product,
    computes_own_product,
    keep_kernel_dtype,
    own_product,
    stays_flaxs,
)
from jaxlowprec.layers.layer_call import uses_key
from jaxlowprec.layers.linear import QuantizedKernel, kernel_matrices, linear, quantize_kernel
from jaxlowprec.layers.low_rank import LoRAKernel, is_quantized, without_adapter
from jaxlowprec.layers.shared_input import Layer
from jaxlowprec.layers.subscripts import kernel_axes_in_result
from jaxlowprec.ops.checks import FLOATS, layer_inputs
from jaxlowprec.recipes.autocast import FROM_CONTEXT, resolve
from jaxlowprec.recipes.roles import ModuleType, Recipe
from jaxlowprec.recipes.transformer_engine import DelayedScaling


def _recipe(layer: nn.Module, given: Any, name: str | None = None) -> Recipe | None:
    """The recipe to follow in this call; None while Flax initialises the parameters, and if it computes the product."""
    who = type(layer).__name__
    recipe = resolve(who, given, "/".join(layer.path) if name is None else name)
    if computes_own_product(who, layer, given, recipe):
        return None
    if layer.is_initializing():
        make_state(layer, recipe)
        return None
    return recipe


def make_state(layer: nn.Module, recipe: Recipe | None, experts: int | None = None) -> None:
    """Gives a layer that is initialised the state of delayed scaling, if the recipe needs it and there is none."""
    if recipe is None or recipe.delayed is None:
        return
    for variable, value in init_state(recipe.delayed, num_experts=experts).items():
        if not layer.has_variable(OVERWRITE_WITH_GRADIENT, variable):
            layer.put_variable(OVERWRITE_WITH_GRADIENT, variable, value)


def _loaded(layer: nn.Module) -> QuantizedArray | LoRAKernel | None:
    """The kernel if it was loaded quantised or with an adapter: Flax cannot compute with it. Otherwise None."""
    if not layer.has_variable("params", "kernel"):
        return None
    kernel: Any = layer.get_variable("params", "kernel")
    if not isinstance(kernel, QuantizedArray | LoRAKernel):
        return None
    check_own_product(type(layer).__name__, layer)
    return kernel


def _operands(layer: nn.Module, inputs: jax.Array, kernel_shape: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """Inputs, kernel and bias after the layer's promote_dtype; with Flax's default one, the kernel keeps its dtype.

    The kernel may be missing if one was quantised earlier. A loaded kernel counts with the dtype that it was quantised
    from.
    """
    kernel: Any = parameter_of(layer, "kernel", optional=layer.has_variable("quantized", "kernel"))
    bias = parameter_of(layer, "bias") if layer.use_bias else None
    loaded = isinstance(kernel, QuantizedArray | LoRAKernel)
    sizes_alone = loaded and is_quantized(kernel)  # it stands for matrices
    fits = kernel is None or (kernel.size == math.prod(kernel_shape) if sizes_alone else kernel.shape == kernel_shape)
    if not fits:
        raise ScopeParamShapeError("kernel", "/".join(layer.path), kernel.shape, kernel_shape)
    promote = keep_kernel_dtype if layer.promote_dtype is promote_dtype else layer.promote_dtype
    inputs, promoted, bias = promote(inputs, jnp.zeros((), kernel.dtype) if loaded else kernel, bias, dtype=layer.dtype)
    return inputs, kernel if loaded else promoted, bias


def parameter_of(layer: nn.Module, name: str, optional: bool = False) -> Any:
    """A parameter that the layer has. Raises Flax's error if it has none, unless that is allowed."""
    if layer.has_variable("params", name):
        return nn.meta.unbox(layer.get_variable("params", name))
    if optional:
        return None
    raise ScopeParamNotFoundError(name, "/".join(layer.path))


def _options(layer: nn.Module, given: Any, recipe: Recipe | None) -> dict[str, Any]:
    name, precision = "/".join(layer.path), getattr(layer, "precision", None)  # an Embed has none
    if recipe is None or is_quantized(_loaded(layer)):
        return {"recipe": given, "key": None, "name": name, "state": None, "precision": precision}
    wanted = uses_key(recipe.roles(name=name), recipe.sums) and layer.has_rng("sr")
    state = None if recipe.delayed is None else _state(layer, recipe.delayed)
    key = layer.make_rng("sr") if wanted else None
    return {"recipe": recipe, "key": key, "name": name, "state": state, "precision": precision}


_latest_states: weakref.WeakKeyDictionary[Any, dict[Any, tuple[State, State]]] = weakref.WeakKeyDictionary()
"""The state of each path in each root scope, as it was read, and as the layer's latest call returned it.

Not by the layer's own scope: that is another one after each call."""


def _state(layer: nn.Module, recipe: DelayedScaling) -> State | None:
    """The state of delayed scaling, as the layer's previous call in this scope returned it.

    So its gradient passes through all calls and is combined by max; reading the variable again would add it up.
    """
    if not layer.has_variable(OVERWRITE_WITH_GRADIENT, "input_scale"):
        return None
    read: State = {
        name: nn.meta.unbox(layer.get_variable(OVERWRITE_WITH_GRADIENT, name)) for name in init_state(recipe)
    }
    scope: Any = layer.scope
    states = _latest_states.setdefault(scope.root, {})
    earlier, latest = states.get(scope.path, ({}, {}))
    if any(earlier.get(name) is not value for name, value in read.items()):
        states[scope.path] = earlier, latest = read, read
    return latest


def handed_on(layer: nn.Module, result: Any, state: Any) -> jax.Array:
    """The result of a call with this state; the state that it returns is kept for the next call."""
    if state is None:
        return result
    y, after = result
    if not any(is_added_up(leaf) for leaf in state.values()):
        return y
    scope: Any = layer.scope
    if scope.root.trace_level != current_trace():
        raise used_in_a_transformation(type(layer).__name__, "nn.scan, nn.remat")
    states = _latest_states[scope.root]
    states[scope.path] = states[scope.path][0], after
    return y


def _quantized(
    layer: nn.Module,
    kernel: Any,
    batch_dims: int,
    contracted: int,
    recipe: Recipe | None,
    module_type: ModuleType = "linear",
) -> QuantizedKernel | None:
    """The kernel [batch..., contracted..., features...] quantised earlier, or now if the collection is mutable.

    None if the kernel was loaded, or if the recipe keeps this weight in high precision.
    """
    name = "/".join(layer.path)
    if recipe is None or is_quantized(kernel) or not recipe.roles(module_type, name).quantizes_weight:
        return None
    if layer.is_mutable_collection("quantized") and kernel is not None:
        matrices = kernel_matrices(without_adapter(kernel), batch_dims, contracted)
        state = None if recipe.delayed is None else _state(layer, recipe.delayed)
        quantized = quantize_kernel(matrices, recipe, name=name, state=state, module_type=module_type)
        layer.put_variable("quantized", "kernel", quantized)
    return layer.get_variable("quantized", "kernel")


def promoted_inputs(layer: Dense, inputs: jax.Array) -> jax.Array | None:
    """The inputs in the dtype in which a function takes them that computes for this layer; None if none can."""
    if own_product(layer):
        return None
    kernel: Any = parameter_of(layer, "kernel", optional=layer.has_variable("quantized", "kernel"))
    bias = parameter_of(layer, "bias") if layer.use_bias else None
    promote = keep_kernel_dtype if layer.promote_dtype is promote_dtype else layer.promote_dtype
    as_array = None if kernel is None else jnp.zeros((), kernel.dtype)
    operands = promote(inputs, as_array, bias, dtype=layer.dtype)
    return operands[0] if all(a is None or a.dtype in FLOATS for a in operands) else None


def function_arguments(layer: Dense, inputs: jax.Array, size: int | None = None) -> Layer:
    """The arguments of a function that computes for this layer, beside the promoted inputs of that many features."""
    recipe = _recipe(layer, layer.recipe)
    shape = inputs.shape[-1] if size is None else size, layer.features
    _, kernel, bias = _operands(layer, inputs, shape)
    quantized = _quantized(layer, kernel, 0, 1, recipe)
    return Layer(kernel, bias, quantized, **_options(layer, layer.recipe, recipe))


def dense(layer: Any, given: Any, flaxs: Callable[..., Any], inputs: jax.Array) -> jax.Array:
    """A call of a Dense that is given this recipe; flaxs is Flax's own call."""
    inputs = layer_inputs(type(layer).__name__, inputs)
    recipe = _recipe(layer, given)
    if recipe is None and _loaded(layer) is None:
        return flaxs(inputs)
    operands = _operands(layer, inputs, (inputs.shape[-1], layer.features))
    if stays_flaxs(type(layer).__name__, recipe, *operands):
        return flaxs(inputs)
    inputs, kernel, bias = operands
    quantized, options = _quantized(layer, kernel, 0, 1, recipe), _options(layer, given, recipe)
    y = linear(inputs, kernel, bias, quantized_kernel=quantized, **options)
    return handed_on(layer, y, options["state"])


def dense_general(layer: Any, given: Any, flaxs: Callable[..., Any], inputs: jax.Array) -> jax.Array:
    """A call of a DenseGeneral, see `dense`."""
    who = type(layer).__name__
    inputs = layer_inputs(who, inputs)
    recipe = _recipe(layer, given)
    if recipe is None and _loaded(layer) is None:
        return flaxs(inputs)
    axis, batch, features = (
        (v,) if isinstance(v, int) else tuple(v) for v in (layer.axis, layer.batch_dims, layer.features)
    )
    axis, batch = (axes_in_order(who, inputs.ndim, axes) for axes in (axis, batch))
    operands = _operands(layer, inputs, (*(inputs.shape[a] for a in (*batch, *axis)), *features))
    if stays_flaxs(type(layer).__name__, recipe, *operands):
        return flaxs(inputs)
    inputs, kernel, bias = operands
    quantized = _quantized(layer, kernel, len(batch), len(axis), recipe)
    options = _options(layer, given, recipe)
    y = linear_general(who, inputs, kernel, bias, axis, batch, features, quantized_kernel=quantized, **options)
    return handed_on(layer, y, options["state"])


def layer_einsum(
    layer: Any, given: Any, flaxs: Callable[..., Any], inputs: jax.Array, einsum_str: str | None = None
) -> jax.Array:
    """A call of an Einsum, see `dense`."""
    inputs = layer_inputs(type(layer).__name__, inputs)
    recipe = _recipe(layer, given)
    if recipe is None and _loaded(layer) is None:
        return flaxs(inputs, einsum_str)
    subscripts = nn.merge_param("einsum_str", layer.einsum_str, einsum_str)
    operands = _operands(layer, inputs, tuple(layer.shape))
    if stays_flaxs(type(layer).__name__, recipe, *operands):
        return flaxs(inputs, einsum_str)
    inputs, kernel, bias = operands
    options = _options(layer, given, recipe)
    options["preferred_element_type"] = layer.preferred_element_type
    shape = tuple(layer.shape)
    if is_quantized(kernel):
        y = einsum_of_layer(subscripts, inputs, kernel, shape, **options)
    else:
        y = einsum(subscripts, inputs, kernel, **options)
    y = handed_on(layer, y, options["state"])
    return y if bias is None else y + bias.reshape(kernel_axes_in_result(subscripts, inputs.ndim, shape))


def attend(layer: Any, given: Any, flaxs: Callable[..., Any], query: jax.Array) -> jax.Array:
    """The product of an Embed as a tied head, see `dense`."""
    who = type(layer).__name__
    query = layer_inputs(who, query)
    recipe = _recipe(layer, given)
    if recipe is None:
        return flaxs(query)
    promote = keep_kernel_dtype if layer.promote_dtype is promote_dtype else layer.promote_dtype
    operands = promote(query, parameter_of(layer, "embedding"), dtype=layer.dtype)
    query, table = operands[:2]
    if stays_flaxs(who, recipe, query, table):
        return flaxs(query)
    options = _options(layer, given, recipe)
    y = dot_general(query, table, (((query.ndim - 1,), (1,)), ((), ())), **options)
    return handed_on(layer, y, options["state"])


def base_call(kind: Any, layer: nn.Module) -> Callable[..., Any]:
    """The call of the class that this kind of layer extends, as a part of the layer's own call.

    What Flax does around each method (intermediates, summaries, interceptors) is left out: it is done once.
    """
    return functools.partial(inspect.unwrap(kind.__base__.__call__), layer)


class Dense(nn.Dense):
    """`flax.linen.Dense` under a recipe.

    Attributes:
        recipe: default: the context's (`jaxlowprec.autocast`); None: high precision, with Flax's bits.

    Other attributes, their defaults and the parameter tree are Flax's. Stochastic rounding of gradients uses the RNG
    stream "sr" if `apply` is given one, otherwise bits that are derived from the gradient; evaluation needs none.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> layer = jlp.linen.Dense(32)
    >>> variables = layer.init(jax.random.key(0), jnp.ones((8, 64)))
    >>> with jlp.autocast(jlp.NVFP4BlockScaling()):
    ...     layer.apply(variables, jnp.ones((8, 64))).shape
    (8, 32)
    """

    recipe: Any = FROM_CONTEXT

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """[..., in] -> [..., features]."""
        return dense(self, self.recipe, base_call(Dense, self), inputs)


class DenseGeneral(nn.DenseGeneral):
    """`flax.linen.DenseGeneral` under a recipe. Attributes: Flax's, and `recipe` (see `Dense`)."""

    recipe: Any = FROM_CONTEXT

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Contracts `axis` of the inputs, batched over `batch_dims`."""
        return dense_general(self, self.recipe, base_call(DenseGeneral, self), inputs)


class Einsum(nn.Einsum):
    """`flax.linen.Einsum` under a recipe. Attributes: Flax's, and `recipe` (see `Dense`)."""

    recipe: Any = FROM_CONTEXT

    @nn.compact
    def __call__(self, inputs: jax.Array, einsum_str: str | None = None) -> jax.Array:
        """The einsum of the inputs and the kernel."""
        return layer_einsum(self, self.recipe, base_call(Einsum, self), inputs, einsum_str)
