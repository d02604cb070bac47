"""Conv under a recipe, where the convolution is a matrix product; any other is Flax's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from flax.linen.linear import canonicalize_padding

from jaxlowprec.layers.convolution import Windows, masked
from jaxlowprec.layers.dot_general import linear_general
from jaxlowprec.layers.layer_call import stays_flaxs
from jaxlowprec.layers.subscripts import KernelAxes
from jaxlowprec.linen.layers import _loaded, _operands, _options, _quantized, _recipe, base_call, handed_on
from jaxlowprec.ops.checks import layer_inputs
from jaxlowprec.recipes.autocast import FROM_CONTEXT


def windows_of(layer: Any, inputs: Any = None) -> Windows:
    """How a Conv of Linen or NNX reads its inputs [batch..., spatial..., features].

    Without inputs, padding that depends on their sizes counts as none.
    """
    sizes = (layer.kernel_size,) if isinstance(layer.kernel_size, int) else tuple(layer.kernel_size)

    def of_each_axis(given: Any) -> tuple[int, ...]:
        return (1 if given is None else given,) * len(sizes) if given is None or isinstance(given, int) else (*given,)

    strides, kernel_dilation = of_each_axis(layer.strides), of_each_axis(layer.kernel_dilation)
    fits = getattr(inputs, "ndim", 0) > len(sizes)  # Flax says so if they do not
    extents = tuple(inputs.shape[-len(sizes) - 1 : -1]) if fits else None
    padding: Any = canonicalize_padding(layer.padding, len(sizes))
    if padding == "CAUSAL":
        padding = [(size - 1, 0) for size in sizes]
    elif padding in ("CIRCULAR", "REFLECT"):
        padding = [((size - 1) // 2, size // 2) for size in sizes]
    elif isinstance(padding, str):
        padding = (
            [(0, 0)] * len(sizes) if extents is None else jax.lax.padtype_to_pads(extents, sizes, strides, padding)
        )
    features = inputs.shape[-1] if fits else getattr(layer, "in_features", 0)
    pairs = tuple((low, high) for low, high in padding)
    dilation = of_each_axis(layer.input_dilation), kernel_dilation
    return Windows(sizes, strides, pairs, *dilation, features, layer.feature_group_count, extents=extents)


def conv_axes(layer: Any) -> KernelAxes | str:
    """The axes of a Conv's kernel [spatial..., features in, features out], or why it could not be served."""
    own = (1 if isinstance(layer.kernel_size, int) else len(layer.kernel_size)) + 2
    return KernelAxes.in_front(0, own - 1, own) if layer.mask is None else "its mask= makes another kernel of it"


def not_of_a_loaded_kernel(who: str, reason: str) -> ValueError:
    """The error of a convolution that Flax would compute, but whose kernel was loaded."""
    return ValueError(f"{who}: {reason}, but its kernel is quantised or has an adapter; needs the kernel as an array")


def conv(layer: Any, given: Any, flaxs: Callable[..., Any], inputs: jax.Array) -> jax.Array:
    """A call of a Conv, see `layers.dense`."""
    who = type(layer).__name__
    inputs = layer_inputs(who, inputs)
    windows, loaded = windows_of(layer, inputs), _loaded(layer)
    if windows.reason:
        if loaded is not None:
            raise not_of_a_loaded_kernel(who, windows.reason)
        return flaxs(inputs)
    recipe = _recipe(layer, given)
    if (recipe is None and loaded is None) or windows.extents is None:
        return flaxs(inputs)
    operands = _operands(layer, inputs, (*windows.sizes, windows.features, layer.features))
    if stays_flaxs(who, recipe, *operands):
        return flaxs(inputs)
    inputs, kernel, bias = operands
    contracted = len(windows.sizes) + 1
    quantized = None if layer.mask is not None else _quantized(layer, kernel, 0, contracted, recipe)
    kernel, options = masked(who, kernel, layer.mask), _options(layer, given, recipe)
    axes = range(-contracted, 0)
    patches = windows.patches(inputs)
    y = linear_general(who, patches, kernel, bias, axes, (), (layer.features,), quantized_kernel=quantized, **options)
    return handed_on(layer, y, options["state"])


class Conv(nn.Conv):
    """`flax.linen.Conv` under a recipe, if it is a matrix product. Attributes: Flax's, and `recipe` (see `Dense`).

    It is one if its windows neither overlap nor reach into padding: a kernel of size 1, or strides equal to the
    kernel's sizes. Its patches, [spatial axes..., features] in each row, are multiplied by the kernel. Any other
    convolution is Flax's: with overlapping windows, groups, dilation or padding. `jaxlowprec.explain` says so.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> layer, images = jlp.linen.Conv(64, (4, 4), strides=(4, 4)), jnp.ones((2, 32, 32, 3))
    >>> variables = layer.init(jax.random.key(0), images)
    >>> with jlp.autocast(jlp.NVFP4BlockScaling()):
    ...     layer.apply(variables, images).shape
    (2, 8, 8, 64)
    """

    recipe: Any = FROM_CONTEXT

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """[batch..., spatial..., in] -> [batch..., windows..., features]."""
        return conv(self, self.recipe, base_call(Conv, self), inputs)
