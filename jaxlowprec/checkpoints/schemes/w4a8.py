"""Four-bit weights by eight-bit activations: compressed-tensors' presets W4A8, W4AFP8 and MXFP4XFP8.

Weights are those of `w4a16` and `mxfp4`. The configuration says what an engine quantises activations to, at run time:

    w4a8         INT8, each token by itself      `weight` holds a code of 4 bits in each int8
    w4afp8       FP8, each token by itself       packed as `w4a16`, which vLLM reads; compressed-tensors itself does not
    mxfp4_fp8    FP8, 128 elements together      packed as `mxfp4`

Source: compressed-tensors 0.20; vLLM 0.32; `packed_scale_t` of CUTLASS.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import ml_dtypes
import numpy as np

from jaxlowprec.arguments import as_array, one_of
from jaxlowprec.arrays.formats import SYMMETRIC_ZERO, Format
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.arrays.row_formats import W4AFP8_GROUP, Float8Rows
from jaxlowprec.checkpoints.schemes.base import Spec, Tensors
from jaxlowprec.checkpoints.schemes.codes import E4M3, pack_bytes, pack_words, unpack_bytes, unpack_words
from jaxlowprec.checkpoints.schemes.compressed_tensors import config_of
from jaxlowprec.checkpoints.schemes.eight_bit_tensors import FLOAT8, activations_of
from jaxlowprec.checkpoints.schemes.hopper_groups import served, stored
from jaxlowprec.checkpoints.schemes.int4 import Int4Groups, PackedInt4, decode, not_loadable
from jaxlowprec.checkpoints.schemes.mx import PackedMXFP4

INT8: Mapping[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}


def _with_inputs(config: dict[str, Any], activations: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of weights alone with one of activations."""
    group = config["config_groups"]["group_0"]
    return config_of(config["format"], group["weights"], config["ignore"], activations)


