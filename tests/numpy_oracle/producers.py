"""Norms and activations (numerics.md 12)."""

import numpy as np

from tests.numpy_oracle.float32 import F, flush
from tests.numpy_oracle.matmul import exp, gelu, gelu_gradient


def _silu(x):
    return flush(x / (exp(-x) + F(1)))


def _silu_gradient(x):
    x = np.maximum(x, F(-87))
    e = exp(-x)
    s = flush(F(1) / (e + F(1)))
    t = flush(x * s)
    return t, flush(s + flush(t * flush(e * s)))


def _gelu_gradient(x):
    clamped = np.clip(x, F(-10.015625), F(10.015625))
    u = flush(
        clamped * (flush(flush(clamped * clamped) * F(0.0356774069368839263916015625)) + F(0.79788458347320556640625))
    )
    s = flush(F(1) / (exp(flush(u * F(-2))) + F(1)))
    return flush(x * s), gelu_gradient(x)


def _relu_squared(x):
    return flush(np.maximum(x, F(0)) ** 2)


def _relu_squared_gradient(x):
    return _relu_squared(x), flush(np.maximum(x, F(0)) * F(2))


_RULES = {
    "gelu": (gelu, _gelu_gradient),
    "silu": (_silu, _silu_gradient),
    "relu_squared": (_relu_squared, _relu_squared_gradient),
    "geglu": (gelu, _gelu_gradient),
    "swiglu": (_silu, _silu_gradient),
}


def activation(kind, x, up=None):
    """x and `up` of any float type -> the activation in x's dtype."""
    with np.errstate(all="ignore"):
        y = _RULES[kind][0](flush(x.astype(F)))
        return flush(y if up is None else y * flush(up.astype(F))).astype(x.dtype)


def activation_gradient(kind, dy, x, up=None):
    """The gradients of x and of `up`, in x's dtype."""
    with np.errstate(all="ignore"):
        value, derivative = _RULES[kind][1](flush(x.astype(F)))
        dy = flush(dy.astype(F))
        if up is None:
            return [flush(dy * derivative).astype(x.dtype)]
        dx = flush(flush(dy * flush(up.astype(F))) * derivative)
        return [dx.astype(x.dtype), flush(dy * value).astype(x.dtype)]


def _row_means(x):
    """Sums of 256 places, one by one, then of their halves; times 1 / C."""
    columns = x.shape[-1]
    lanes = np.zeros((*x.shape[:-1], 256), F)
    for first in range(0, columns, 256):
        part = x[..., first : first + 256]
        lanes[..., : part.shape[-1]] = flush(lanes[..., : part.shape[-1]] + part)
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = flush(lanes[..., :half] + lanes[..., half:])
    return flush(lanes * F(1 / columns))


def _weights(gamma, zero_centered):
    gamma = flush(gamma.astype(F))
    return flush(F(1) + gamma) if zero_centered else gamma


def rms_norm(x, gamma, epsilon, zero_centered=False):
    """The normed rows in x's dtype, and 1 / rms."""
    with np.errstate(all="ignore"):
        rows = flush(x.astype(F))
        inverse = F(1) / np.sqrt(flush(_row_means(flush(rows * rows)) + F(epsilon)))
        return flush(flush(rows * inverse) * _weights(gamma, zero_centered)).astype(x.dtype), inverse


def rms_norm_gradient(dy, x, gamma, inverse, zero_centered=False):
    """The gradient of x, float32."""
    with np.errstate(all="ignore"):
        normed = flush(flush(x.astype(F)) * inverse)
        scaled = flush(flush(dy.astype(F)) * _weights(gamma, zero_centered))
        mean = _row_means(flush(scaled * normed))
        return flush(flush(scaled - flush(normed * mean)) * inverse)


def layer_norm(x, gamma, beta, epsilon, zero_centered=False):
    """The normed rows in x's dtype, their means and 1 / deviations."""
    with np.errstate(all="ignore"):
        rows = flush(x.astype(F))
        mean = _row_means(rows)
        centered = flush(rows - mean)
        inverse = F(1) / np.sqrt(flush(_row_means(flush(centered * centered)) + F(epsilon)))
        y = flush(flush(centered * inverse) * _weights(gamma, zero_centered))
        return (y if beta is None else flush(y + flush(beta.astype(F)))).astype(x.dtype), mean, inverse


def layer_norm_gradient(dy, x, gamma, mean, inverse, zero_centered=False):
    """The gradient of x, float32."""
    with np.errstate(all="ignore"):
        normed = flush(flush(flush(x.astype(F)) - mean) * inverse)
        scaled = flush(flush(dy.astype(F)) * _weights(gamma, zero_centered))
        slope = flush(normed * _row_means(flush(scaled * normed)))
        return flush(flush(flush(scaled - _row_means(scaled)) - slope) * inverse)


def sum_over_rows(x):
    """[..., R, C] of any float type -> float32 [..., C], in the order of numerics.md 12.3."""
    rows = flush(x.astype(F))
    apart = [np.zeros(rows[..., 0, :].shape, F) for _ in range(8)]
    with np.errstate(all="ignore"):
        for part in range(-(-rows.shape[-2] // 64)):
            of_part = F(0)
            for first in range(64 * part, min(64 * part + 64, rows.shape[-2]), 16):
                sixteen = F(0)
                for r in range(first, min(first + 16, rows.shape[-2])):
                    sixteen = flush(sixteen + rows[..., r, :])
                of_part = flush(of_part + sixteen)
            apart[part % 8] = flush(apart[part % 8] + of_part)
        for other in apart[1:]:
            apart[0] = flush(apart[0] + other)
    return apart[0]
