"""NNX layers. Flax makes the parameters and computes without a recipe; under a recipe, `linear` computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import flax.errors
import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from jaxlowprec.arguments import a_text, shown
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.layers.delayed_scaling import (
    OVERWRITE_WITH_GRADIENT,
    State,
    init_state,
    is_added_up,
    used_in_a_transformation,
)
from jaxlowprec.layers.dot_general import dot_general, linear_general
from jaxlowprec.layers.flax_layers import check_own_product, computes_own_product, own_product, stays_flaxs
from jaxlowprec.layers.flax_layers import keep_kernel_dtype as _keep_kernel_dtype
from jaxlowprec.layers.layer_call import uses_key
from jaxlowprec.layers.linear import kernel_matrices, linear, quantize_kernel
from jaxlowprec.layers.shared_input import Layer
from jaxlowprec.layers.watched import see_inputs
from jaxlowprec.ops.checks import FLOATS, layer_inputs
from jaxlowprec.recipes import silence
from jaxlowprec.recipes.autocast import FROM_CONTEXT, current_recipe, resolve
from jaxlowprec.recipes.roles import ModuleType, Recipe
from jaxlowprec.recipes.transformer_engine import DelayedScaling


def keep_kernel_dtype(operands: tuple[Any, Any, Any], /, *, dtype: Any = None) -> tuple[Any, Any, Any]:
    """A `promote_dtype=` for Flax's own layers with `dot_general=jlp.dot_general`: it casts all but the kernel."""
    return _keep_kernel_dtype(*operands, dtype=dtype)


@nnx.register_variable_name("Quantized")
class Quantized(nnx.Variable):
    """A kernel that was quantised for many calls, or loaded quantised.

    It is not a parameter: optimizers and checkpoints of `nnx.Param` do not see it.
    """


@nnx.register_variable_name("KVScale")
class KVScale(nnx.Variable):
    """A static scale of a layer's keys or values in a cache: float32 [1], or [key_heads]. It is not a parameter."""


@nnx.register_variable_name("OverwriteWithGradient")
class OverwriteWithGradient(nnx.Param):
    """A leaf of a layer's delayed-scaling state. Its gradient is its new value, or zeros where there is none: wrap the
    optimizer of a model with such leaves in `jaxlowprec.delayed_scaling.overwrite_with_gradient`."""


