"""How other libraries lay out the scales and data of a QuantizedArray, and back."""

from jaxlowprec.arrays.layouts import from_compact, gemm_scales, logical_scales, swizzle, to_compact, unswizzle

__all__ = ["from_compact", "gemm_scales", "logical_scales", "swizzle", "to_compact", "unswizzle"]
