"""MXFP4 as GPT-OSS's files have it: one array for all experts of a layer, codes and scales under names of their own.

    experts.gate_up_proj_blocks   uint8 [E, N, K/32, 16]    element 2i in the low nibble of byte i
    experts.gate_up_proj_scales   uint8 [E, N, K/32]
    w[e, k, n] = e2m1 * 2**(scale - 127)                    the weight is [E, K, N], as the model multiplies by it

`down_proj` is alike. Biases are plain tensors. Source: transformers 5.23, integrations/mxfp4.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import ml_dtypes
import numpy as np

from jaxlowprec.arguments import as_array
from jaxlowprec.arrays.formats import MXFP4, Format, ScaleRule
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.schemes.base import Scheme, Spec, Tensors, on_the_cpu
from jaxlowprec.checkpoints.schemes.codes import E2M1, unpack_bytes
from jaxlowprec.checkpoints.schemes.magnitudes import all_finite
from jaxlowprec.ops.quantize.api import quantize

BLOCK = 32


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