class _Quantizing(nnx.Module):
    """The common part of the layers. They add `recipe`, `name` and `sr` (an RNG stream or None) to Flax's ones.

    A Module, so that Python lets a layer of Flax become one of ours (`convert`): their objects have the same layout.
    """

    kernel: Any
    bias: Any
    dtype: Any
    promote_dtype: Any
    precision: Any
    recipe: Any
    name: str
    sr: nnx.RngStream | None
    quantized: Quantized | None
    converted: bool = False  # whether `convert` gave the recipe, so that it may give another one
    _module_type: ModuleType = "linear"

    def _set_up(self, recipe: Any, name: str, rngs: nnx.Rngs | None) -> None:
        a_text(type(self).__name__, name=name)
        resolve(type(self).__name__, recipe, name)  # raises for a wrong recipe now; a scope has reached this layer
        self.recipe, self.name = recipe, name
        self.sr = nnx.data(rngs["sr"].fork() if rngs is not None and "sr" in rngs else None)
        self.quantized = nnx.data(None)
        self._set_state()

    def _set_state(self) -> None:
        """Adds the state that the layer's recipe, or now the context's, needs; removes one that it does not."""
        own = current_recipe() if self.recipe is FROM_CONTEXT else self.recipe
        own = own.at(self.name) if own is not None and self.name else own
        self._add_state(None if own is None else own.delayed)

    def _add_state(self, recipe: DelayedScaling | None) -> None:
        state = {} if recipe is None or own_product(self) else init_state(recipe, num_experts=self._experts())
        kernel = self.kernel.get_value()
        stacked = kernel.shape[: max(0, kernel.ndim - self._own_axes())]  # by nnx.vmap: each layer has its own state
        variables = {
            name: OverwriteWithGradient(jnp.broadcast_to(value, (*stacked, *value.shape)))
            for name, value in state.items()
        }
        setattr(self, OVERWRITE_WITH_GRADIENT, nnx.data(nnx.Dict(variables) if variables else None))

    def _own_axes(self) -> int:
        """The number of axes of the kernel of one layer."""
        return 2

    def _experts(self) -> int | None:
        """The number of experts of one layer, each with its part of the state; None: it has none."""
        return None

    def _recipe(self) -> Recipe | None:
        """The recipe to follow in this call; None if Flax computes the product."""
        who = type(self).__name__
        if self._loaded() is not None:
            check_own_product(who, self)
        recipe = resolve(who, self.recipe, self.name)
        return None if computes_own_product(who, self, self.recipe, recipe) else recipe

    def _loaded(self) -> QuantizedArray | None:
        """The kernel if it was loaded quantised, otherwise None."""
        kernel = self.kernel.get_value()
        return kernel if isinstance(kernel, QuantizedArray) else None

    def _operands(self, inputs: jax.Array) -> tuple[Any, Any, Any]:
        """The operands after promote_dtype; a loaded kernel counts with the dtype that it was quantised from."""
        promote = keep_kernel_dtype if self.promote_dtype is promote_dtype else self.promote_dtype
        loaded, bias = self._loaded(), None if self.bias is None else self.bias[...]
        kernel = self.kernel[...] if loaded is None else jnp.zeros((), loaded.dtype)
        inputs, kernel, bias = promote((inputs, kernel, bias), dtype=self.dtype)
        return inputs, kernel if loaded is None else loaded, bias

    def _options(self, recipe: Recipe | None) -> dict[str, Any]:
        if recipe is None or self._loaded() is not None:
            return {"recipe": self.recipe, "key": None, "name": self.name, "state": None, "precision": self.precision}
        key = self.sr() if uses_key(recipe.roles(name=self.name), recipe.sums) and self.sr is not None else None
        state = self._read_state(recipe)
        return {"recipe": recipe, "key": key, "name": self.name, "state": state, "precision": self.precision}

    def _read_state(self, recipe: Recipe | None) -> State | None:
        """The state for a call; what `nnx.eval_shape` left abstract and no checkpoint filled counts as new."""
        variables = getattr(self, OVERWRITE_WITH_GRADIENT)
        if recipe is None or recipe.delayed is None or variables is None:
            return None
        # nnx.capture puts a tuple of its own beside them, and nnx.tabulate would see a call of items()
        state = {name: v.get_value() for name, v in vars(variables).items() if isinstance(v, nnx.Variable)}
        abstract = [name for name, value in state.items() if isinstance(value, jax.ShapeDtypeStruct)]
        if abstract:
            remedy = "restore it with the parameters, or call jaxlowprec.nnx.add_delayed_scaling"
            message = f"its delayed-scaling state is abstract, as nnx.eval_shape leaves it, and counts as new; {remedy}"
            silence.warn_once(type(self).__name__, recipe, [message], depth=2)
            new = init_state(recipe.delayed, num_experts=self._experts())
            state |= {name: value for name, value in new.items() if name in abstract}
        return state

    def _handed_on(self, result: Any, before: Any) -> jax.Array:
        """The result of a call with this state.

        The state that the call returns becomes the layer's, with the same value. So the gradient passes through every
        call and is combined by max; reading a variable twice would add it up.
        """
        if before is None:
            return result
        y, after = result
        variables = getattr(self, OVERWRITE_WITH_GRADIENT)
        for name, value in before.items():
            if not is_added_up(value):
                continue
            try:
                variables[name].set_value(after[name])
            except flax.errors.TraceContextError as error:
                raise used_in_a_transformation(type(self).__name__, "nnx.scan, nnx.remat") from error
        return y

    def _kernel_axes(self) -> tuple[int, int] | None:
        """The numbers of batch axes and of contracted axes of a kernel that `quantized_kernels` quantises."""
        return None

    def _quantized_kernel(self):
        return None if self.quantized is None else self.quantized.get_value()


