"""NNX layers whose parameter is not a kernel [K, N]: Einsum, and Embed, whose table is also a tied head's kernel."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jaxlowprec.layers.dot_general import dot_general, einsum_of_layer
from jaxlowprec.layers.flax_layers import stays_flaxs
from jaxlowprec.layers.subscripts import KernelAxes, input_ndim, kernel_axes, kernel_axes_in_result
from jaxlowprec.nnx.layers import _Quantizing
from jaxlowprec.ops.checks import layer_inputs
from jaxlowprec.recipes.autocast import FROM_CONTEXT


class Einsum(_Quantizing, nnx.Einsum):
    """`flax.nnx.Einsum` under a recipe. Arguments: Flax's, `recipe` and `name` (see `Linear`).

    A loaded kernel has the shape of the kernel's matrices [batch..., K, N]: K are the axes that `einsum_str` contracts,
    in the order of the inputs' axes.
    """

    def __init__(
        self,
        einsum_str: str,
        kernel_shape: Any,
        bias_shape: Any = None,
        *,
        recipe: Any = FROM_CONTEXT,
        name: str = "",
        rngs: nnx.Rngs,
        **kwargs: Any,
    ):
        super().__init__(einsum_str, kernel_shape, bias_shape, rngs=rngs, **kwargs)
        self._set_up(recipe, name, rngs)

    def _own_axes(self) -> int:
        return len(self.kernel_shape)

    def __call__(self, inputs: jax.Array, einsum_str: str | None = None, out_sharding: Any = None) -> jax.Array:
        """The einsum of the inputs and the kernel."""
        who = type(self).__name__
        inputs = layer_inputs(who, inputs)
        recipe = self._recipe()
        if recipe is None and self._loaded() is None:
            return self._flaxs(inputs, einsum_str, out_sharding)
        subscripts = self._subscripts(einsum_str, inputs.ndim)
        operands = self._operands(inputs)
        if stays_flaxs(who, recipe, *operands):
            return self._flaxs(inputs, einsum_str, out_sharding)
        inputs, kernel, bias = operands
        options = self._options(recipe)
        y = einsum_of_layer(
            subscripts,
            inputs,
            kernel,
            self.kernel_shape,
            preferred_element_type=self.preferred_element_type,
            out_sharding=out_sharding,
            **options,
        )
        y = self._handed_on(y, options["state"])
        shape = tuple(self.kernel_shape)
        return y if bias is None else y + bias.reshape(kernel_axes_in_result(subscripts, inputs.ndim, shape))

    def _subscripts(self, given: str | None, ndim: int) -> str:
        """The subscripts of a call. Raises ValueError if a loaded kernel has the matrices of other ones."""
        if given is None:
            return self.einsum_str
        if self._loaded() is not None:
            axes = len(self.kernel_shape)
            wanted, own = (kernel_axes("einsum", text, ndim, axes) for text in (given, self.einsum_str))
            if wanted != own:
                raise ValueError(
                    f"{type(self).__name__}: einsum_str={given!r} contracts other axes than {self.einsum_str!r}, which "
                    "the layer's quantised kernel was made for"
                )
        return given

    def _flaxs(self, inputs: jax.Array, einsum_str: str | None, out_sharding: Any) -> jax.Array:
        """The result of Flax's layer."""
        return nnx.Einsum.__call__(self, inputs, einsum_str, out_sharding)


def einsum_axes(layer: nnx.Einsum) -> KernelAxes:
    """The axes of an Einsum layer's kernel. Raises ValueError if its kernel itself is in no matrix product."""
    axes = len(layer.kernel_shape)
    return kernel_axes("einsum", layer.einsum_str, input_ndim(layer.einsum_str, axes), axes)


class Embed(_Quantizing, nnx.Embed):
    """`flax.nnx.Embed` under a recipe: `attend`, the product of a tied head, follows it.

    Rows are looked up in high precision. Arguments: Flax's, `recipe` and `name` (see `Linear`).

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> from flax import nnx
    >>> embed = jlp.nnx.Embed(256, 64, rngs=nnx.Rngs(0))
    >>> with jlp.autocast(jlp.NVFP4BlockScaling()):
    ...     embed.attend(embed(jnp.arange(8))).shape
    (8, 256)
    """

    bias: Any = None
    precision: Any = None

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        recipe: Any = FROM_CONTEXT,
        name: str = "",
        rngs: nnx.Rngs,
        **kwargs: Any,
    ):
        super().__init__(num_embeddings, features, rngs=rngs, **kwargs)
        self._set_up(recipe, name, rngs)

    @property
    def kernel(self) -> Any:  # type: ignore[override]
        """The table [num_embeddings, features]."""
        return self.embedding

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """[..., features] -> [..., num_embeddings]."""
        who = type(self).__name__
        query = layer_inputs(who, query)
        recipe = self._recipe()
        operands = query if recipe is None else self._operands(query)
        if recipe is None or stays_flaxs(who, recipe, *operands):
            return nnx.Embed.attend(self, query, out_sharding)
        query, table, _ = operands
        options = self._options(recipe)
        dims = (((query.ndim - 1,), (1,)), ((), ()))
        y = dot_general(query, table, dims, out_sharding=out_sharding, **options)
        return self._handed_on(y, options["state"])
