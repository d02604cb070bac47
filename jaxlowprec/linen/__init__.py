"""Flax Linen layers that follow a recipe: Flax's own classes, arguments, defaults and parameter trees."""

from jaxlowprec.linen.layers import Dense, DenseGeneral, Einsum, keep_kernel_dtype

__all__ = ["Dense", "DenseGeneral", "Einsum", "keep_kernel_dtype"]