class Linear(_Quantizing, nnx.Linear):
    """`flax.nnx.Linear` under a recipe.

    Arguments:
        recipe: default: the context's (`jaxlowprec.autocast`); None: high precision, with Flax's bits.
        name: for recipes that treat layers differently (`Int4QAT`, `Custom`), because an NNX module does not know its
            path; `name_layers` names all layers of a model.

    Other arguments, their defaults and the parameters are Flax's. Stochastic rounding of gradients uses the RNG stream
    "sr" if `rngs` has one, otherwise bits that are derived from the gradient; evaluation needs none. The kernel may be
    a loaded QuantizedArray, as `jaxlowprec.quantize_params` puts there: it needs no recipe, and inputs stay in high
    precision.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> from flax import nnx
    >>> layer = jlp.nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    >>> with jlp.autocast(jlp.NVFP4BlockScaling()):
    ...     layer(jnp.ones((8, 64))).shape
    (8, 32)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        recipe: Any = FROM_CONTEXT,
        name: str = "",
        rngs: nnx.Rngs,
        **kwargs: Any,
    ):
        super().__init__(in_features, out_features, rngs=rngs, **kwargs)
        self._set_up(recipe, name, rngs)

    def _kernel_axes(self) -> tuple[int, int]:
        return 0, 1

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """[..., in_features] -> [..., out_features]."""
        inputs = layer_inputs(type(self).__name__, inputs)
        recipe = self._recipe()
        if recipe is None and self._loaded() is None:
            see_inputs(self.name, inputs)
            return self._flaxs(inputs, out_sharding)
        operands = self._operands(inputs)
        if stays_flaxs(type(self).__name__, recipe, *operands):
            return self._flaxs(inputs, out_sharding)
        inputs, kernel, bias = operands
        options = self._options(recipe)
        if self.preferred_element_type is None and out_sharding is None:
            y = linear(inputs, kernel, bias, quantized_kernel=self._quantized_kernel(), **options)
            return self._handed_on(y, options["state"])
        y = dot_general(
            inputs,
            kernel,
            (((inputs.ndim - 1,), (0,)), ((), ())),
            preferred_element_type=self.preferred_element_type,
            out_sharding=out_sharding,
            quantized_kernel=self._quantized_kernel(),
            **options,
        )
        y = self._handed_on(y, options["state"])
        return y if bias is None else y + bias

    def promoted(self, inputs: jax.Array) -> jax.Array | None:
        """The inputs in the dtype in which a function takes them that computes for this layer; None if none can."""
        if own_product(self) or self.preferred_element_type is not None:
            return None
        inputs, kernel, bias = self._operands(inputs)
        return inputs if all(a is None or a.dtype in FLOATS for a in (inputs, kernel, bias)) else None

    def arguments(self, inputs: jax.Array) -> Layer:
        """The arguments of a function that computes for this layer, beside the promoted inputs."""
        _, kernel, bias = self._operands(inputs)
        return Layer(kernel, bias, self._quantized_kernel(), **self._options(self._recipe()))

    def _flaxs(self, inputs: jax.Array, out_sharding: Any) -> jax.Array:
        """The result of Flax's layer."""
        return nnx.Linear.__call__(self, inputs, out_sharding)


class LinearGeneral(_Quantizing, nnx.LinearGeneral):
    """`flax.nnx.LinearGeneral` under a recipe. Arguments: Flax's, `recipe` and `name` (see `Linear`)."""

    def __init__(
        self,
        in_features: Any,
        out_features: Any,
        *,
        recipe: Any = FROM_CONTEXT,
        name: str = "",
        rngs: nnx.Rngs,
        **kwargs: Any,
    ):
        super().__init__(in_features, out_features, rngs=rngs, **kwargs)
        self._set_up(recipe, name, rngs)

    def _own_axes(self) -> int:
        return len(self.batch_axis) + len(self.axis) + len(self.out_features)

    def _kernel_axes(self) -> tuple[int, int]:
        return len(self.batch_axis), len(self.axis)

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Contracts `axis` of the inputs, batched over `batch_axis`."""
        inputs = layer_inputs(type(self).__name__, inputs)
        recipe = self._recipe()
        if recipe is None and self._loaded() is None:
            return self._flaxs(inputs, out_sharding)
        operands = self._operands(inputs)
        if stays_flaxs(type(self).__name__, recipe, *operands):
            return self._flaxs(inputs, out_sharding)
        inputs, kernel, bias = operands
        options = self._options(recipe)
        y = linear_general(
            type(self).__name__,
            inputs,
            kernel,
            bias,
            self.axis,
            self.batch_axis,
            self.out_features,
            preferred_element_type=self.preferred_element_type,
            out_sharding=out_sharding,
            quantized_kernel=self._quantized_kernel(),
            **options,
        )
        return self._handed_on(y, options["state"])

    def _flaxs(self, inputs: jax.Array, out_sharding: Any) -> jax.Array:
        """The result of Flax's layer."""
        return nnx.LinearGeneral.__call__(self, inputs, out_sharding)


