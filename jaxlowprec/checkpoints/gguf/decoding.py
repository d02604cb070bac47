"""Blocks of ggml as float32 numbers, with the bits that ggml's own functions give.

Every product of a scale and a code fits into float32, so only the last addition of a formula rounds, and its result
does not depend on the order of the products or on fused multiply-adds.

Source: ggml-common.h (the blocks' layouts) and ggml-quants.c (`dequantize_row_*`) of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

Decoder = Callable[[np.ndarray], np.ndarray]
"""Decodes uint8 [blocks, bytes of a block] to float32 [blocks, elements of a block]."""

_IQ4 = np.asarray([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_TWICE_E2M1 = np.asarray([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""ggml's numbers for the codes of E2M1, doubled; code 8 is 0, where IEEE's is -0."""


def as_half(blocks: np.ndarray, begin: int) -> np.ndarray:
    """The float16 number at a byte of each block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, begin : begin + 2]).view("<f2").astype(np.float32)


def nibbles(data: np.ndarray) -> np.ndarray:
    """[..., B] bytes as [..., 2B] codes: all low nibbles, then all high ones."""
    return np.concatenate([data & 15, data >> 4], axis=-1)


def plain(dtype: np.typing.DTypeLike) -> Decoder:
    """The decoder of elements that numpy has."""

    def decode(blocks: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(blocks).view(np.dtype(dtype)).astype(np.float32)

    return decode


def q4_0(blocks: np.ndarray) -> np.ndarray:
    """Scale (float16), 32 codes less 8."""
    return as_half(blocks, 0) * (nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def q4_1(blocks: np.ndarray) -> np.ndarray:
    """Scale and minimum (float16), 32 codes."""
    return as_half(blocks, 0) * nibbles(blocks[:, 4:]) + as_half(blocks, 2)


def q5_0(blocks: np.ndarray) -> np.ndarray:
    """Scale (float16), the fifth bits of 32 codes, their other bits; codes less 16."""
    return as_half(blocks, 0) * (_five_bits(blocks[:, 2:6], blocks[:, 6:]).astype(np.float32) - 16)


def q5_1(blocks: np.ndarray) -> np.ndarray:
    """Scale and minimum (float16), the fifth bits of 32 codes, their other bits."""
    return as_half(blocks, 0) * _five_bits(blocks[:, 4:8], blocks[:, 8:]) + as_half(blocks, 2)


def q8_0(blocks: np.ndarray) -> np.ndarray:
    """Scale (float16), 32 signed bytes."""
    return as_half(blocks, 0) * blocks[:, 2:].view(np.int8)


def iq4_nl(blocks: np.ndarray) -> np.ndarray:
    """Scale (float16), 32 codes of a table."""
    return as_half(blocks, 0) * _IQ4[nibbles(blocks[:, 2:])]


def mxfp4(blocks: np.ndarray) -> np.ndarray:
    """Scale (E8M0), 32 codes of E2M1. ggml reads the scale 255 as 2^128; OCP's NaN does not exist there."""
    return _half_of_e8m0(blocks[:, :1]) * _TWICE_E2M1[nibbles(blocks[:, 1:])]


def nvfp4(blocks: np.ndarray) -> np.ndarray:
    """Four scales (E4M3 without sign), 4x16 codes of E2M1; the tensor's scale is a tensor of its own."""
    bits = blocks[:, :4] & 0x7F
    half = bits.view(ml_dtypes.float8_e4m3fn).astype(np.float32) / 2
    half[bits == 0x7F] = 240  # NaN in E4M3
    half[blocks[:, :4] == 0x7F] = 0  # in ggml only without the sign's bit
    codes = nibbles(blocks[:, 4:].reshape(-1, 4, 8))
    return (half[..., None] * _TWICE_E2M1[codes]).reshape(len(blocks), 64)


