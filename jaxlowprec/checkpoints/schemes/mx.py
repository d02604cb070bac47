"""MX formats: compressed-tensors "mxfp4-pack-quantized" and "mxfp8-quantized", miles' MXFP8, and GPT-OSS's MXFP4.

    w = element * 2**(scale - 127)       exact in bfloat16, too

GPT-OSS's files have one array for all experts of a layer, codes and scales under names of their own:

    experts.gate_up_proj_blocks   uint8 [E, N, K/32, 16]    element 2i in the low nibble of byte i
    experts.gate_up_proj_scales   uint8 [E, N, K/32]
    w[e, k, n]                                              the weight is [E, K, N], as the model multiplies by it

`down_proj` is alike. Biases are plain tensors.
Source: int4_qat.md 2.4; OCP Microscaling Formats (MX) v1.0; transformers 5.23, integrations/mxfp4.py.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import ml_dtypes
import numpy as np

from jaxlowprec.arguments import as_array
from jaxlowprec.arrays.formats import MXFP4, MXFP8, Format, ScaleRule
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.files.dtypes import all_finite
from jaxlowprec.checkpoints.schemes.base import Scheme, Spec, Tensors, on_the_cpu
from jaxlowprec.checkpoints.schemes.codes import E2M1, E4M3, unpack_bytes
from jaxlowprec.checkpoints.schemes.compressed_tensors import config_of
from jaxlowprec.ops.quantize.api import quantize

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


@dataclasses.dataclass(frozen=True)
class GPTOSSMXFP4(Scheme):
    """The experts of GPT-OSS; all else stays in high precision.

    `load` gives a QuantizedArray [E, N, K] with `axis=-1`; `store` takes one. Weights that are compressed and
    decompressed are [E, K, N].

    Arguments:
        scale_rule: see `jaxlowprec.MXFP4`. "up" is that of GPT-OSS's own kernels.
    """

    scale_rule: ScaleRule = "up"

    name: ClassVar[str] = "gpt_oss_mxfp4"
    required: ClassVar[tuple[str, ...]] = ("blocks", "scales")
    joint: ClassVar[str] = "_"
    regex_ignores: ClassVar[bool] = False
    of_expert_arrays: ClassVar[bool] = True

    @property
    def format(self) -> Format:
        """The MXFP4 format in blocks of 1x32."""
        return MXFP4(scale_rule=self.scale_rule)

    def weight_name(self, module: str) -> str:
        """See `Scheme`. The array has no ".weight"."""
        return module

    def module_of(self, weight: str) -> str:
        """See `Scheme`."""
        return weight

    def check(self, shape: Sequence[int]) -> str | None:
        """See `Scheme`."""
        if len(shape) != 3:
            return f"it has {len(shape)} dimensions; {self.name} holds the experts' arrays [E, K, N]"
        if 0 in shape:
            return "it is empty"
        return f"its K of {shape[1]} is not a multiple of the {BLOCK} that share a scale" if shape[1] % BLOCK else None

    def output_specs(self, shape: Sequence[int], dtype: Any = "bfloat16") -> dict[str, Spec]:
        """See `Scheme`."""
        e, k, n = shape
        return {
            "blocks": ("uint8", (e, n, k // BLOCK, BLOCK // 2)),
            "scales": ("uint8", (e, n, k // BLOCK)),
        }

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """See `Scheme`. Modules by name."""
        self._refuse_regexes(ignore)
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(ignore)}

    def _compress(self, weight: np.ndarray, amax: float | None) -> dict[str, np.ndarray]:
        if amax is not None:
            raise ValueError(f"{self.name}.compress: amax={amax!r}; its scales are those of blocks")
        if not all_finite(weight):
            raise ValueError(f"{self.name}.compress: the weight holds NaN or infinity, which no scale can hold")
        e, k, n = weight.shape
        blocks = np.empty((e, n, k // BLOCK, BLOCK // 2), np.uint8)
        scales = np.empty((e, n, k // BLOCK), np.uint8)
        with on_the_cpu():
            for expert in range(e):
                q = quantize(jax.device_put(np.ascontiguousarray(weight[expert].T)), self.format)
                blocks[expert] = np.asarray(q.data).reshape(n, -1, BLOCK // 2)
                scales[expert] = np.asarray(q.scale).view(np.uint8)
        return {"blocks": blocks, "scales": scales}

    def holds(self, q: QuantizedArray) -> bool:
        """See `Scheme`."""
        return type(q.format) is MXFP4 and q.format.block == (1, BLOCK)

    def store(self, q: QuantizedArray) -> dict[str, np.ndarray]:
        """See `Scheme`; q is [E, N, K]."""
        if isinstance(q, QuantizedArray) and q.ndim == 3 and q.axis == -1:
            e, n, k = q.shape
            self._require((e, k, n), "store")
            if self.holds(q) and q.hadamard is None:
                return self._write(q)
        return super().store(q)

    def _shape(self, tensors: Tensors) -> tuple[int, ...]:  # type: ignore[override]
        blocks = tensors["blocks"].shape
        return (blocks[0], blocks[2] * BLOCK, blocks[1]) if len(blocks) == 4 else blocks

    def _decode(self, tensors: Tensors, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:  # type: ignore[override]
        e, k, n = shape
        decoded = np.empty((e, k, n), dtype)
        for expert in range(e):
            values = E2M1[unpack_bytes(tensors["blocks"][expert], BLOCK)]
            values *= tensors["scales"][expert].view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[..., None]
            decoded[expert] = values.reshape(n, k).astype(dtype, copy=False).T
        return decoded

    def _read(self, tensors: Tensors, shape: tuple[int, ...], dtype: np.dtype) -> QuantizedArray:  # type: ignore[override]
        e, k, n = shape
        data = as_array(tensors["blocks"].reshape(e, n, k // 2))
        scale = as_array(tensors["scales"].view(ml_dtypes.float8_e8m0fnu))
        return QuantizedArray(data, scale, None, None, self.format, (n, k), dtype, -1, None)

    def _write(self, q: QuantizedArray) -> dict[str, np.ndarray]:
        e, n, k = q.shape
        blocks = np.asarray(q.data).reshape(e, n, k // BLOCK, BLOCK // 2)
        return {"blocks": blocks, "scales": np.asarray(q.scale).view(np.uint8)}
