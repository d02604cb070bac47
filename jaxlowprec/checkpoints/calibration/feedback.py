"""Weights quantised so that the results of their linear change little: errors are handed on to later columns.

A linear computes y = x W^T from inputs with second moments H = mean of x^T x. Column by column, the error of a
quantised column is spread over the columns that are still to come, by the rows of the Cholesky factor U of
H^-1 = U^T U, so that the error of y is as small as these can make it. The scale of a block is chosen when its first
column is reached.

Source: Frantar et al., GPTQ, arXiv:2210.17323.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np

from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.calibration.grids import BlockScales, Grid

_KEPT = 2  # factors: files often have k, o, q and v in this order
_AT_ONCE = 128  # columns whose errors reach the later ones by one matrix product


@dataclasses.dataclass(frozen=True)
class Method:
    """How codes and scales are chosen.

    Attributes:
        search: whether several scales are compared for each block.
        feedback: whether the error of a column is handed on to later ones.
        damping: what is added to the diagonal of the moments, as a share of its mean: more of it hands on less.
    """

    search: bool = True
    feedback: bool = True
    damping: float = 0.01

    def __post_init__(self):
        if not 0 < self.damping <= 1:
            raise ValueError(f"Method: damping={self.damping!r}; needs a number above 0, up to 1")


def quantized(
    weight: np.ndarray,
    moments: np.ndarray,
    grid: Grid,
    method: Method,
    dtype: Any,
    *,
    factors: Factors | None = None,
) -> QuantizedArray:
    """A weight in a grid's format.

    Arguments:
        weight: [N, K].
        moments: the second moments of the linear's inputs, float32 [K, K].
        grid: the format.
        method: how codes and scales are chosen.
        dtype: what the result dequantises to by default.
        factors: those of weights before this one, which may have had the same inputs.
    """
    columns = np.array(np.asarray(weight).T, np.float32, order="C")  # each contiguous
    length, (count, _) = grid.length, columns.shape
    importance = np.diagonal(moments).astype(np.float32)
    factor = (factors or Factors()).of(moments, method.damping) if method.feedback else None
    codes, fitted = np.empty(columns.shape, np.uint8), list[BlockScales]()
    step = max(_AT_ONCE // length, 1) * length
    for begin in range(0, count, step):
        end = min(begin + step, count)
        errors = np.zeros_like(columns[begin:end])
        for k in range(begin, end):
            if k % length == 0:
                block = slice(k, k + length)
                fitted.append(grid.fit(np.ascontiguousarray(columns[block].T), importance[block], method.search))
            codes[k] = grid.codes(columns[k], fitted[-1])
            if factor is not None:
                errors[k - begin] = (columns[k] - grid.numbers(codes[k], fitted[-1])) / factor[k, k]
                columns[k + 1 : end] -= factor[k, k + 1 : end, None] * errors[k - begin]
        if factor is not None and end < count:
            columns[end:] -= factor[begin:end, end:].T @ errors
    return grid.array(np.ascontiguousarray(codes.T), fitted, dtype)


def factor_of(moments: np.ndarray, damping: float) -> np.ndarray:
    """The upper Cholesky factor U of the inverse of damped moments, H^-1 = U^T U, float32 [K, K].

    An input that was always zero keeps to itself. The factor is the inverse of a lower one of H in reversed order, so
    that H itself is not inverted.
    """
    damped = np.array(moments, np.float64)
    diagonal = np.einsum("ii->i", damped)
    diagonal[diagonal <= 0] = 1
    diagonal += damping * diagonal.mean()
    lower = np.linalg.cholesky(damped[::-1, ::-1])
    return np.triu(np.linalg.inv(lower)[::-1, ::-1]).astype(np.float32)


class Factors:
    """The latest factors of moments: weights that read one input, such as q, k and v, have one."""

    def __init__(self) -> None:
        self._latest: dict[tuple[bytes, float], np.ndarray] = {}

    def of(self, moments: np.ndarray, damping: float) -> np.ndarray:
        """See `factor_of`."""
        key = hashlib.blake2b(np.ascontiguousarray(moments).data).digest(), damping
        if key not in self._latest:
            if len(self._latest) == _KEPT:
                del self._latest[next(iter(self._latest))]
            self._latest[key] = factor_of(moments, damping)
        return self._latest[key]


def output_error(weight: np.ndarray, decoded: np.ndarray, moments: np.ndarray) -> float:
    """The norm of x (W - Q)^T over that of x W^T, for inputs with such moments."""
    difference = np.asarray(weight, np.float32) - np.asarray(decoded, np.float32)
    error, whole = (float(np.vdot(w @ moments, w)) for w in (difference, np.asarray(weight, np.float32)))
    return (max(error, 0.0) / whole) ** 0.5 if whole > 0 else 0.0
