"""Flax Linen layers that follow a recipe, with Flax's classes, arguments, defaults and parameter trees; and experts."""

from jaxlowprec.layers.flax_layers import keep_kernel_dtype
from jaxlowprec.linen.blocks import MLP, LayerNorm, NormLinear, RMSNorm
from jaxlowprec.linen.converting import convert
from jaxlowprec.linen.convolution import Conv
from jaxlowprec.linen.grouped import GroupedDense
from jaxlowprec.linen.layers import Dense, DenseGeneral, Einsum
from jaxlowprec.linen.moe import MoE

__all__ = [
    "MLP",
    "Conv",
    "Dense",
    "DenseGeneral",
    "Einsum",
    "GroupedDense",
    "LayerNorm",
    "MoE",
    "NormLinear",
    "RMSNorm",
    "convert",
    "keep_kernel_dtype",
]
