"""Conv under a recipe, where the convolution is a matrix product; any other is Flax's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn

from jaxlowprec.layers.convolution import masked
from jaxlowprec.layers.dot_general import linear_general
from jaxlowprec.layers.flax_layers import not_of_a_loaded_kernel, stays_flaxs, windows_of
from jaxlowprec.linen.layers import _loaded, _operands, _options, _quantized, _recipe, base_call, handed_on
from jaxlowprec.ops.checks import layer_inputs
from jaxlowprec.recipes.autocast import FROM_CONTEXT


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
