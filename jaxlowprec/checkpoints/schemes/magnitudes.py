"""How large the numbers of an array are, and whether they are finite."""

from __future__ import annotations

import ml_dtypes
import numpy as np


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
