"""Decisions that Linen's and NNX's layers share: which calls stay Flax's, the dtypes of operands, a Conv's windows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.dtypes import canonicalize_dtype
from flax.linen.linear import canonicalize_padding

from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.layers.convolution import Windows
from jaxlowprec.layers.low_rank import LoRAKernel
from jaxlowprec.layers.subscripts import KernelAxes
from jaxlowprec.ops.checks import FLOATS
from jaxlowprec.recipes import silence
from jaxlowprec.recipes.autocast import FROM_CONTEXT
from jaxlowprec.recipes.roles import Recipe

_FLAXS_PRODUCTS = {  # of these attributes, the values with which a layer computes the product that a recipe replaces
    "dot_general": (None, jax.lax.dot_general),
    "dot_general_cls": (None,),
    "einsum_op": (None, jnp.einsum),
    "conv_general_dilated": (None, jax.lax.conv_general_dilated),
    "conv_general_dilated_cls": (None,),
}


def stays_flaxs(who: str, recipe: Recipe | None, *operands: Any) -> bool:
    """Whether Flax computes this call because no recipe quantises an operand's dtype; a warning says so once."""
    other = [a.dtype for a in operands if a is not None and a.dtype not in FLOATS]
    if recipe is None or not other or any(isinstance(a, QuantizedArray | LoRAKernel) for a in operands):
        return False
    message = f"{other[0]} operands stay in high precision, as Flax has them; recipes take bfloat16, float16, float32"
    silence.warn_once(who, recipe, [message], depth=2)
    return True


def own_product(layer: Any) -> str:
    """The argument that gives a layer another function for its product; "" if there is none."""
    return next((name for name, usual in _FLAXS_PRODUCTS.items() if getattr(layer, name, None) not in usual), "")


def check_own_product(who: str, layer: Any) -> None:
    """Raises ValueError if a layer whose kernel is quantised has another function for its product."""
    if product := own_product(layer):
        raise ValueError(f"{who}: {product}= is set, so the quantised kernel would be ignored; drop it")


def computes_own_product(who: str, layer: Any, given: Any, recipe: Recipe | None) -> bool:
    """Whether Flax computes this call with the layer's own function, under a scope's recipe; a warning says so once.

    Arguments:
        given: what the layer was told to follow.
        recipe: what that stands for in this call.

    Raises:
        ValueError: the layer was told to follow a recipe of its own, which would be ignored.
    """
    product = own_product(layer)
    if recipe is None or not product:
        return False
    if given is not FROM_CONTEXT:
        raise ValueError(
            f"{who}: {product}= is set, so the recipe {recipe} would be ignored; drop it, or pass recipe=None"
        )
    message = f"{product}= is set, so the layer computes as Flax's and does not follow the recipe"
    silence.warn_once(who, recipe, [message], depth=2)
    return True


def keep_kernel_dtype(inputs: Any, kernel: Any, bias: Any = None, *, dtype: Any = None) -> tuple[Any, Any, Any]:
    """A `promote_dtype=` for Flax's own layers with `dot_general=jlp.dot_general`: it casts all but the kernel.

    Flax's default first rounds a float32 master weight to bfloat16, and its gradient on the way back.
    """
    dtype = canonicalize_dtype(inputs, kernel, bias, dtype=dtype)
    inputs, bias = (None if a is None else jnp.asarray(a, dtype) for a in (inputs, bias))
    return inputs, kernel, bias


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