@dataclasses.dataclass(frozen=True)
class W4AFloat8(PackedInt4):
    """Compressed-tensors "pack-quantized" with activations in FP8, each token by itself (W4AFP8).

    vLLM's kernel for Hopper rounds the scales of groups to E4M3, and their products with codes again. It serves weights
    that are up to 10 % off those of `Int4`, 3.4 % root mean square.

    Arguments:
        group_size, scale_dtype: see `PackedInt4`.
        kernel: what decodes the file. "any": code * scale, `Int4`. "hopper": vLLM's kernel for Hopper, to the bit; the
            format is `Float8Rows(rule="w4afp8")`, which weights are quantised to, so that those are served. It needs
            groups of 128, bfloat16 scales, and rows in multiples of 128. Any file of such groups is read as what that
            kernel serves, and stored again with the scales of what it serves. Both write and read the same tensors.

    Raises:
        ValueError: a field has another value.
    """

    kernel: Literal["any", "hopper"] = "any"

    name: ClassVar[str] = "w4afp8"

    def __post_init__(self):
        one_of(self.name, "kernel", self.kernel, "any", "hopper")
        if self.kernel == "hopper" and (self.group_size, self.scale_dtype) != (W4AFP8_GROUP, "bfloat16"):
            raise ValueError(
                f'{self.name}: kernel="hopper" with group_size={self.group_size}, scale_dtype="{self.scale_dtype}"; '
                f'that kernel needs group_size={W4AFP8_GROUP} and scale_dtype="bfloat16"'
            )

    @property
    def format(self) -> Format:
        """See `kernel`."""
        return Float8Rows(rule="w4afp8") if self.kernel == "hopper" else super().format

    def check(self, shape: Sequence[int]) -> str | None:
        """See `Scheme`."""
        reason = super().check(shape)
        if reason is None and self.kernel == "hopper" and shape[0] % W4AFP8_GROUP:
            return f"its {shape[0]} rows are not a multiple of {W4AFP8_GROUP}, which vLLM's kernel for Hopper needs"
        return reason

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """See `Scheme`."""
        return _with_inputs(super().quantization_config(ignore), activations_of(FLOAT8, "dynamic"))

    def holds(self, q: QuantizedArray) -> bool:
        """See `Scheme`. Codes of `Float8Rows` are those of this file only by its rule."""
        return q.format == self.format if self.kernel == "hopper" else super().holds(q)

    def _decode(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
        if self.kernel == "any":
            return super()._decode(tensors, shape, dtype)
        codes, scale = served(*self._groups_of(tensors, shape))
        return (E4M3[codes] * scale).astype(dtype, copy=False)

    def _read(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> QuantizedArray:
        if self.kernel == "any":
            return super()._read(tensors, shape, dtype)
        codes, scale = served(*self._groups_of(tensors, shape))
        data = as_array(codes.view(ml_dtypes.float8_e4m3fn))
        return QuantizedArray(data, as_array(scale), None, None, self.format, shape, dtype, -1, None)

    def _groups_of(self, tensors: Tensors, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Codes from -8 to 7, int8 [N, K], and the scales of groups."""
        if self._scattered(tensors, shape[1]) is not None:
            raise not_loadable(self.name, "weight_g_idx")
        codes = unpack_words(tensors["weight_packed"], shape[1]).view(np.int8) - np.int8(SYMMETRIC_ZERO)
        return codes, tensors["weight_scale"]

    def _write(self, q: QuantizedArray) -> dict[str, np.ndarray]:
        if self.kernel == "any":
            return super()._write(q)
        codes, scale = stored(np.asarray(q.data).view(np.uint8), np.asarray(q.scale))
        return {
            "weight_packed": pack_words((codes + np.int8(SYMMETRIC_ZERO)).view(np.uint8)),
            "weight_scale": scale,
            "weight_shape": np.asarray(q.matrix_shape, np.int64),
        }


@dataclasses.dataclass(frozen=True)
class MXFP4Float8(PackedMXFP4):
    """Compressed-tensors "mxfp4-pack-quantized" with activations in FP8, 128 elements together (MXFP4XFP8).

    vLLM 0.32 quantises activations to MXFP4 instead where it has no kernel for these. Here `WeightQAT` with
    `activation_format=Float8Block(power_of_two=False)` multiplies them as the file says.
    """

    name: ClassVar[str] = "mxfp4_fp8"

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """See `Scheme`."""
        activations = {**FLOAT8, "strategy": "group", "group_size": 128, "dynamic": True}
        return _with_inputs(super().quantization_config(ignore), activations)


@dataclasses.dataclass(frozen=True)
class W4A8(Int4Groups):
    """Compressed-tensors "int-quantized" with weights of 4 bits, a code in each int8, and activations in INT8.

    Arguments:
        group_size: elements along K that share a scale; -1: a whole row (channelwise).
        scale_dtype: "bfloat16" or "float16": the dtype of the scales, in which the engine also computes.
    """

    group_size: int = 128
    scale_dtype: str = "bfloat16"

    name: ClassVar[str] = "w4a8"
    family: ClassVar[str | None] = "compressed-tensors"
    required: ClassVar[tuple[str, ...]] = ("weight", "weight_scale")
    symmetric: ClassVar[bool] = True  # type: ignore[misc]

    def output_specs(self, shape: Sequence[int], dtype: Any = "bfloat16") -> dict[str, Spec]:
        """See `Scheme`."""
        n, k = shape
        return {"weight": ("int8", (n, k)), "weight_scale": (self.scale_dtype, (n, self.groups_of(k)))}

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """See `Scheme`."""
        packed = PackedInt4(self.group_size, self.scale_dtype).quantization_config(ignore)
        return _with_inputs({**packed, "format": "int-quantized"}, activations_of(INT8, "dynamic"))

    def _shape(self, tensors: Tensors) -> tuple[int, int]:
        return tensors["weight"].shape  # type: ignore[return-value]

    def _codes(self, tensors: Tensors) -> np.ndarray:
        """uint8 [N, K], 8 larger than they are stored."""
        codes = tensors["weight"] + np.int8(SYMMETRIC_ZERO)
        if codes.size and (codes.min() < 0 or codes.max() > 15):
            raise ValueError(f"{self.name}: weight has codes beyond -8 to 7, which 4 bits do not hold")
        return codes.view(np.uint8)

    def _decode(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
        return decode(self._codes(tensors), None, tensors["weight_scale"], self.scale_dtype, dtype)

    def _read(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> QuantizedArray:
        codes = np.pad(self._codes(tensors), ((0, 0), (0, shape[1] % 2)), constant_values=SYMMETRIC_ZERO)
        data = pack_bytes(codes)
        scale = as_array(tensors["weight_scale"])
        return QuantizedArray(as_array(data), scale, None, None, self.format, shape, dtype, -1, None)

    def _write(self, q: QuantizedArray) -> dict[str, np.ndarray]:
        codes = unpack_bytes(np.asarray(q.data), q.matrix_shape[1]).view(np.int8) - np.int8(SYMMETRIC_ZERO)
        return {"weight": codes, "weight_scale": np.asarray(q.scale)}
