"""Policies for `jax.checkpoint`: what of this library's layers is kept for the backward pass, and where."""

from jaxlowprec.layers.checkpoint_policies import (
    PRODUCT,
    QUANTIZED_INPUT,
    QUANTIZED_WEIGHT,
    either,
    offload,
    save_products,
    save_quantized,
    save_quantized_and_products,
)

__all__ = [
    "PRODUCT",
    "QUANTIZED_INPUT",
    "QUANTIZED_WEIGHT",
    "either",
    "offload",
    "save_products",
    "save_quantized",
    "save_quantized_and_products",
]
