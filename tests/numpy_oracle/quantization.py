"""Scales, codes and what they decode to (numerics.md 1, 2, 4 to 7, 13 and 14)."""

import ml_dtypes
import numpy as np

from tests.numpy_oracle import eden as of_scales
from tests.numpy_oracle import rows as of_rows
from tests.numpy_oracle.codes import ELEMENTS, GRIDS, MANTISSA_BITS, encode, encode_e2m1
from tests.numpy_oracle.float32 import MAX_FINITE, F, flush
from tests.numpy_oracle.random_bits import random_bytes
from tests.numpy_oracle.rotation import rotate
from tests.numpy_oracle.scale_rules import best_scale


def pad(x, rows, columns):
    padding = [(0, 0)] * (x.ndim - 2) + [(0, -x.shape[-2] % rows), (0, -x.shape[-1] % columns)]
    return np.pad(x, padding)


# --- scales: of blocks with the given amax -> what is stored, what to multiply by


def tensor_encode(g, largest):
    return F(1) if flush(F(g)) == 0 else np.minimum(F(largest) / flush(F(g)), F(2.0**126))


def two_level(a, g, largest=2688):
    target = np.minimum(flush(a * flush(tensor_encode(g, largest) * F(1 / 6))), MAX_FINITE)
    scale = np.minimum(target, F(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return scale, block_encode(scale, g, largest)


def block_encode(scale, g, largest):
    s_dec = flush(F(1) / tensor_encode(g, largest))
    return np.minimum(F(1) / flush(scale.view(ml_dtypes.float8_e4m3fn).astype(F) * s_dec), MAX_FINITE)


def power_of_two(a, fmt):
    largest = GRIDS[fmt.element][-1]
    if fmt.scale_rule == "up":
        target = flush(a * F(1 / largest))
        mantissa, exponent = np.frexp(target)
        exponent = np.where(target == 0, -127, exponent - (mantissa == 0.5))  # of 2^n, n
    else:
        mantissa, exponent = np.frexp(a.astype(np.float64))
        if fmt.scale_rule == "even":
            steps = 2.0 ** (MANTISSA_BITS[fmt.element] + 1)
            exponent = exponent + (np.floor(mantissa * steps + 0.5) == steps)
        exponent = exponent - 1 - (np.frexp(largest)[1] - 1)
    e = np.where(a == 0, 0, np.maximum(exponent + 127, 1))
    return e.astype(np.uint8), np.ldexp(F(1), 127 - e).astype(F)


def encode_scale_of(a, fmt):
    a = np.maximum(a, F(fmt.amax_epsilon))
    encode = np.where(a == 0, F(1), np.minimum(F(GRIDS[fmt.element][-1]) / a, F(2.0**126)))
    if fmt.power_of_two:
        encode = np.ldexp(F(1), np.frexp(encode)[1] - 1)
    return encode.astype(F)


def amax(x, dtype, negative=None):
    """float32 [...] of [..., R, C]: the largest magnitude, after a rotation along R if there are signs."""
    with np.errstate(all="ignore"):
        x = np.asarray(x).astype(F)
        if negative is not None and x.size:
            lines = np.swapaxes(x, -1, -2)
            lines = np.pad(lines, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-2] % len(negative))])
            x = rotate(lines, negative).astype(dtype).astype(F)
        return np.abs(flush(x)).max(axis=(-2, -1), initial=F(0))


