"""Activations in high precision by a quantised weight: 16 lanes of fused multiply-adds, then a tree."""

import ml_dtypes
import numpy as np

from tests.numpy_oracle.float32 import F, flush, fma
from tests.numpy_oracle.quantization import code_values, pad, row_scales

LANES = 16


def weight(data, scale, zero_point, fmt):
    """float32 [N, K], whole blocks of packed codes, without the tensor's scale."""
    with np.errstate(all="ignore"):
        if fmt.element == "int4":
            dtype, size = np.dtype(getattr(ml_dtypes, fmt.scale_dtype, fmt.scale_dtype)), fmt.group_size
            steps = np.stack([data & 15, data >> 4], axis=-1).reshape(data.shape[0], -1)[:, : scale.shape[1] * size]
            zero = np.full(scale.shape, 8) if zero_point is None else zero_point
            steps = steps.astype(F) - np.repeat(zero, size, axis=1).astype(F)
            scale = flush(scale.astype(F))
            scale = np.where(np.isfinite(scale), scale, F(np.nan))
            return flush((flush(steps * np.repeat(scale, size, axis=1))).astype(dtype).astype(F))
        codes = code_values(data, fmt)
        if fmt.scaling == "tensor":
            return codes
        return flush(codes * np.repeat(row_scales(scale, fmt, len(data)), fmt.block[1], axis=1)[:, : codes.shape[1]])


def sums(x, w):
    """x [M, K] and w [N, >= K] float32 -> [M, N]."""
    with np.errstate(all="ignore"):
        x, w = pad(flush(x), 1, LANES), pad(w[:, : x.shape[1]], 1, LANES)
        lanes = np.zeros((len(x), len(w), LANES), F)
        for k in range(0, x.shape[1], LANES):
            lanes = fma(x[:, None, k : k + LANES], w[None, :, k : k + LANES], lanes)
        while lanes.shape[-1] > 1:
            half = lanes.shape[-1] // 2
            lanes = flush(lanes[..., :half] + lanes[..., half:])
        return lanes[..., 0]


def alpha(scale, amax, fmt):
    """What the sums are multiplied by."""
    if fmt.scaling == "two_level":
        return flush(F(amax) * F(1 / 2688))
    return F(scale) if fmt.scaling == "tensor" else F(1)


def product(x, data, scale, amax, zero_point, fmt):
    """float32 [M, N] before the epilogue."""
    with np.errstate(all="ignore"):
        return flush(sums(x, weight(data, scale, zero_point, fmt)) * alpha(scale, amax, fmt))
