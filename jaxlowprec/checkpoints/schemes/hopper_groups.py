"""Four-bit weights as vLLM's kernel for Hopper decodes them (W4AFP8), and the file that it decodes to given codes.

    c = max(max over a row's groups of s / 448, 1 / (448 * 512))        float32
    h = E4M3(E4M3(s / c) / 8)                                           one per group
    w = E4M3(code * h) * 8c

So a weight is a row of E4M3 codes with one scale, 8c, and the codes of a group are E4M3(k h), k = -8 to 7. Each rank of
a weight that is split along K has the largest scale of its own groups, and so another c.
Source: vLLM 0.32 (`convert_bf16_scales_to_fp8`); `packed_scale_t` of CUTLASS.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from jaxlowprec.arrays.row_formats import LEAST_SCALE_SERVED, W4AFP8_GROUP
from jaxlowprec.checkpoints.schemes.codes import E4M3

_CODES = range(-8, 8)
_STEPS = E4M3[(E4M3 > 0) & (E4M3 <= 448 / 8)][::-1]  # that a group may have, the largest first
_ABSENT = 127


def _as_byte(x: np.ndarray) -> np.ndarray:
    """The bytes of the E4M3 numbers next to these; 0 for zeros of either sign."""
    byte = np.asarray(x, np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(byte == 0x80, 0, byte).astype(np.uint8)


def served(codes: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Decodes a file as the kernel does.

    Arguments:
        codes: int8 [N, K], from -8 to 7.
        scale: bfloat16 [N, K / 128], 0 or more.

    Returns:
        The bytes of E4M3 codes, uint8 [N, K], and scales, float32 [N, 1].

    Raises:
        ValueError: a scale is negative, or not finite.
    """
    scale = scale.astype(np.float32)
    if not (np.isfinite(scale).all() and (scale >= 0).all()):
        raise ValueError("w4afp8: weight_scale has numbers that are negative or not finite")
    channel = np.maximum(scale.max(axis=1, keepdims=True) / np.float32(448), np.float32(LEAST_SCALE_SERVED))
    step = E4M3[_as_byte(E4M3[_as_byte(scale / channel)] / 8)]
    byte_of = _as_byte(np.asarray(_CODES, np.float32) * step[..., None])  # [N, K / 128, 16]
    at = codes.reshape(*step.shape, -1).astype(np.int64) + 8
    return np.take_along_axis(byte_of, at, axis=-1).reshape(codes.shape), 8 * channel


def stored(codes: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A file that the kernel decodes to these codes and scales: the inverse of `served`, for what it returns.

    A group may have its codes under several steps; it gets the largest, so that a group of each row has 448 / 8, from
    which the kernel finds the row's scale again.

    Returns:
        Codes, int8 [N, K], and scales of groups, bfloat16 [N, K / 128].

    Raises:
        ValueError: a group has codes that no step has.
    """
    groups = codes.reshape(-1, W4AFP8_GROUP)
    found, steps = np.empty(groups.shape, np.int8), np.zeros(len(groups), np.float32)
    left = np.arange(len(groups))
    for step in _STEPS:
        of_byte = np.full(256, _ABSENT, np.int8)
        of_byte[_as_byte(np.asarray(_CODES, np.float32) * step)] = _CODES
        of_byte[0x80] = 0
        code = of_byte[groups[left]]
        fits = (code != _ABSENT).all(axis=1)
        found[left[fits]], steps[left[fits]] = code[fits], step
        left = left[~fits]
        if not len(left):
            break
    else:
        row, group = divmod(int(left[0]), codes.shape[1] // W4AFP8_GROUP)
        raise ValueError(
            f"w4afp8: group {group} of row {row} has codes that are not E4M3(k h) for any h; quantise by "
            'Float8Rows(rule="w4afp8")'
        )
    of_groups = steps.reshape(len(codes), -1) * scale
    return found.reshape(codes.shape), of_groups.astype(ml_dtypes.bfloat16)