def quantize_matrix(x, dtype, fmt, axis=-1, negative=None, random=None, amax=None, encode_scale=None, eden=False):
    """One matrix -> codes as bytes, scales (one-byte ones as bytes), amax or None.

    `random` is (key words, stream, first row, first group of 16 columns); with `eden` it is for scales.
    """
    with np.errstate(all="ignore"):
        x = np.asarray(x).astype(F)
        x = x.T if axis == -2 else x
        if negative is not None:
            x = rotate(pad(x, 1, len(negative)), negative).astype(dtype).astype(F)
        if fmt.scaling == "rows":
            code, scale = of_rows.quantize(x, fmt, random)
            return code.view(np.uint8), scale, None
        x = flush(x) + F(0)  # + 0 makes -0 +0
        g = np.abs(x).max(initial=F(0)) if amax is None else F(amax)  # NaN propagates
        (rows, columns), packed = x.shape, fmt.element == "e2m1"
        height, length = (max(rows, 1), max(columns, 1)) if fmt.scaling == "tensor" else fmt.block
        down, across = -(-rows // height), -(-columns // length)
        blocks = pad(x, height, length).reshape(down, height, across, length)
        block_amax = np.abs(blocks).max(axis=(1, 3), initial=F(0))
        finite = np.isfinite(block_amax)
        a = np.where(finite, block_amax, F(0))

        code, stored_amax = None, g if fmt.scaling == "two_level" else None
        if fmt.scaling == "two_level":
            usable = np.isfinite(g) and flush(g) >= 0
            finite &= usable
            numbers, tensor = np.where(np.isfinite(blocks), blocks, F(0)), g if usable else F(0)
            if fmt.scale_rule == "six":
                scale, multiplier = two_level(a, tensor, 1536 if eden else 2688)
            else:
                scale, code = best_scale(numbers, a, tensor, fmt.scale_rule, encode_e2m1, transposed=axis == -2)
            if eden:
                multiplier = block_encode(scale, tensor, 1536)
                code = encode_e2m1(numbers, multiplier[:, None, :, None])
                key, stream, row, group = random
                bits = of_scales.random_bits(key, 2 + stream, row + np.arange(rows), group + np.arange(across))
                scale = of_scales.corrected(numbers, scale, multiplier, code, bits)
            if eden or fmt.scale_rule != "six":
                stored_amax = np.minimum(F(1.75) * flush(g), MAX_FINITE) if np.isfinite(g) else g
            scale = np.where(finite, scale, 0x7F)
        elif fmt.scaling == "e8m0":
            scale, multiplier = power_of_two(a, fmt)
            scale = np.where(finite, scale, 0xFF)
        elif fmt.scaling == "float32":
            multiplier = encode_scale_of(a, fmt)
            scale = np.where(finite, F(1) / multiplier, F(np.nan))
        else:  # of the tensor, whose elements may be more than the given amax says
            given = flush(F(g if encode_scale is None else encode_scale))
            usable = np.isfinite(given) and (given > 0 or (encode_scale is None and given == 0))
            whole = F(0)
            if usable:
                whole = encode_scale_of(given, fmt) if encode_scale is None else given
            finite, multiplier = (np.full((down, across), value) for value in (usable, whole))
            scale = flush(F(1) / whole) if usable else F(np.nan)

        byte = None
        if random is not None and not eden:
            key, stream, row, group = random
            byte = random_bytes(key, stream, row + np.arange(rows), group + np.arange(-(-columns // 16)))[:, :columns]
            byte = pad(byte, height, length).reshape(blocks.shape)
        if code is None:
            code = encode(blocks, multiplier[:, None, :, None], fmt.element, byte)
        code = np.where(finite[:, None, :, None], code, 0).reshape(down * height, across * length)[:rows]
        data = code[:, 0::2] | (code[:, 1::2] << 4) if packed else code[:, :columns]
        return data.astype(np.uint8), np.asarray(scale), stored_amax


# --- and back


def code_values(data, fmt):
    """float32 of codes given as bytes; of packed ones, [rows, 2 * bytes]."""
    if fmt.element == "int8":
        return data.view(np.int8).astype(F)
    if fmt.element == "e2m1":
        data = np.stack([data & 15, data >> 4], axis=-1).reshape(data.shape[0], -1)
    return data.view(ELEMENTS[fmt.element]).astype(F)


def row_scales(scale, fmt, rows):
    """float32 [rows, blocks] of scales as `quantize_matrix` has them; [1, 1] for a whole tensor."""
    if fmt.scaling == "tensor":
        return np.reshape(scale, (1, 1))
    if fmt.scaling == "two_level":
        scale = scale.view(ml_dtypes.float8_e4m3fn).astype(F)
    elif fmt.scaling == "e8m0":
        scale = flush(np.where(scale == 0xFF, F(np.nan), np.ldexp(F(1), scale.astype(int) - 127)))
    return np.repeat(scale, fmt.block[0], axis=0)[:rows]


def decode(data, scale, amax, fmt):
    """float32 without rotation undone: [rows, columns], whole blocks of packed codes."""
    with np.errstate(all="ignore"):
        values, scales = code_values(data, fmt), row_scales(scale, fmt, data.shape[0])
        if fmt.scaling not in ("tensor", "rows"):
            scales = np.repeat(scales, fmt.block[1], axis=1)[:, : values.shape[1]]
        values = flush(values * scales)
        return flush(flush(values * F(amax)) * F(1 / 2688)) if fmt.scaling == "two_level" else values
