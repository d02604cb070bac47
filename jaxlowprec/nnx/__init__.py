"""Flax NNX layers that follow a recipe: Flax's own classes, arguments, defaults and state."""

from jaxlowprec.nnx.layers import (
    Einsum,
    Linear,
    LinearGeneral,
    OverwriteWithGradient,
    Quantized,
    add_delayed_scaling,
    keep_kernel_dtype,
    name_layers,
    quantized_kernels,
)

__all__ = [
    "Einsum",
    "Linear",
    "LinearGeneral",
    "OverwriteWithGradient",
    "Quantized",
    "add_delayed_scaling",
    "keep_kernel_dtype",
    "name_layers",
    "quantized_kernels",
]
