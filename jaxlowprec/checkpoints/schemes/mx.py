"""MX formats: compressed-tensors "mxfp4-pack-quantized" and "mxfp8-quantized", and miles' MXFP8.

    w = element * 2**(scale - 127)       exact in bfloat16, too

Source: int4_qat.md 2.4; OCP Microscaling Formats (MX) v1.0.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from jaxlowprec.arguments import as_array
from jaxlowprec.arrays.formats import MXFP4, MXFP8, Format, ScaleRule
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.schemes.base import Scheme, Spec, Tensors
from jaxlowprec.checkpoints.schemes.codes import E2M1, E4M3, unpack_bytes
from jaxlowprec.checkpoints.schemes.compressed_tensors import config_of

BLOCK = 32


@dataclasses.dataclass(frozen=True)
class _MX(Scheme):
    """The common part of the MX formats.

    Arguments:
        scale_rule: see `jaxlowprec.MXFP8`. Scales of every rule are read in the same way. The defaults are closest to
            compressed-tensors: "even" for MXFP4 gives the same bytes; "up" for MXFP8 differs only where an amax is 1.75
            times a power of two (neither rule saturates there; "up" keeps one bit more).
    """

    scale_rule: ScaleRule = "even"

    codes: ClassVar[str]
    """The name of the tensor of codes."""
    scales: ClassVar[str] = "weight_scale"
    also_read = {"weight_scale": ("float8_e8m0fnu",), "weight_scale_inv": ("float8_e8m0fnu",)}  # noqa: RUF012

    @abc.abstractmethod
    def _elements(self, codes: np.ndarray, k: int) -> np.ndarray:
        """Codes as float32 numbers [N, K]."""

    def _decode(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
        n, k = shape
        elements = self._elements(tensors[self.codes], k).reshape(n, -1, BLOCK)
        elements *= tensors[self.scales].view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[..., None]
        return elements.reshape(n, k).astype(dtype, copy=False)

    def _read(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> QuantizedArray:
        scale = as_array(tensors[self.scales].view(ml_dtypes.float8_e8m0fnu))
        return QuantizedArray(as_array(tensors[self.codes]), scale, None, None, self.format, shape, dtype, -1, None)

    def _write(self, q: QuantizedArray) -> dict[str, np.ndarray]:
        return {self.codes: np.asarray(q.data), self.scales: np.asarray(q.scale).view(np.uint8)}


@dataclasses.dataclass(frozen=True)
class PackedMXFP4(_MX):
    """Compressed-tensors "mxfp4-pack-quantized", weights only: activations stay in high precision (W4A16)."""

    name: ClassVar[str] = "mxfp4"
    required: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale")
    optional: ClassVar[tuple[str, ...]] = ("input_global_scale",)
    family: ClassVar[str | None] = "compressed-tensors"
    codes: ClassVar[str] = "weight_packed"

    @property
    def format(self) -> Format:
        """The MXFP4 format in blocks of 1x32."""
        return MXFP4(scale_rule=self.scale_rule)

    def output_specs(self, shape: Sequence[int], dtype: Any = "bfloat16") -> dict[str, Spec]:
        """See `Scheme`."""
        n, k = shape
        return {"weight_packed": ("uint8", (n, k // 2)), "weight_scale": ("uint8", (n, k // BLOCK))}

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """See `Scheme`."""
        return config_of("mxfp4-pack-quantized", _group(4), ignore)

    def _shape(self, tensors: Tensors) -> tuple[int, int]:
        codes = tensors["weight_packed"]
        return (codes.shape[0], 2 * codes.shape[1]) if codes.ndim == 2 else codes.shape  # type: ignore[return-value]

    def _elements(self, codes: np.ndarray, k: int) -> np.ndarray:
        return E2M1[unpack_bytes(codes, k)]


@dataclasses.dataclass(frozen=True)
class QuantizedMXFP8(_MX):
    """Compressed-tensors "mxfp8-quantized": weights, and activations that are quantised at run time (W8A8)."""

    scale_rule: ScaleRule = "up"

    name: ClassVar[str] = "mxfp8"
    required: ClassVar[tuple[str, ...]] = ("weight", "weight_scale")
    family: ClassVar[str | None] = "compressed-tensors"
    codes: ClassVar[str] = "weight"

    @property
    def format(self) -> Format:
        """The MXFP8 E4M3 format in blocks of 1x32."""
        return MXFP8(scale_rule=self.scale_rule)

    def output_specs(self, shape: Sequence[int], dtype: Any = "bfloat16") -> dict[str, Spec]:
        """See `Scheme`."""
        n, k = shape
        return {"weight": ("float8_e4m3fn", (n, k)), self.scales: ("uint8", (n, k // BLOCK))}

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """See `Scheme`."""
        return config_of("mxfp8-quantized", _group(8), ignore, {**_group(8), "dynamic": True})

    def _shape(self, tensors: Tensors) -> tuple[int, int]:
        return tensors["weight"].shape  # type: ignore[return-value]

    def _elements(self, codes: np.ndarray, k: int) -> np.ndarray:
        return E4M3[codes.view(np.uint8)]


@dataclasses.dataclass(frozen=True)
class MilesMXFP8(QuantizedMXFP8):
    """MXFP8 of miles and SGLang: DeepSeek's names with scales of one byte."""

    name: ClassVar[str] = "miles_mxfp8"
    required: ClassVar[tuple[str, ...]] = ("weight", "weight_scale_inv")
    family: ClassVar[str | None] = None
    scales: ClassVar[str] = "weight_scale_inv"
    regex_ignores: ClassVar[bool] = False

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """See `Scheme`. Modules by name."""
        self._refuse_regexes(ignore)
        return {
            "quant_method": "mxfp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [1, BLOCK],
            "scale_fmt": "ue8m0",
            "modules_to_not_convert": list(ignore),
        }


def _group(bits: int) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "float",
        "symmetric": True,
        "strategy": "group",
        "group_size": BLOCK,
        "scale_dtype": "torch.uint8",
    }
