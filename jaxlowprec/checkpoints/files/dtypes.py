"""The dtypes of safetensors files, by their names in the files, and the largest magnitude in an array of one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
"""Bits per element of every dtype that safetensors defines."""

HIGH_PRECISION = ("BF16", "F16", "F32")
"""Dtypes of weights that are quantised, or compared with quantised weights."""

QUANTISED = frozenset(name for name, bits in BITS.items() if name.startswith("F") and bits <= 8)
"""Float dtypes that hold the codes of a quantised weight."""

MAX_RANK = 64
"""The most dimensions of a tensor: as many as numpy's arrays have."""

MAX_BITS = 2**63 - 1
"""The most bits of a tensor, not counting dimensions of 0: what numpy and the format's own library can address."""

_NUMPY = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "I16": np.int16,
    "U16": np.uint16,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I32": np.int32,
    "U32": np.uint32,
    "F32": np.float32,
    "I64": np.int64,
    "U64": np.uint64,
    "F64": np.float64,
    "C64": np.complex64,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _NUMPY.items()}


def numpy_dtype(name: str) -> np.dtype | None:
    """The dtype of an array that holds it; None if numpy has none (elements of 4 and 6 bits are packed)."""
    return np.dtype(_NUMPY[name]) if name in _NUMPY else None


def file_dtype(dtype: np.typing.DTypeLike) -> str:
    """A dtype's name in the file. Raises ValueError for a dtype that safetensors files cannot hold."""
    try:
        return _NAMES[np.dtype(dtype)]
    except KeyError:
        raise ValueError(
            f"safetensors: no file holds elements of {np.dtype(dtype)}; needs one of {sorted(BITS)}"
        ) from None


def bits_of(dtype: str, shape: Sequence[int]) -> int:
    """Bits that the elements of an array take."""
    return BITS[dtype] * math.prod(shape)


def same_bytes(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays have the same dtype, shape and bytes."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    bits = f"u{one.dtype.itemsize}"
    return bool(np.array_equal(np.ascontiguousarray(one).view(bits), np.ascontiguousarray(other).view(bits)))


def amax(array: np.ndarray) -> float:
    """The largest magnitude of a bfloat16, float16 or float32 array; NaN or infinity if it holds one.

    Magnitudes have the order of their bits without the sign, NaN last and infinity before it, so integers are compared.

    >>> amax(np.float32([1, -3]))
    3.0
    """
    if not array.size:
        return 0.0
    bits = np.dtype(f"u{array.dtype.itemsize}")
    sign = 1 << (8 * bits.itemsize - 1)
    unsigned = array.view(bits)
    negative = int(unsigned.max()) & (sign - 1) if int(unsigned.max()) & sign else 0
    largest = max(int(array.view(f"i{bits.itemsize}").max()), negative)
    return float(np.array(largest, bits).view(array.dtype))


def all_finite(array: np.ndarray) -> bool:
    """Whether a bfloat16, float16 or float32 array holds neither NaN nor infinity.

    >>> all_finite(np.float32([1, np.inf]))
    False
    """
    return bool(np.isfinite(amax(array)))


def limit(dtype: np.dtype) -> float:
    """The largest number of a dtype.

    >>> limit(np.dtype("float16"))
    65504.0
    """
    return float(ml_dtypes.finfo(dtype).max)
