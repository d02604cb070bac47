"""The NVFP4 rules once more, in NumPy and ml_dtypes: no XLA, no compilation, so any shape is cheap.

Written from numerics.md apart from the library's own reference, and slower to go wrong with it: casts are ml_dtypes',
the stochastic rule is decided in float64, Philox runs on 64-bit integers. NumPy keeps subnormals, so they are flushed
by hand.
"""

import ml_dtypes
import numpy as np

F = np.float32
MIN_NORMAL = F(2.0**-126)
MAX_FINITE = np.finfo(F).max
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def flush(x):
    return np.where(np.abs(x) < MIN_NORMAL, np.copysign(F(0), x), x).astype(F)


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


def pad(x, rows, columns):
    padding = [(0, 0)] * (x.ndim - 2) + [(0, -x.shape[-2] % rows), (0, -x.shape[-1] % columns)]
    return np.pad(x, padding)


def philox(counter, key):
    """uint32 [..., 4] and [..., 2] -> uint32 [..., 4]."""
    c = [counter[..., i].astype(np.uint64) for i in range(4)]
    k = [key[..., i].astype(np.uint64) for i in range(2)]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ k[0], p1 & low, (p0 >> np.uint64(32)) ^ c[3] ^ k[1], p0 & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return np.stack(c, axis=-1).astype(np.uint32)


def random_bytes(key, stream, rows, blocks):
    """uint8 [R, B, 16]."""
    counter = np.zeros((len(rows), len(blocks), 4), np.uint32)
    counter[..., 0], counter[..., 1], counter[..., 2] = np.asarray(blocks)[None], np.asarray(rows)[:, None], stream
    words = philox(counter, np.broadcast_to(np.asarray(key, np.uint32), (*counter.shape[:2], 2)))
    return words.astype("<u4").view(np.uint8)


def amax_of(x):
    """float32 of the largest magnitude; NaN if there is one."""
    x = flush(x)
    if np.isnan(x).any():
        return F(np.nan)
    return np.abs(x).max(initial=F(0))


def quantize_matrix(x, dtype, tiles=False, axis=-1, negative=None, random=None, amax=None):
    """One matrix -> data, scale bytes, amax. `random` is (key words, stream, first row, first block)."""
    with np.errstate(all="ignore"):
        x = np.asarray(x).astype(F)
        x = x.T if axis == -2 else x
        if negative is not None:
            x = rotate(pad(x, 1, len(negative)), negative).astype(dtype).astype(F)
        g = amax_of(x) if amax is None else F(amax)
        rows, height = x.shape[0], 16 if tiles else 1
        x = pad(flush(x), height, 16)
        r, c = x.shape[0] // height, x.shape[1] // 16
        blocks = x.reshape(r, height, c, 16)
        block_amax = np.abs(blocks).max(axis=(1, 3), initial=F(0))  # NaN propagates
        bad = ~np.isfinite(block_amax) | ~np.isfinite(g)

        s_enc = F(1) if flush(g) == 0 else np.minimum(F(2688) / flush(g), F(2.0**126))
        s_dec = flush(F(1) / s_enc)
        target = np.minimum(flush(block_amax * flush(s_enc * F(1 / 6))), MAX_FINITE)
        scale = np.where(bad, F(0), np.minimum(target, F(448))).astype(ml_dtypes.float8_e4m3fn)
        enc = np.minimum(F(1) / flush(scale.astype(F) * s_dec), MAX_FINITE)[:, None, :, None]
        y = np.where(bad[:, None, :, None], F(0), (blocks + F(0)) * enc)  # + 0 makes -0 +0
        if random is None:
            code = y.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        else:
            key, stream, first_row, first_block = random
            byte = random_bytes(key, stream, first_row + np.arange(rows), first_block + np.arange(c))
            byte = np.pad(byte, [(0, r * height - rows), (0, 0), (0, 0)]).reshape(y.shape)
            a = np.minimum(np.abs(y).astype(np.float64), 6)
            low = np.minimum(np.searchsorted(GRID, a, side="right") - 1, 6)
            fraction = (a - GRID[low]) / (GRID[low + 1] - GRID[low])
            code = (low + (fraction >= (255.5 - byte) / 256)).astype(np.uint8)
            code |= np.signbit(y).astype(np.uint8) << 3
        code = code.reshape(r * height, c * 16)[:rows]
        scale = np.where(bad, np.uint8(0x7F), scale.view(np.uint8))
        return code[:, 0::2] | (code[:, 1::2] << 4), scale, g


def decode(data, scale, amax, tiles=False):
    """float32 without rotation undone, [rows, 16 * blocks]."""
    with np.errstate(all="ignore"):
        codes = np.stack([data & 15, data >> 4], axis=-1).reshape(data.shape[0], -1)
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(F)
        scales = scale.view(ml_dtypes.float8_e4m3fn).astype(F)
        if tiles:
            scales = np.repeat(scales, 16, axis=0)[: data.shape[0]]
        return flush(flush(values * np.repeat(scales, 16, axis=1) * F(amax)) * F(1 / 2688))


def matmul(a, b):
    """Operands (data, scale, amax, tiles): float32 [M, N] before the epilogue, alpha applied."""
    with np.errstate(all="ignore"):
        one = F(2688)
        (ad, as_, ag, at), (bd, bs, bg, bt) = a, b
        x, w = decode(ad, as_, one, at), decode(bd, bs, one, bt)  # amax 2688: codes times block scales, exact
        y = np.zeros((x.shape[0], w.shape[0]), F)
        for k in range(0, x.shape[1], 16):
            term = x[:, k : k + 16].astype(np.float64) @ w[:, k : k + 16].astype(np.float64).T
            y = (y + term.astype(F)).astype(F)
        alpha = flush(flush(F(ag) * F(bg)) * F(1 / 7225344))
        return flush(y * alpha)


def gelu(x):
    """tanh-GELU as numerics/gelu.h has it, every operation rounded on its own."""
    u = x * (flush(flush(x * x) * F(0.0356774069368839263916015625)) + F(0.797884583473205566406250))
    z = flush(u * F(-2))
    n = np.rint(np.clip(z, F(-100), F(100)) * F(1.44269502162933349609375))
    r = (z - n * F(0.693359375)) - n * F(-2.12194440e-4)
    p = F(1.38888893e-3)
    for coefficient in (8.33333377e-3, 4.16666679e-2, 0.16666667, 0.5, 1.0, 1.0):
        p = p * r + F(coefficient)
    power = ((np.nan_to_num(n).astype(np.int32) + 127) << 23).view(F)
    exp = np.where(z < F(-87), F(0), np.where(z > F(88), F(np.inf), p * power))
    return flush(x / (exp + F(1)))


def epilogue(y, bias=None, activation=None, accumulate=None, dtype=F):
    """The result and what the activation was applied to, from `matmul`'s float32."""
    with np.errstate(all="ignore"):
        if bias is not None:
            y = flush(y + flush(bias.astype(F)))
        before = y
        if activation == "gelu":
            y = gelu(y)
        if accumulate is not None:
            y = flush(y + flush(accumulate.astype(F)))
        return y.astype(dtype), before.astype(dtype)
