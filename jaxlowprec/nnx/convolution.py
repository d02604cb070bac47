"""Conv under a recipe, where the convolution is a matrix product; any other is Flax's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from jaxlowprec.layers.convolution import masked
from jaxlowprec.layers.dot_general import linear_general
from jaxlowprec.layers.flax_layers import not_of_a_loaded_kernel, stays_flaxs, windows_of
from jaxlowprec.nnx.layers import _Quantizing
from jaxlowprec.ops.checks import layer_inputs
from jaxlowprec.recipes.autocast import FROM_CONTEXT
from jaxlowprec.recipes.transformer_engine import DelayedScaling


class Conv(_Quantizing, nnx.Conv):
    """`flax.nnx.Conv` under a recipe, if it is a matrix product. Arguments: Flax's, `recipe` and `name` (see `Linear`).

    It is one if its windows neither overlap nor reach into padding: a kernel of size 1, or strides equal to the
    kernel's sizes. Its patches, [spatial axes..., features] in each row, are multiplied by the kernel. Any other
    convolution is Flax's: with overlapping windows, groups, dilation or padding. `jaxlowprec.explain` says so.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> from flax import nnx
    >>> layer = jlp.nnx.Conv(3, 64, (4, 4), strides=(4, 4), rngs=nnx.Rngs(0))
    >>> with jlp.autocast(jlp.NVFP4BlockScaling()):
    ...     layer(jnp.ones((2, 32, 32, 3))).shape
    (2, 8, 8, 64)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = 1,
        *,
        recipe: Any = FROM_CONTEXT,
        name: str = "",
        rngs: nnx.Rngs,
        **kwargs: Any,
    ):
        super().__init__(in_features, out_features, kernel_size, strides, rngs=rngs, **kwargs)
        self._set_up(recipe, name, rngs)

    def _own_axes(self) -> int:
        return len(self.kernel_size) + 2

    def _kernel_axes(self) -> tuple[int, int] | None:
        if self.mask is not None or windows_of(self).reason:
            return None
        return 0, len(self.kernel_size) + 1

    def _add_state(self, recipe: DelayedScaling | None) -> None:
        super()._add_state(None if windows_of(self).reason else recipe)

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """[batch..., spatial..., in_features] -> [batch..., windows..., out_features]."""
        who = type(self).__name__
        inputs = layer_inputs(who, inputs)
        windows = windows_of(self, inputs)
        if reason := windows_of(self).reason or windows.reason:
            if self._loaded() is not None:
                raise not_of_a_loaded_kernel(who, reason)
            return self._flaxs(inputs, out_sharding)
        recipe = self._recipe()
        if (recipe is None and self._loaded() is None) or windows.extents is None:
            return self._flaxs(inputs, out_sharding)
        operands = self._operands(inputs)
        if stays_flaxs(who, recipe, *operands):
            return self._flaxs(inputs, out_sharding)
        inputs, kernel, bias = operands
        options = self._options(recipe)
        y = linear_general(
            who,
            windows.patches(inputs),
            masked(who, kernel, self.mask),
            bias,
            range(-len(windows.sizes) - 1, 0),
            (),
            (self.out_features,),
            preferred_element_type=self.preferred_element_type,
            out_sharding=out_sharding,
            quantized_kernel=self._quantized_kernel(),
            **options,
        )
        return self._handed_on(y, options["state"])

    def _flaxs(self, inputs: jax.Array, out_sharding: Any) -> jax.Array:
        """The result of Flax's layer."""
        return nnx.Conv.__call__(self, inputs, out_sharding)
