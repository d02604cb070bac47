"""Int4 in numpy, written from int4_qat.md 1.2 and 1.4 alone: IEEE division, one group at a time."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tests.numpy_oracle.float32 import flush

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}


def _rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x, np.float32).astype(DTYPES[dtype]).astype(np.float32)


def _group(group: np.ndarray, symmetric: bool, dtype: str) -> tuple[np.ndarray, np.float32, int]:
    """Unsigned codes, scale and zero point of one group of numbers of the deployment dtype."""
    seven, fifteen, least = np.float32(7), np.float32(15), np.float32(1e-5)
    with np.errstate(over="ignore", invalid="ignore"):
        if symmetric:
            zero, scale = 8, _rounded(max(np.abs(group).max() / seven, least), dtype)
        else:
            low, high = np.minimum(group.min(), np.float32(0)), np.maximum(group.max(), np.float32(0))
            scale = _rounded(max((high - low) / fifteen, least), dtype)
    if not np.isfinite(group).all() or not np.isfinite(scale):
        zero = 8 if symmetric else 0
        return np.full(group.shape, zero), np.float32("nan"), zero
    if not symmetric:
        zero = int(np.clip(-np.rint(low / scale), 0, 15))
    codes = np.rint(group / scale).astype(int) + zero
    return np.clip(codes, 1 if symmetric else 0, 15), np.float32(scale), zero


def quantize(x: np.ndarray, group: int, symmetric: bool, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[R, C] -> bytes [R, ...], scales and zero points [R, G], C filled up with zeros."""
    x = _rounded(flush(np.asarray(x, np.float32)), dtype)
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % group)))
    rows, columns = x.shape
    codes = np.zeros((rows, columns + columns % 2), np.uint8)
    scales, zeros = np.zeros((rows, columns // group), np.float32), np.zeros((rows, columns // group), np.uint8)
    for r in range(rows):
        for g in range(columns // group):
            part = slice(g * group, (g + 1) * group)
            codes[r, part], scales[r, g], zeros[r, g] = _group(x[r, part], symmetric, dtype)
        if columns % 2:
            codes[r, -1] = zeros[r, -1]
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales.astype(DTYPES[dtype]), zeros


def dequantize(
    data: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group: int, columns: int, dtype: str, out: str
) -> np.ndarray:
    """[R, columns] of the dtype `out`: decoded to the deployment dtype first."""
    codes = np.stack([data & 15, data >> 4], axis=-1).reshape(data.shape[0], -1)[:, :columns].astype(np.float32)
    steps = codes - np.repeat(zeros, group, axis=1)[:, :columns].astype(np.float32)
    scale = flush(np.repeat(scales.astype(np.float32), group, axis=1)[:, :columns])
    with np.errstate(over="ignore"):
        values = _rounded(steps * np.where(np.isfinite(scale), scale, np.float32("nan")), dtype)
    values = np.where(np.isnan(values), np.float32("nan"), values)
    with np.errstate(over="ignore"):
        return values.astype(DTYPES[out])
