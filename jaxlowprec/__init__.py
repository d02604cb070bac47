"""Low-precision training and serving for JAX: the same bits on every machine."""

from jaxlowprec.formats import DEFAULT_SIGNS, NVFP4, Hadamard
from jaxlowprec.ops.dequantize.api import dequantize
from jaxlowprec.ops.hadamard.api import hadamard_transform
from jaxlowprec.ops.quantize.api import quantize, quantize_both
from jaxlowprec.ops.scaled_matmul.api import scaled_matmul
from jaxlowprec.quantized_array import QuantizedArray

__all__ = [
    "DEFAULT_SIGNS",
    "NVFP4",
    "Hadamard",
    "QuantizedArray",
    "dequantize",
    "hadamard_transform",
    "quantize",
    "quantize_both",
    "scaled_matmul",
]
