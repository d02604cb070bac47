"""The rules of numerics.md once more, in NumPy and ml_dtypes: no XLA, no compilation, so any shape is cheap.

Written apart from the library's own reference, and slower to go wrong with it: casts are ml_dtypes', exponents come
from frexp, stochastic rounding is decided in float64, Philox runs on 64-bit integers, a fused multiply-add rounds once
from an exact sum. NumPy keeps subnormals, so they are flushed by hand. Of a format only its fields are read.
"""

from tests.numpy_oracle.float32 import F, flush, fma
from tests.numpy_oracle.matmul import epilogue, gelu, gelu_gradient, matmul
from tests.numpy_oracle.quantization import amax, code_values, decode, pad, quantize_matrix, row_scales
from tests.numpy_oracle.random_bits import philox, random_bytes
from tests.numpy_oracle.rotation import rotate, rotate_back

__all__ = [
    "F",
    "amax",
    "code_values",
    "decode",
    "epilogue",
    "flush",
    "fma",
    "gelu",
    "gelu_gradient",
    "matmul",
    "pad",
    "philox",
    "quantize_matrix",
    "random_bytes",
    "rotate",
    "rotate_back",
    "row_scales",
]
