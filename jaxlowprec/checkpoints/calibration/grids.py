"""The numbers that a block of a weight can become, and the search for the scale whose numbers fit it best.

A grid has the weights of one block in its rows, float32 [N, block]. Rows have scales of their own.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxlowprec.arguments import as_array
from jaxlowprec.arrays.formats import NVFP4, Format, Int4
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.schemes.base import as_dtype
from jaxlowprec.checkpoints.schemes.codes import E2M1, pack_bytes
from jaxlowprec.checkpoints.schemes.nvfp4 import decode_scale

_SHRUNK = np.linspace(1.0, 0.6, 21, dtype=np.float32)
"""Factors of a range that the search of an INT4 scale tries: clipping the largest weights may help the others."""

_OF_NVFP4 = np.asarray([1.0, 1.5, 0.75, 0.8, 0.85, 0.9, 0.95, 1.05, 1.1, 1.2, 1.35], np.float32)
"""Factors of an NVFP4 block's scale that the search tries; by 1.5 the largest weight becomes a 4."""

_LEAST_SCALE = np.float32(1e-5)


class BlockScales(NamedTuple):
    """The scales of a block's rows.

    Attributes:
        scale: as it is stored, [N].
        steps: what a code of 1 stands for, float32 [N].
        zeros: the code of zero, float32 [N]; zero for symmetric formats.
    """

    scale: np.ndarray
    steps: np.ndarray
    zeros: np.ndarray


@dataclasses.dataclass(frozen=True)
class Grid(abc.ABC):
    """A format whose blocks lie along K.

    Attributes:
        format: it.
    """

    format: Format

    @property
    def length(self) -> int:
        """Weights in a row of a block."""
        return self.format.length

    @abc.abstractmethod
    def candidates(self, block: np.ndarray) -> list[BlockScales]:
        """Scales for a block, the one of plain quantisation first."""

    @abc.abstractmethod
    def codes(self, weights: np.ndarray, fitted: BlockScales) -> np.ndarray:
        """The codes of the nearest numbers: weights [N, ...] -> uint8 [N, ...]."""

    @abc.abstractmethod
    def numbers(self, codes: np.ndarray, fitted: BlockScales) -> np.ndarray:
        """The numbers that codes [N, ...] stand for, float32."""

    @abc.abstractmethod
    def array(self, codes: np.ndarray, fitted: list[BlockScales], dtype: Any) -> QuantizedArray:
        """A weight of codes [N, K] and of the scales of its blocks."""

    def nearest(self, weights: np.ndarray, fitted: BlockScales) -> np.ndarray:
        """The nearest numbers, float32 [N, ...]."""
        return self.numbers(self.codes(weights, fitted), fitted)

    def fit(self, block: np.ndarray, importance: np.ndarray, search: bool) -> BlockScales:
        """The scale of each row with the least sum of squared errors.

        Arguments:
            block: float32 [N, block].
            importance: what the squared errors of the columns are multiplied by, float32 [block].
            search: whether to compare scales; False: the one of plain quantisation.
        """
        candidates = self.candidates(block)[: None if search else 1]
        errors = [np.square(block - self.nearest(block, fitted)) @ importance for fitted in candidates]
        best = np.argmin(errors, axis=0)
        rows = np.arange(len(block))
        return BlockScales(*(np.stack(column)[best, rows] for column in zip(*candidates, strict=True)))


