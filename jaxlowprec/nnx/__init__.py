"""Flax NNX layers that follow a recipe, with Flax's classes, arguments, defaults and state; and experts."""

from jaxlowprec.nnx.blocks import MLP, LayerNorm, NormLinear, RMSNorm, linears, mlp
from jaxlowprec.nnx.converting import convert
from jaxlowprec.nnx.convolution import Conv
from jaxlowprec.nnx.einsum import Einsum, Embed
from jaxlowprec.nnx.grouped import GroupedLinear
from jaxlowprec.nnx.layers import (
    KVScale,
    Linear,
    LinearGeneral,
    OverwriteWithGradient,
    Quantized,
    add_delayed_scaling,
    keep_kernel_dtype,
    name_layers,
    quantized_kernels,
)
from jaxlowprec.nnx.lora import LoRAEinsum, LoRALinear, LoRALinearGeneral, add_lora, merge_lora
from jaxlowprec.nnx.moe import MoE, SelectionBias

__all__ = [
    "MLP",
    "Conv",
    "Einsum",
    "Embed",
    "GroupedLinear",
    "KVScale",
    "LayerNorm",
    "Linear",
    "LinearGeneral",
    "LoRAEinsum",
    "LoRALinear",
    "LoRALinearGeneral",
    "MoE",
    "NormLinear",
    "OverwriteWithGradient",
    "Quantized",
    "RMSNorm",
    "SelectionBias",
    "add_delayed_scaling",
    "add_lora",
    "convert",
    "keep_kernel_dtype",
    "linears",
    "merge_lora",
    "mlp",
    "name_layers",
    "quantized_kernels",
]