def add_delayed_scaling(model: nnx.Module, recipe: DelayedScaling) -> None:
    """Gives the layers of a model the state of delayed scaling, or replaces it by a new one.

    Layers made within `autocast(recipe)` have it already. A layer with a recipe of its own follows that one.

    Arguments:
        model: any NNX module.
        recipe: the recipe whose `amax_history_len` is used.

    >>> import jaxlowprec as jlp
    >>> from flax import nnx
    >>> layer, recipe = jlp.nnx.Linear(64, 32, rngs=nnx.Rngs(0)), jlp.DelayedScaling(amax_history_len=16)
    >>> jlp.nnx.add_delayed_scaling(layer, recipe)
    >>> sorted(path[-1] for path, _ in nnx.to_flat_state(nnx.state(layer, jlp.nnx.OverwriteWithGradient)))[0]
    'input_amax_history'
    """
    _check_model("add_delayed_scaling", model)
    if not isinstance(recipe, DelayedScaling):
        raise TypeError(f"add_delayed_scaling: recipe={shown(recipe)}; needs a DelayedScaling")
    for _, module in nnx.iter_modules(model):
        if isinstance(module, _Quantizing) and module.recipe is FROM_CONTEXT:
            module._add_state(recipe)


def _check_model(who: str, model: Any, other: str = "") -> None:
    if not isinstance(model, nnx.Module):
        raise TypeError(f"{who}: model is a {type(model).__name__}; needs an NNX module{other}")


def name_layers(model: nnx.Module) -> None:
    """Names every unnamed layer of a model by its path, such as "blocks/0/up", for recipes that choose layers by name.

    Arguments:
        model: any NNX module.

    >>> import jaxlowprec as jlp
    >>> from flax import nnx
    >>> model = nnx.Sequential(jlp.nnx.Linear(64, 32, rngs=nnx.Rngs(0)))
    >>> jlp.nnx.name_layers(model)
    >>> model.layers[0].name
    'layers/0'
    """
    _check_model("name_layers", model)
    for path, module in nnx.iter_modules(model):
        if isinstance(module, _Quantizing) and not module.name:
            module.name = "/".join(map(str, path))


@contextlib.contextmanager
def quantized_kernels(model: nnx.Module, recipe: Recipe | None = FROM_CONTEXT) -> Iterator[None]:
    """Within the context, the Linear, LinearGeneral and GroupedLinear layers of a model use weights that are quantised
    once, on entry.

    Use it for microbatches of one optimizer step and for inference. Gradients still reach the kernels, but a kernel
    that changes within the context is not quantised again.

    Arguments:
        model: any NNX module.
        recipe: the recipe whose weight role is used; default: the context's. A layer's own recipe comes first.

    Raises:
        ValueError: a layer has no recipe.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> from flax import nnx
    >>> layer, recipe = jlp.nnx.Linear(64, 32, rngs=nnx.Rngs(0)), jlp.NVFP4BlockScaling()
    >>> with jlp.autocast(recipe), jlp.nnx.quantized_kernels(layer):
    ...     y = layer(jnp.ones((8, 64)))
    """
    who = "quantized_kernels"
    _check_model(who, model)
    resolve(who, recipe)
    found = [(m, m._kernel_axes()) for _, m in nnx.iter_modules(model) if isinstance(m, _Quantizing)]
    layers = [(layer, axes) for layer, axes in found if axes is not None]
    try:
        for layer, axes in layers:
            own = recipe if layer.recipe is FROM_CONTEXT else layer.recipe
            if own is None:
                continue
            own = resolve(who, own)
            kind = layer._module_type
            if layer._loaded() is not None or (own is not None and not own.roles(kind, layer.name).quantizes_weight):
                continue
            matrices, state = kernel_matrices(layer.kernel[...], *axes), layer._read_state(own)
            quantized = quantize_kernel(matrices, own, name=layer.name, state=state, module_type=kind)
            layer.quantized = nnx.data(Quantized(quantized))
        yield
    finally:
        for layer, _ in layers:
            layer.quantized = nnx.data(None)
