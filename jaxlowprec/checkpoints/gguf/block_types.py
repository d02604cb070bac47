"""The types of tensors in GGUF files: blocks of some elements in some bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from jaxlowprec.checkpoints.gguf import decoding
from jaxlowprec.checkpoints.gguf.decoding import Decoder


@dataclasses.dataclass(frozen=True)
class BlockType:
    """A type of ggml.

    Attributes:
        name: ggml's name, such as "Q4_0".
        number: its number in files.
        elements: consecutive elements of the last axis that share a block.
        block_bytes: bytes of a block.
        decode: see `decoding.Decoder`; None: such tensors are listed, and their numbers are not read.
        dtype: the dtype of an array that holds the elements, if numpy has one.
    """

    name: str
    number: int
    elements: int
    block_bytes: int
    decode: Decoder | None = dataclasses.field(default=None, compare=False, repr=False)
    dtype: np.dtype | None = None

    def row_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of the last axis of a shape."""
        return (shape[-1] if shape else 1) // self.elements * self.block_bytes

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor."""
        return math.prod(shape[:-1]) * self.row_bytes(shape)


def _plain(name: str, number: int, dtype: np.typing.DTypeLike) -> BlockType:
    held = np.dtype(dtype)
    return BlockType(name, number, 1, held.itemsize, decoding.plain(held), held)


_ALL = (
    _plain("F32", 0, np.float32),
    _plain("F16", 1, np.float16),
    BlockType("Q4_0", 2, 32, 18, decoding.q4_0),
    BlockType("Q4_1", 3, 32, 20, decoding.q4_1),
    BlockType("Q5_0", 6, 32, 22, decoding.q5_0),
    BlockType("Q5_1", 7, 32, 24, decoding.q5_1),
    BlockType("Q8_0", 8, 32, 34, decoding.q8_0),
    BlockType("Q8_1", 9, 32, 40),
    BlockType("Q2_K", 10, 256, 84, decoding.q2_k),
    BlockType("Q3_K", 11, 256, 110, decoding.q3_k),
    BlockType("Q4_K", 12, 256, 144, decoding.q4_k),
    BlockType("Q5_K", 13, 256, 176, decoding.q5_k),
    BlockType("Q6_K", 14, 256, 210, decoding.q6_k),
    BlockType("Q8_K", 15, 256, 292),
    BlockType("IQ2_XXS", 16, 256, 66),
    BlockType("IQ2_XS", 17, 256, 74),
    BlockType("IQ3_XXS", 18, 256, 98),
    BlockType("IQ1_S", 19, 256, 50),
    BlockType("IQ4_NL", 20, 32, 18, decoding.iq4_nl),
    BlockType("IQ3_S", 21, 256, 110),
    BlockType("IQ2_S", 22, 256, 82),
    BlockType("IQ4_XS", 23, 256, 136, decoding.iq4_xs),
    _plain("I8", 24, np.int8),
    _plain("I16", 25, np.int16),
    _plain("I32", 26, np.int32),
    _plain("I64", 27, np.int64),
    _plain("F64", 28, np.float64),
    BlockType("IQ1_M", 29, 256, 56),
    _plain("BF16", 30, ml_dtypes.bfloat16),
    BlockType("TQ1_0", 34, 256, 54),
    BlockType("TQ2_0", 35, 256, 66),
    BlockType("MXFP4", 39, 32, 17, decoding.mxfp4),
    BlockType("NVFP4", 40, 64, 36, decoding.nvfp4),
    BlockType("Q1_0", 41, 128, 18),
)

TYPES = {block_type.name: block_type for block_type in _ALL}
"""All types that are known, by their names."""

BY_NUMBER = {block_type.number: block_type for block_type in _ALL}

DECODED = tuple(block_type.name for block_type in _ALL if block_type.decode)
"""Names of the types whose numbers are read."""
