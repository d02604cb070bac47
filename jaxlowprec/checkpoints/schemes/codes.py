"""Codes of 4 and 8 bits: packing (two to a byte, eight to an int32 word) and the numbers that they stand for."""

from __future__ import annotations

import ml_dtypes
import numpy as np

E2M1 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The number that each 4-bit float stands for."""

E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""The number that each 8-bit float stands for. A look-up takes a third of the time of a cast."""

Codes = np.ndarray
"""uint8, one code (0 to 15) per element."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that holds the j-th of eight columns in AWQ's GEMM layout."""


def unpack_bytes(data: np.ndarray, length: int) -> Codes:
    """[..., B] bytes as [..., length] codes, element 2i in the low nibble of byte i."""
    codes = np.empty((*data.shape, 2), np.uint8)
    np.bitwise_and(data, 15, out=codes[..., 0])
    np.right_shift(data, 4, out=codes[..., 1])
    return codes.reshape(*data.shape[:-1], -1)[..., :length]


def pack_bytes(codes: Codes) -> np.ndarray:
    """[..., K] codes as [..., ceil(K/2)] bytes; an odd last high nibble is 0."""
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], axis=-1)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def words_of_bytes(data: np.ndarray) -> np.ndarray:
    """[..., B] bytes as [..., ceil(B/4)] little-endian int32 words, padded with 0; a view if B % 4 == 0."""
    missing = -data.shape[-1] % 4
    if missing:
        data = np.pad(data, [(0, 0)] * (data.ndim - 1) + [(0, missing)])
    return np.ascontiguousarray(data).view("<i4").view(np.int32)


def bytes_of_words(words: np.ndarray, length: int) -> np.ndarray:
    """The [..., ceil(length/2)] bytes of words that hold `length` codes, as a view if possible."""
    return np.ascontiguousarray(words).view(np.uint8)[..., : -(-length // 2)]


def pack_words(codes: Codes, order: tuple[int, ...] | None = None) -> np.ndarray:
    """[..., K] codes as [..., ceil(K/8)] int32 words, padded with 0.

    Arguments:
        codes: one per element.
        order: the nibble of the word for each of eight codes; None: 0 to 7. Needs K in whole words.
    """
    return words_of_bytes(pack_bytes(codes if order is None else _reorder(codes, np.argsort(order))))


def words_across(data: np.ndarray, length: int, order: tuple[int, ...]) -> np.ndarray:
    """[N, B] bytes, rows of `length` codes, as [length, N/8] int32 words, each of one column's codes in eight rows.

    The same as transposing the codes before `pack_words`, but words are transposed, not bytes.

    Arguments:
        order: the nibble of the word for each of the eight rows.
    """
    rows = data.reshape(-1, 8, data.shape[-1])
    halves = np.zeros((2, rows.shape[0], rows.shape[2]), np.uint32)  # of even and of odd columns
    for row, nibble in enumerate(order):
        codes = rows[:, row].astype(np.uint32)
        halves[0] |= (codes & 15) << 4 * nibble
        halves[1] |= (codes >> 4) << 4 * nibble
    words = np.empty((rows.shape[2], 2, rows.shape[0]), np.int32)
    words[:, 0], words[:, 1] = (half.view(np.int32).T for half in halves)
    return words.reshape(-1, rows.shape[0])[:length]


def unpack_words(words: np.ndarray, length: int, order: tuple[int, ...] | None = None) -> Codes:
    """The inverse: [..., ceil(length/8)] words as [..., length] codes."""
    codes = unpack_bytes(bytes_of_words(words, length), length)
    return codes if order is None else _reorder(codes, np.asarray(order))


def _reorder(codes: Codes, source: np.ndarray) -> Codes:
    return codes.reshape(*codes.shape[:-1], -1, 8)[..., source].reshape(codes.shape)