def q2_k(blocks: np.ndarray) -> np.ndarray:
    """16 pairs of scale and minimum in 4 bits, 256 codes of 2 bits, the pairs' scales (float16)."""
    pairs, codes = blocks[:, :16], _two_bits(blocks[:, 16:80])
    scale, least = as_half(blocks, 80) * (pairs & 15), as_half(blocks, 82) * (pairs >> 4)
    return (scale[..., None] * codes.reshape(-1, 16, 16) - least[..., None]).reshape(-1, 256)


def q3_k(blocks: np.ndarray) -> np.ndarray:
    """256 third bits, 256 codes of 2 bits, 16 scales of 6 bits, their scale (float16)."""
    third = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    codes = _two_bits(blocks[:, 32:96]).astype(np.int8) - 4 * (1 - third.reshape(-1, 256).astype(np.int8))
    low, high = nibbles(blocks[:, 96:104]), blocks[:, None, 104:108] >> np.asarray([[0], [2], [4], [6]], np.uint8)
    scales = (low | (high & 3).reshape(-1, 16) << 4).astype(np.float32) - 32
    return ((as_half(blocks, 108) * scales)[..., None] * codes.reshape(-1, 16, 16)).reshape(-1, 256)


def q4_k(blocks: np.ndarray) -> np.ndarray:
    """Scales of scales and of minima (float16), 8 pairs of these in 6 bits, 256 codes of 4 bits."""
    scale, least = _pairs_of_six_bits(blocks)
    codes = nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return (scale * codes - least).reshape(-1, 256)


def q5_k(blocks: np.ndarray) -> np.ndarray:
    """As `q4_k`, with the fifth bits of the codes before the others."""
    scale, least = _pairs_of_six_bits(blocks)
    low = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return (scale * (low | fifth << 4) - least).reshape(-1, 256)


def q6_k(blocks: np.ndarray) -> np.ndarray:
    """256 low nibbles, their two upper bits, 16 signed scales, their scale (float16); codes less 32."""
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    codes = (low | _two_bits(blocks[:, 128:192]) << 4).astype(np.float32) - 32
    scale = as_half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return (scale[..., None] * codes.reshape(-1, 16, 16)).reshape(-1, 256)


def iq4_xs(blocks: np.ndarray) -> np.ndarray:
    """Scale (float16), 8 scales of 6 bits, 256 codes of a table."""
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    low = (blocks[:, 4:8, None] >> np.asarray([0, 4], np.uint8)).reshape(-1, 8) & 15
    scale = as_half(blocks, 0) * ((low | (high & 3) << 4).astype(np.float32) - 32)
    return (scale[..., None] * _IQ4[nibbles(blocks[:, 8:].reshape(-1, 8, 16))]).reshape(-1, 256)


def _half_of_e8m0(scale: np.ndarray) -> np.ndarray:
    """Half of 2^(scale - 127), which is subnormal for the two smallest scales."""
    wide = scale.astype(np.uint32)
    bits = np.where(wide < 2, np.uint32(0x00200000) << np.minimum(wide, 1), (np.maximum(wide, 1) - 1) << np.uint32(23))
    return bits.astype(np.uint32).view(np.float32)


def _five_bits(fifth: np.ndarray, low: np.ndarray) -> np.ndarray:
    return nibbles(low) | np.unpackbits(np.ascontiguousarray(fifth), axis=1, bitorder="little") << 4


def _two_bits(data: np.ndarray) -> np.ndarray:
    """[B, 64] bytes as [B, 256] codes: of each 32 bytes first the lowest two bits, then the next."""
    shifts = np.asarray([[0], [2], [4], [6]], np.uint8)
    return ((data.reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 256)


def _pairs_of_six_bits(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima of the 8 parts of a block of Q4_K or Q5_K, each float32 [B, 8, 1]."""
    first, second, rest = (blocks[:, begin : begin + 4] for begin in (4, 8, 12))
    scale = np.concatenate([first & 63, (rest & 15) | (first >> 6) << 4], axis=1)
    least = np.concatenate([second & 63, (rest >> 4) | (second >> 6) << 4], axis=1)
    return (as_half(blocks, 0) * scale)[..., None], (as_half(blocks, 2) * least)[..., None]
