"""Numbers to verify with, the same bytes on every machine: integers of Philox, shaped on the host by NumPy.

Every float comes from its bits or from an exact product with a power of two, so no rounding of a platform is in them.
"""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np

KEY = np.array([0x243F6A88, 0x85A308D3], np.uint32)
"""Words of the key for what is drawn."""

_SIGN, _BIAS, _FRACTION = np.uint32(1 << 31), 127, (1 << 23) - 1


def integers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Uniform uint32."""
    words = np.random.Philox(key=seed).random_raw(-(-int(np.prod(shape)) // 2))
    return words.astype("<u8").view("<u4")[: int(np.prod(shape))].reshape(shape).astype(np.uint32)


def spread(shape: tuple[int, ...], seed: int, lowest: int, highest: int) -> np.ndarray:
    """Float32 of any sign and fraction, with exponents from `lowest` to `highest`."""
    fraction, exponent = integers(shape, seed), integers(shape, seed + 1)
    exponent = exponent % np.uint32(highest - lowest + 1) + np.uint32(_BIAS + lowest)
    return ((fraction & (_SIGN | np.uint32(_FRACTION))) | (exponent << 23)).view(np.float32)


def normal(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Float32, nearly normal: sums of eight 16-bit integers, of variance 2/3."""
    halves = integers((*shape, 4), seed).view("<u2").reshape(*shape, 8)
    sums = 2 * halves.sum(axis=-1, dtype=np.int64) - 8 * 65535
    return np.ldexp(sums.astype(np.float32), -17)


def _ties(shape: tuple[int, int], seed: int) -> np.ndarray:
    """Middles of neighbouring codes: every block has a largest element of 6 times a power of two, and the array 2688,
    so that scales are exact wherever they are powers of two or E4M3."""
    rows, columns = shape
    random = integers(shape, seed)
    eighths = (random % 49).astype(np.float32) / 8  # those of E2M1
    fine = np.ldexp((16 + random % 16).astype(np.float32), -4 - (random >> 8 & 7).astype(np.int32) + 1)
    x = np.where(np.arange(rows)[:, None] % 2 == 1, eighths, fine)
    x[::16], x[:, ::16] = 6, 6
    tile = np.arange(rows)[:, None] // 128 + 2 * (np.arange(columns)[None] // 128)
    x = np.ldexp(np.where(random >> 31, -x, x), tile).astype(np.float32)
    x[0, 0] = 2688
    return x


def _tiny(shape: tuple[int, int], seed: int) -> np.ndarray:
    """Subnormal numbers, zeros of both signs, and numbers not much above 2^-126; a tile is all zeros."""
    bits = integers(shape, seed)
    exponent = (bits >> 8) % 6  # 0: subnormal
    x = (bits & (_SIGN | np.uint32(_FRACTION))) | (exponent << 23)
    x[bits % 7 == 0] &= _SIGN
    x[:128, :128] &= _SIGN
    return x.astype(np.uint32).view(np.float32)


def _not_finite(shape: tuple[int, int], seed: int) -> np.ndarray:
    """Normal numbers among which a few are infinite or NaN."""
    x, where = normal(shape, seed), integers(shape, seed + 1) % 8192
    for value, number in enumerate((np.inf, -np.inf, np.nan)):
        x[where == value] = number
    return x


@functools.cache
def bfloat16_numbers() -> np.ndarray:
    """[2, 512, 512]: normal numbers, and the same kind with rows of many magnitudes."""
    x = normal((2, 512, 512), 1)
    x[1] = np.ldexp(x[1], np.arange(512)[:, None] % 25 - 12)
    return x.astype(ml_dtypes.bfloat16)


@functools.cache
def float32_numbers() -> np.ndarray:
    """[6, 256, 384]: of wide range, ties, tiny, large, not finite, and normal numbers in many magnitudes."""
    shape = (256, 384)
    many = np.ldexp(normal(shape, 70), np.arange(384)[None] % 9 - 4)
    slices = (
        spread(shape, 20, -24, 24),
        _ties(shape, 30),
        _tiny(shape, 40),
        spread(shape, 50, 100, 127),
        _not_finite(shape, 60),
        many,
    )
    return np.stack(slices)


@functools.cache
def pairs() -> tuple[np.ndarray, np.ndarray]:
    """Two float32 [1024, 1024] whose products, sums and differences are normal numbers or 0."""
    x, y = (spread((1024, 1024), seed, -30, 30) for seed in (80, 82))
    y[::2] = np.where(integers((512, 1024), 84) % 64 == 0, x[::2], spread((512, 1024), 86, -2, 2))
    return x, y
