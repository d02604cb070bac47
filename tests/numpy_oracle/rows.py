"""Scales of lines, their codes and what they decode to (numerics.md 18), by NumPy's own divisions and casts."""

import ml_dtypes
import numpy as np

from tests.numpy_oracle.codes import ELEMENTS, encode
from tests.numpy_oracle.float32 import F, flush
from tests.numpy_oracle.random_bits import random_bytes

LARGEST = {"e4m3": F(448), "e5m2": F(57344), "int8": F(127)}


def scale_of(amax, fmt):
    """float32 [rows, 1] of amaxes, in the scale's dtype; and what elements are multiplied by, if they are."""
    dtype = np.dtype(getattr(ml_dtypes, fmt.scale_dtype, None) or fmt.scale_dtype)
    amax = flush(amax)
    largest = F(127.5) if getattr(fmt, "rule", "") == "compressed-tensors" else LARGEST[fmt.element]
    exact = np.where(amax > 0, np.maximum(amax / largest, F(2.0**-126)), F(0))
    if fmt.rule == "cache":
        scale = np.maximum(amax / largest, F(1e-6))
        return np.where(np.isfinite(amax), scale, F(np.nan)), F(1) / scale
    scale = np.maximum(exact, F(getattr(fmt, "least_scale", 0))).astype(dtype).astype(F)
    multiplies = fmt.element == "int8" and dtype == F and fmt.rule == "deploy"
    if dtype != F:
        scale = np.where(scale == 0, F(ml_dtypes.finfo(dtype).eps), scale)
    elif not multiplies:
        scale = np.where(scale == 0, F(1), scale)
    factor = np.minimum(F(127) / np.where(amax > 0, amax, F(1)), F(2.0**126)) if multiplies else None
    return np.where(np.isfinite(scale) & np.isfinite(amax), scale, F(np.nan)), factor


def quantize(x, fmt, random=None):
    """Codes, int8 or as bytes, and float32 scales [rows, 1] of a matrix. `random`: see `quantize_matrix`."""
    with np.errstate(all="ignore"):
        x = flush(np.asarray(x).astype(F)) + F(0)
        scale, factor = scale_of(np.abs(x).max(axis=1, keepdims=True, initial=F(0)), fmt)
        values = x / scale if factor is None else x * factor
        byte = None
        if random is not None:
            key, stream, row, group = random
            sixteens = group + np.arange(-(-x.shape[1] // 16))
            byte = random_bytes(key, stream, row + np.arange(x.shape[0]), sixteens)[:, : x.shape[1]]
        if fmt.element != "int8":
            code = encode(values, F(1), fmt.element, byte) | (np.signbit(x) * np.uint8(0x80))
        elif byte is None:
            integers = (
                np.copysign(np.floor(np.abs(values) + F(0.5)), values) if fmt.rule == "cache" else np.rint(values)
            )
            code = np.clip(integers, -128 if fmt.rule == "compressed-tensors" else -127, 127)
        else:
            a = np.minimum(np.abs(values), F(127)).astype(np.float64)
            up = a - np.floor(a) >= (255.5 - byte) / 256
            code = np.sign(values) * (np.floor(a) + up)
        code = np.where(np.isnan(scale) | (x == 0), 0, code)
        return code.astype(np.int8 if fmt.element == "int8" else np.uint8), scale


def decode(code, scale, fmt):
    """float32 of codes as `quantize_rows` gives them."""
    if fmt.element == "int8":
        return flush(code.astype(F) * scale)
    return flush(code.view(ELEMENTS[fmt.element]).astype(F) * scale)


def multiply(a, b):
    """The product [M, N] of integers (codes, scales): exact sums, then the scales of columns and of rows."""
    sums = a[0].astype(np.int64) @ b[0].astype(np.int64).T
    return flush(flush(sums.astype(F) * b[1].T) * a[1])
