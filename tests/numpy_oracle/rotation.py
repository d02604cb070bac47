"""Random Hadamard transforms (numerics.md 3)."""

import numpy as np

from tests.numpy_oracle.float32 import F, flush


def rotate(x, negative):
    """float32 [..., K], K a multiple of the number of signs; not yet rounded to the input's dtype."""
    n = len(negative)
    v = flush(x).reshape(*x.shape[:-1], -1, n) * np.where(negative, F(-1), F(1))
    stride = 1
    while stride < n:
        for start in range(0, n, 2 * stride):
            low, high = slice(start, start + stride), slice(start + stride, start + 2 * stride)
            a, b = v[..., low].copy(), v[..., high].copy()
            v[..., low], v[..., high] = flush(a + b), flush(a - b)
        stride *= 2
    return flush(v * F(n**-0.5)).reshape(x.shape)


def rotate_back(y, negative):
    """The inverse of `rotate`: first H, then the signs."""
    n = len(negative)
    v = rotate(y, [0] * n).reshape(*y.shape[:-1], -1, n)
    return (v * np.where(negative, F(-1), F(1))).reshape(y.shape)
