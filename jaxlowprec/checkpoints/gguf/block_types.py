"""The types of tensors in GGUF files: blocks of some elements in some bytes, and their numbers.

Blocks become float32 numbers with the bits that ggml's own functions give. Q4_0, Q8_0, MXFP4 and floats are decoded
here, the other types by llama.cpp's package gguf.

Source: ggml-common.h (the blocks' layouts) and ggml-quants.c (`dequantize_row_*`) of llama.cpp.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

Decoder = Callable[[np.ndarray], np.ndarray]
"""Decodes uint8 [blocks, bytes of a block] to float32 [blocks, elements of a block]."""

_TWICE_E2M1 = np.asarray([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""ggml's numbers for the codes of E2M1, doubled; code 8 is 0, where IEEE's is -0."""


@dataclasses.dataclass(frozen=True)
class BlockType:
    """A type of ggml.

    Attributes:
        name: ggml's name, such as "Q4_0".
        number: its number in files.
        elements: consecutive elements of the last axis that share a block.
        block_bytes: bytes of a block.
        decode: see `Decoder`; None: such tensors are listed, and their numbers are not read.
        dtype: the dtype of an array that holds the elements, if numpy has one.
        needs_package: whether `decode` needs the package gguf.
    """

    name: str
    number: int
    elements: int
    block_bytes: int
    decode: Decoder | None = dataclasses.field(default=None, compare=False, repr=False)
    dtype: np.dtype | None = None
    needs_package: bool = dataclasses.field(default=False, compare=False, repr=False)

    def row_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of the last axis of a shape."""
        return (shape[-1] if shape else 1) // self.elements * self.block_bytes

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor."""
        return math.prod(shape[:-1]) * self.row_bytes(shape)


def nibbles(data: np.ndarray) -> np.ndarray:
    """[..., B] bytes as [..., 2B] codes: all low nibbles, then all high ones."""
    return np.concatenate([data & 15, data >> 4], axis=-1)


def _half(blocks: np.ndarray) -> np.ndarray:
    """The float16 number at the beginning of each block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    """Scale (float16), 32 codes less 8."""
    return _half(blocks) * (nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    """Scale (float16), 32 signed bytes."""
    return _half(blocks) * blocks[:, 2:].view(np.int8)


def _mxfp4(blocks: np.ndarray) -> np.ndarray:
    """Scale (E8M0), 32 codes of E2M1. ggml reads the scale 255 as 2^128; OCP's NaN does not exist there."""
    wide = blocks[:, :1].astype(np.uint32)  # half of 2^(scale - 127) is subnormal for the two smallest scales
    bits = np.where(wide < 2, np.uint32(0x00200000) << np.minimum(wide, 1), (np.maximum(wide, 1) - 1) << np.uint32(23))
    return bits.astype(np.uint32).view(np.float32) * _TWICE_E2M1[nibbles(blocks[:, 1:])]


def _plain(name: str, number: int, dtype: np.typing.DTypeLike) -> BlockType:
    """A type of single elements that numpy has."""
    held = np.dtype(dtype)

    def decode(blocks: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(blocks).view(held).astype(np.float32)

    return BlockType(name, number, 1, held.itemsize, decode, held)


def _by_package(name: str, number: int, elements: int, block_bytes: int) -> BlockType:
    """A type that the package gguf decodes. It is imported at the first block."""

    def decode(blocks: np.ndarray) -> np.ndarray:
        import gguf

        one_row = np.ascontiguousarray(blocks).reshape(1, -1)  # the package takes rows by sixteens
        return gguf.dequantize(one_row, gguf.GGMLQuantizationType(number)).reshape(len(blocks), elements)

    return BlockType(name, number, elements, block_bytes, decode, needs_package=True)


_ALL = (
    _plain("F32", 0, np.float32),
    _plain("F16", 1, np.float16),
    BlockType("Q4_0", 2, 32, 18, _q4_0),
    _by_package("Q4_1", 3, 32, 20),
    _by_package("Q5_0", 6, 32, 22),
    _by_package("Q5_1", 7, 32, 24),
    BlockType("Q8_0", 8, 32, 34, _q8_0),
    BlockType("Q8_1", 9, 32, 40),
    _by_package("Q2_K", 10, 256, 84),
    _by_package("Q3_K", 11, 256, 110),
    _by_package("Q4_K", 12, 256, 144),
    _by_package("Q5_K", 13, 256, 176),
    _by_package("Q6_K", 14, 256, 210),
    BlockType("Q8_K", 15, 256, 292),
    BlockType("IQ2_XXS", 16, 256, 66),
    BlockType("IQ2_XS", 17, 256, 74),
    BlockType("IQ3_XXS", 18, 256, 98),
    BlockType("IQ1_S", 19, 256, 50),
    _by_package("IQ4_NL", 20, 32, 18),
    BlockType("IQ3_S", 21, 256, 110),
    BlockType("IQ2_S", 22, 256, 82),
    _by_package("IQ4_XS", 23, 256, 136),
    _plain("I8", 24, np.int8),
    _plain("I16", 25, np.int16),
    _plain("I32", 26, np.int32),
    _plain("I64", 27, np.int64),
    _plain("F64", 28, np.float64),
    BlockType("IQ1_M", 29, 256, 56),
    _plain("BF16", 30, ml_dtypes.bfloat16),
    BlockType("TQ1_0", 34, 256, 54),
    BlockType("TQ2_0", 35, 256, 66),
    BlockType("MXFP4", 39, 32, 17, _mxfp4),
    _by_package("NVFP4", 40, 64, 36),
    BlockType("Q1_0", 41, 128, 18),
)

TYPES = {block_type.name: block_type for block_type in _ALL}
"""All types that are known, by their names."""

BY_NUMBER = {block_type.number: block_type for block_type in _ALL}

DECODED = tuple(block_type.name for block_type in _ALL if block_type.decode)
"""Names of the types whose numbers are read."""
