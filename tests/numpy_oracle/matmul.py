"""The block-scaled GEMM and what follows it (numerics.md 9)."""

import numpy as np

from tests.numpy_oracle.float32 import F, flush, fma
from tests.numpy_oracle.quantization import code_values, pad, row_scales


def dot(x, w):
    """x @ w.T in float32, added up in order: the product of two codes is exact."""
    total = np.zeros((x.shape[0], w.shape[0]), F)
    for k in range(x.shape[1]):
        total = total + x[:, k, None] * w[None, :, k]
    return total


def matmul(a, b):
    """Operands (data, scale, amax, format), of one length of blocks or b MXFP4: float32 [M, N] before the epilogue."""
    with np.errstate(all="ignore"):
        (x, sa), (w, sb) = ((code_values(q[0], q[3]), row_scales(q[1], q[3], q[0].shape[0])) for q in (a, b))
        scaling, packed = a[3].scaling, [q[3].element == "e2m1" for q in (a, b)]
        if scaling == "tensor":
            return flush(flush(dot(x, w) * sa) * sb)
        length = a[3].block[1]
        by_mx = scaling == "float32" and b[3].scaling == "e8m0"
        if by_mx:
            w = flush(w * np.repeat(sb, b[3].block[1], axis=1))[:, : x.shape[1]]
        x, w = pad(x, 1, length), pad(w, 1, length)
        y = np.zeros((x.shape[0], w.shape[0]), F)
        for block in range(sa.shape[1]):
            part = slice(block * length, (block + 1) * length)
            s, t = sa[:, block, None], sb[None, :, block]
            if scaling == "e8m0" and not all(packed):
                for k in range(part.start, part.stop):
                    y = fma(flush(x[:, k, None] * s), flush(w[None, :, k] * t), y)
                continue
            if by_mx:
                p = np.zeros_like(y)
                for k in range(part.start, part.stop):
                    p = fma(x[:, k, None], w[None, :, k], p)
                y = flush(y + flush(p * s))
                continue
            p = dot(x[:, part], w[:, part])
            if scaling == "two_level":
                y = flush(y + p * (s * t))  # the term is exact
            elif all(packed):
                y = flush(y + flush(flush(p * s) * t))  # p is exact
            else:
                y = fma(flush(p * s), t, y)
        if scaling == "two_level":
            y = flush(y * flush(flush(F(a[2]) * F(b[2])) * F(1 / 7225344)))
        return y


C0, C1 = F(0.797884583473205566406250), F(0.0356774069368839263916015625)  # sqrt(2/pi) and 0.044715 of it


def exp(z):
    """As numerics/activations.h has it: every operation rounded on its own."""
    n = np.rint(np.clip(z, F(-100), F(100)) * F(1.44269502162933349609375))
    r = (z - n * F(0.693359375)) - n * F(-2.12194440e-4)
    p = F(1.38888893e-3)
    for coefficient in (8.33333377e-3, 4.16666679e-2, 0.16666667, 0.5, 1.0, 1.0):
        p = p * r + F(coefficient)
    power = ((np.nan_to_num(n).astype(np.int32) + 127) << 23).view(F)
    return np.where(z < F(-87), F(0), np.where(z > F(88), F(np.inf), p * power))


def gelu(x):
    """tanh-GELU, x / (1 + exp(-2u))."""
    u = x * (flush(flush(x * x) * C1) + C0)
    return flush(x / (exp(flush(u * F(-2))) + F(1)))


def gelu_gradient(x):
    """Its derivative, s + x s (1 - s) 2u' with s = 1 / (1 + e), e = exp(-2u), in numerics/activations.h's order."""
    x = np.clip(x, F(-10.015625), F(10.015625))
    square = flush(x * x)
    e = exp(flush(x * (flush(square * C1) + C0) * F(-2)))
    s = flush(F(1) / (e + F(1)))
    slope = flush(square * F(6 * 0.0356774069368839263916015625)) + F(2) * C0
    return flush(s + flush(flush(x * s) * flush(flush(e * s) * slope)))


def epilogue(y, bias=None, activation=None, accumulate=None, activation_input=None, dtype=F):
    """The result and what the activation was applied to, from `matmul`'s float32."""
    with np.errstate(all="ignore"):
        if bias is not None:
            y = flush(y + flush(bias.astype(F)))
        before = y
        if activation == "gelu":
            y = gelu(y)
        elif activation == "dgelu":
            y = flush(y * gelu_gradient(flush(activation_input.astype(F))))
        if accumulate is not None:
            y = flush(y + flush(accumulate.astype(F)))
        return y.astype(dtype), before.astype(dtype)