@dataclasses.dataclass(frozen=True)
class Int4Grid(Grid):
    """INT4: a scale is rounded to the dtype that the file has before anything is divided by it (int4_qat.md 1.4)."""

    format: Int4

    def candidates(self, block: np.ndarray) -> list[BlockScales]:
        """See `Grid`."""
        return [self._of_range(block, shrunk) for shrunk in _SHRUNK]

    def _of_range(self, block: np.ndarray, shrunk: np.float32) -> BlockScales:
        if self.format.symmetric:
            scale = self._rounded(np.abs(block).max(axis=1) * shrunk / np.float32(7))
            return BlockScales(scale, steps := scale.astype(np.float32), np.full_like(steps, 8))
        least, most = (np.minimum(block.min(axis=1), 0) * shrunk, np.maximum(block.max(axis=1), 0) * shrunk)
        scale = self._rounded((most - least) / np.float32(15))
        steps = scale.astype(np.float32)
        return BlockScales(scale, steps, np.clip(-np.rint(least / steps), 0, 15))

    def _rounded(self, scale: np.ndarray) -> np.ndarray:
        return np.maximum(scale, _LEAST_SCALE).astype(as_dtype(self.format.scale_dtype))

    def codes(self, weights: np.ndarray, fitted: BlockScales) -> np.ndarray:
        """See `Grid`. Symmetric codes are 1 to 15, which is -7 to 7."""
        steps, zeros = (_beside(weights, of) for of in (fitted.steps, fitted.zeros))
        return np.clip(np.rint(weights / steps) + zeros, 1 if self.format.symmetric else 0, 15).astype(np.uint8)

    def numbers(self, codes: np.ndarray, fitted: BlockScales) -> np.ndarray:
        """See `Grid`. Rounded to the dtype of the scale, as engines do."""
        steps, zeros = (_beside(codes, of) for of in (fitted.steps, fitted.zeros))
        return ((codes - zeros) * steps).astype(fitted.scale.dtype).astype(np.float32)

    def array(self, codes: np.ndarray, fitted: list[BlockScales], dtype: Any) -> QuantizedArray:
        """See `Grid`."""
        scale, zeros = (np.stack([getattr(f, name) for f in fitted], axis=1) for name in ("scale", "zeros"))
        zero_point = None if self.format.symmetric else as_array(zeros.astype(np.uint8))
        data = as_array(pack_bytes(codes))
        return QuantizedArray(data, as_array(scale), None, zero_point, self.format, codes.shape, dtype, -1, None)


@dataclasses.dataclass(frozen=True)
class NVFP4Grid(Grid):
    """NVFP4 with blocks of 1x16.

    Attributes:
        amax: the largest magnitude of the weight, or of those that share a tensor scale.
    """

    format: NVFP4
    amax: float

    def candidates(self, block: np.ndarray) -> list[BlockScales]:
        """See `Grid`."""
        plain = np.abs(block).max(axis=1) / np.float32(6) / self._unit
        return [self._of_scale(plain * factor) for factor in _OF_NVFP4]

    @property
    def _unit(self) -> np.float32:
        """The number that a block scale of 1 stands for."""
        return decode_scale(np.float32(self.amax))

    def _of_scale(self, wanted: np.ndarray) -> BlockScales:
        scale = np.minimum(wanted, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        steps = scale.astype(np.float32) * self._unit
        return BlockScales(scale, steps, np.zeros_like(steps))

    def codes(self, weights: np.ndarray, fitted: BlockScales) -> np.ndarray:
        """See `Grid`. Weights beyond 6 steps become 6."""
        steps = _beside(weights, fitted.steps)
        scaled = np.divide(weights, steps, out=np.zeros_like(weights), where=steps > 0)
        return np.clip(scaled, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)

    def numbers(self, codes: np.ndarray, fitted: BlockScales) -> np.ndarray:
        """See `Grid`."""
        return E2M1[codes] * _beside(codes, fitted.steps)

    def array(self, codes: np.ndarray, fitted: list[BlockScales], dtype: Any) -> QuantizedArray:
        """See `Grid`."""
        scale = np.stack([f.scale for f in fitted], axis=1)
        amax = jnp.float32(self.amax)
        data = as_array(pack_bytes(codes))
        return QuantizedArray(data, as_array(scale), amax, None, self.format, codes.shape, dtype, -1, None)


def grid_of(fmt: Format, amax: float | None) -> Grid | None:
    """The grid of a format, or None if there is none: 8 bits lose too little for a search.

    Arguments:
        amax: see `NVFP4Grid`.
    """
    if isinstance(fmt, Int4):
        return Int4Grid(fmt)
    if isinstance(fmt, NVFP4) and fmt.block == (1, 16) and not fmt.row_scaled and amax is not None:
        return NVFP4Grid(fmt, amax)
    return None


def _beside(weights: np.ndarray, of_rows: np.ndarray) -> np.ndarray:
    return of_rows.reshape(-1, *[1] * (weights.ndim - 1))
