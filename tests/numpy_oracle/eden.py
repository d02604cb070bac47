"""NVFP4 scales that are corrected for their codes' errors and rounded stochastically (numerics.md 14)."""

import ml_dtypes
import numpy as np

from tests.numpy_oracle.float32 import F, flush
from tests.numpy_oracle.random_bits import philox

E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def random_bits(key, stream, rows, blocks):
    """20 bits for each block [R, G], by its row and its index along the row."""
    counter = np.zeros((len(rows), len(blocks), 4), np.uint32)
    counter[..., 0], counter[..., 1], counter[..., 2] = np.asarray(blocks)[None] // 4, np.asarray(rows)[:, None], stream
    words = philox(counter, np.broadcast_to(np.asarray(key, np.uint32), (*counter.shape[:2], 2)))
    return np.take_along_axis(words, np.asarray(blocks)[None, :, None] % 4, -1)[..., 0] >> 12


def ratios(v, numbers):
    """What blocks [..., 16], scaled and unclamped, are times their codes' numbers; 1 where that is not a number."""
    v, numbers = np.abs(v), np.abs(numbers)
    energy, product = (sum_in_order(flush(v * other)) for other in (v, numbers))
    ratio = flush(energy / product)
    return np.where((product == 0) | ~np.isfinite(ratio), F(1), ratio).astype(F)


def sum_in_order(x):
    total = F(0)
    for i in range(x.shape[-1]):
        total = flush(total + x[..., i])
    return total


def round_up_by(t, bits):
    """E4M3 bytes: up from the lower neighbour where the distance to it and the bits, in 2^-20, are one or more."""
    t = np.minimum(t.astype(np.float64), E4M3[-1])
    low = np.searchsorted(E4M3, t, side="right") - 1
    high = np.minimum(low + 1, len(E4M3) - 1)
    distance = np.where(high > low, (t - E4M3[low]) / np.where(high > low, E4M3[high] - E4M3[low], 1), 0)
    return (low + (np.floor(distance * 2**20) + bits >= 2**20)).astype(np.uint8)


def corrected(blocks, scale, multiplier, codes, bits):
    """Scale bytes of blocks [R, 1, G, 16] that became codes by scale bytes and multipliers [R, G]."""
    v = flush(blocks * multiplier[:, None, :, None])[:, 0]
    ratio = ratios(v, codes.view(ml_dtypes.float4_e2m1fn).astype(F)[:, 0])
    return round_up_by(flush(scale.view(ml_dtypes.float8_e4m3fn).astype(F) * ratio), bits)
