"""NVFP4 scales that are chosen by their error (numerics.md 13)."""

import ml_dtypes
import numpy as np

from tests.numpy_oracle.float32 import MAX_FINITE, F, flush

RULES = {  # candidates, whether the error is taken relative to the tensor, whether it is squared
    "four_over_six": (("six", "four"), False, False),
    "four_over_six_mse": (("six", "four"), False, True),
    "search": (("six", "four", "below six"), True, True),
}


def e4m3(x):
    return np.minimum(x, F(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def candidates(a, s_enc, names):
    """Bytes of the scales that a rule tries for blocks with the amax a."""
    base = flush(flush(a / F(6)) * s_enc)
    six = e4m3(base)
    of = {"six": six, "four": e4m3(flush(base * F(1.5))), "below six": np.where(six >= 2, six - 1, six)}
    return [of[name].astype(np.uint8) for name in names]


def error_sum(error, transposed):
    """Of [down, height, across, 16] over the 16 in order, then over the rows of a tile as a tree.

    `transposed`: of a tile, what lies along `height` here is a row of the array.
    """
    error = np.swapaxes(error, 1, 3) if transposed and error.shape[1] > 1 else error
    total = error[..., 0]
    for i in range(1, 16):
        total = flush(total + error[..., i])
    while (rows := total.shape[1]) > 1:
        total = flush(total[:, : rows // 2] + total[:, rows // 2 :])
    return total[:, 0]


def best_scale(blocks, a, g, rule, encode, largest=256, transposed=False):
    """Scale bytes [down, across] and codes of blocks [down, height, across, 16] with amaxes a in a tensor of amax g.

    Arguments:
        encode: codes from numbers and what to multiply them by.
        transposed: the blocks are those of the transposed array.
        largest: the scale of the largest block: 256 leaves room above it. Transformer Engine has 448, too.
    """
    names, relative, squared = RULES[rule]
    room = F(largest * 6)
    s_enc = F(1) if flush(F(g)) == 0 else np.minimum(room / flush(F(g)), F(2.0**126))
    s_dec = flush(F(1) / s_enc)
    found = []
    for byte in candidates(a, s_enc, names):
        scale = byte.view(ml_dtypes.float8_e4m3fn).astype(F)[:, None, :, None]
        codes = encode(blocks, np.minimum(F(1) / flush(scale * s_dec), MAX_FINITE))
        numbers = codes.view(ml_dtypes.float4_e2m1fn).astype(F)
        if relative:
            error = flush(numbers * scale - flush(blocks * s_enc))
        else:
            error = flush(flush(flush(flush(numbers * scale) * F(g)) / room) - blocks)
        found.append((byte, codes, error_sum(flush(error * error) if squared else np.abs(error), transposed)))
    best = np.zeros(a.shape, int)
    least = found[0][2]
    for i, (_, _, error) in enumerate(found[1:], 1):
        best, least = np.where(error < least, i, best), np.minimum(error, least)
    bytes_, codes = (np.stack([f[part] for f in found]) for part in (0, 1))
    return (
        np.take_along_axis(bytes_, best[None], 0)[0],
        np.take_along_axis(codes, best[None, :, None, :, None], 0)[0],
    )
