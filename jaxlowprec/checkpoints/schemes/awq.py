"""AWQ in its GEMM layout: codes and zero points in words along N, columns interleaved.

    w = RNE_dtype((code - zero) * scale)
    qweight [K, N/8], qzeros [K/g, N/8]     column n is nibble (0, 4, 1, 5, 2, 6, 3, 7)[n % 8] of word n / 8

Source: int4_qat.md 3; AutoAWQ's files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from jaxlowprec.arguments import as_array
from jaxlowprec.arrays.formats import SYMMETRIC_ZERO
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.schemes.base import Spec, Tensors
from jaxlowprec.checkpoints.schemes.codes import AWQ_ORDER, pack_bytes, pack_words, unpack_words, words_across
from jaxlowprec.checkpoints.schemes.int4 import Int4Groups, decode


@dataclasses.dataclass(frozen=True)
class AWQ(Int4Groups):
    """AWQ's GEMM files in 4 bits.

    Arguments:
        group_size: elements along K that share a scale; -1: a whole row (channelwise).
        symmetric: whether all zero points are 8. AWQ's own files are asymmetric.
        scale_dtype: "float16" or "bfloat16".
    """

    group_size: int = 128
    symmetric: bool = False
    scale_dtype: str = "float16"

    name: ClassVar[str] = "awq"
    required: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")
    regex_ignores: ClassVar[bool] = False

    def check(self, shape: Sequence[int]) -> str | None:
        """See `Scheme.check`."""
        reason = super().check(shape)
        return reason or (f"its {shape[0]} rows are not a multiple of 8, which fill words" if shape[0] % 8 else None)

    def output_specs(self, shape: Sequence[int], dtype: Any = "bfloat16") -> dict[str, Spec]:
        """See `Scheme.output_specs`."""
        n, k = shape
        groups = self.groups_of(k)
        return {
            "qweight": ("int32", (k, n // 8)),
            "qzeros": ("int32", (groups, n // 8)),
            "scales": (self.scale_dtype, (groups, n)),
        }

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """See `Scheme`. Modules must be named: readers search for each entry anywhere in a module's name."""
        self._refuse_regexes(ignore)
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": self.group_size,
            "zero_point": not self.symmetric,
            "version": "gemm",
            "modules_to_not_convert": list(ignore),
        }

    def _shape(self, tensors: Tensors) -> tuple[int, int]:
        words = tensors["qweight"].shape
        return (8 * words[1], words[0]) if len(words) == 2 else words  # type: ignore[return-value]

    def _zeros(self, tensors: Tensors, n: int) -> np.ndarray:
        """uint8 [N, K/g]."""
        zeros = unpack_words(tensors["qzeros"], n, AWQ_ORDER)
        if self.symmetric and (zeros != SYMMETRIC_ZERO).any():
            raise ValueError("awq: qzeros holds zero points other than 8; use by_name('awq', symmetric=False)")
        return np.ascontiguousarray(zeros.T)

    def _decode(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
        n = shape[0]
        codes = np.ascontiguousarray(unpack_words(tensors["qweight"], n, AWQ_ORDER).T)
        return decode(codes, self._zeros(tensors, n), tensors["scales"].T, self.scale_dtype, dtype)

    def _read(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> QuantizedArray:
        n, k = shape
        codes = unpack_words(tensors["qweight"], n, AWQ_ORDER).T
        zeros = self._zeros(tensors, n)
        if k % 2:  # a QuantizedArray fills the last nibble with the code of zero
            codes = np.concatenate([codes, zeros[:, -1:]], axis=1)
        scale = as_array(np.ascontiguousarray(tensors["scales"].T))
        zero_point = None if self.symmetric else as_array(zeros)
        data = as_array(pack_bytes(codes))
        return QuantizedArray(data, scale, None, zero_point, self.format, shape, dtype, -1, None)

    def _write(self, q: QuantizedArray) -> dict[str, np.ndarray]:
        zeros = np.full(q.scale.shape, SYMMETRIC_ZERO, np.uint8) if self.symmetric else np.asarray(q.zero_point)
        return {
            "qweight": words_across(np.asarray(q.data), q.matrix_shape[1], AWQ_ORDER),
            "qzeros": pack_words(np.ascontiguousarray(zeros.T), AWQ_ORDER),
            "scales": np.ascontiguousarray(np.asarray(q.scale).T),
        }
