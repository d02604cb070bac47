"""GPTQ, and AWQ in its GEMM layout: 4-bit codes and zero points in int32 words, in the order that each GEMM reads.

    w = RNE_dtype((code - zero) * scale)

    GPTQ  qweight [K/8, N]     nibble i of row r is the code of k = 8r + i: compressed-tensors' words, transposed
          qzeros  [K/g, N/8]   nibble i of column c is the zero point of n = 8c + i; version 1 stores it minus one
    AWQ   qweight [K, N/8], qzeros [K/g, N/8]    column n is nibble (0, 4, 1, 5, 2, 6, 3, 7)[n % 8] of word n / 8

Source: int4_qat.md 3; AutoGPTQ and GPTQModel's files; AutoAWQ's files.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from jaxlowprec.arguments import as_array
from jaxlowprec.arrays.formats import SYMMETRIC_ZERO
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.schemes.base import Spec, Tensors
from jaxlowprec.checkpoints.schemes.codes import (
    AWQ_ORDER,
    bytes_of_words,
    pack_bytes,
    pack_words,
    unpack_words,
    words_across,
    words_of_bytes,
)
from jaxlowprec.checkpoints.schemes.int4 import Int4Groups, decode, not_loadable, scattered


@dataclasses.dataclass(frozen=True)
class GPTQ(Int4Groups):
    """GPTQ's 4-bit files. Files with groups that are not consecutive (act-order) can be decompressed but not loaded.

    Arguments:
        group_size: elements along K that share a scale; -1: a whole row (channelwise).
        symmetric: whether all zero points are 8.
        scale_dtype: "float16" or "bfloat16".
        version: 1: zero points are stored minus one, so 0 cannot be stored; 2: they are stored as they are.
    """

    group_size: int = 128
    symmetric: bool = True
    scale_dtype: str = "float16"
    version: Literal[1, 2] = 1

    name: ClassVar[str] = "gptq"
    required: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales", "g_idx")

    def __post_init__(self):
        if self.version not in (1, 2):
            raise ValueError(f"gptq: version={self.version!r}; needs 1 or 2")

    def check(self, shape: Sequence[int]) -> str | None:
        """See `Scheme`."""
        reason = super().check(shape)
        if reason is None and (shape[0] % 8 or shape[1] % 8):
            return "its sizes are not multiples of 8, which fill words"
        return reason

    def output_specs(self, shape: Sequence[int], dtype: Any = "bfloat16") -> dict[str, Spec]:
        """See `Scheme`."""
        n, k = shape
        groups = self.groups_of(k)
        return {
            "qweight": ("int32", (k // 8, n)),
            "qzeros": ("int32", (groups, n // 8)),
            "scales": (self.scale_dtype, (groups, n)),
            "g_idx": ("int32", (k,)),
        }

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """See `Scheme`. Ignored modules are GPTQModel's negative rules under "dynamic"."""
        rules = [rule[3:] if rule.startswith("re:") else f"{re.escape(rule)}$" for rule in ignore]
        return {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": self.group_size,
            "desc_act": False,
            "sym": self.symmetric,
            "lm_head": False,
            "checkpoint_format": "gptq" if self.version == 1 else "gptq_v2",
            "dynamic": {f"-:{rule}": {} for rule in rules},
        }

    def _shape(self, tensors: Tensors) -> tuple[int, int]:
        words = tensors["qweight"].shape
        return (words[1], 8 * words[0]) if len(words) == 2 else words  # type: ignore[return-value]

    def _zeros(self, tensors: Tensors, n: int) -> np.ndarray:
        """uint8 [N, K/g]."""
        zeros = unpack_words(tensors["qzeros"], n)
        if self.version == 1:
            if (zeros == 15).any():
                raise ValueError(
                    "gptq: qzeros holds 15, which stands for 16 in version 1: no 4-bit zero point. "
                    "The file may be of version 2: by_name('gptq', version=2)"
                )
            zeros = zeros + np.uint8(1)
        if self.symmetric and (zeros != SYMMETRIC_ZERO).any():
            raise ValueError(
                "gptq: qzeros holds zero points other than 8, so the file is not symmetric or of the other version; "
                "use by_name('gptq', symmetric=False) or version=, or give its config \"sym\": false or "
                '"checkpoint_format": "gptq_v2"'
            )
        return np.ascontiguousarray(zeros.T)

    def _groups(self, tensors: Tensors, k: int) -> np.ndarray | None:
        """The group of each k, or None where groups are consecutive."""
        return scattered("gptq: g_idx", tensors["g_idx"], self.group_size)

    def _decode(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
        n, k = shape
        codes = unpack_words(tensors["qweight"].T, k)
        zeros, scale, groups = self._zeros(tensors, n), tensors["scales"].T, self._groups(tensors, k)
        if groups is not None:
            zeros, scale = zeros[:, groups], scale[:, groups]
        return decode(codes, zeros, scale, self.scale_dtype, dtype)

    def _read(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> QuantizedArray:
        n, k = shape
        if self._groups(tensors, k) is not None:
            raise not_loadable("gptq", "g_idx")
        data, zeros = bytes_of_words(tensors["qweight"].T, k), self._zeros(tensors, n)
        scale = as_array(np.ascontiguousarray(tensors["scales"].T))
        zero_point = None if self.symmetric else as_array(zeros)
        return QuantizedArray(as_array(data), scale, None, zero_point, self.format, shape, dtype, -1, None)

    def _write(self, q: QuantizedArray) -> dict[str, np.ndarray]:
        k = q.matrix_shape[1]
        zeros = np.full(q.scale.shape, SYMMETRIC_ZERO, np.uint8) if self.symmetric else np.asarray(q.zero_point)
        if self.version == 1:
            if (zeros == 0).any():
                raise ValueError(
                    "gptq.store: version 1 has no code for a zero point of 0; use by_name('gptq', version=2)"
                )
            zeros = zeros - np.uint8(1)
        return {
            "qweight": np.ascontiguousarray(words_of_bytes(np.asarray(q.data)).T),
            "qzeros": pack_words(zeros.T),
            "scales": np.ascontiguousarray(np.asarray(q.scale).T),
            "g_idx": (np.arange(k) // self.group_size).astype(np.int32),
        }


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
