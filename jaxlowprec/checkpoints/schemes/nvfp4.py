"""NVFP4: compressed-tensors "nvfp4-pack-quantized" and ModelOpt's NVFP4.

    compressed-tensors   w = e2m1 * (scale / weight_global_scale)      the global scale is an encode scale, 2688 / amax
    ModelOpt             w = e2m1 * (scale * weight_scale_2)           the second scale is a decode scale, amax / 2688

Each is computed in float32, left to right within the brackets, and rounded once. `jaxlowprec.dequantize` multiplies by
amax instead, so its float32 results may differ in the last bit.

Source: int4_qat.md 2.4; numerics.md 2.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from jaxlowprec.arguments import as_array
from jaxlowprec.arrays.formats import BLOCK, NVFP4, Format, ScaleRule
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.schemes.base import Scheme, Spec, Tensors
from jaxlowprec.checkpoints.schemes.codes import E2M1, unpack_bytes
from jaxlowprec.checkpoints.schemes.compressed_tensors import config_of

LARGEST = np.float32(2688)
"""6 * 448: the largest code times the largest block scale."""


def encode_scale(amax: np.float32) -> np.float32:
    """The factor of a tensor before it is cast (numerics.md 2): 2688 / amax, capped; 1 if all of it is zero."""
    with np.errstate(divide="ignore"):
        return np.float32(1) if amax == 0 else np.minimum(LARGEST / np.float32(amax), np.float32(2.0**126))


def decode_scale(amax: np.float32) -> np.float32:
    """The scale that ModelOpt stores: amax / 2688; 1 for a tensor of zeros, so that no reader divides by 0."""
    return np.float32(1) if amax == 0 else np.float32(amax) / LARGEST


def amax_of(scale: np.float32, scale_of: Callable[[np.float32], np.float32], guess: np.float32) -> np.float32 | None:
    """The amax that has this scale, or None if no float32 number has it.

    The division skips some float32 numbers and gives others twice. Of two possible amaxes, the one with the shorter
    mantissa is taken: it is that of the weight if its dtype is bfloat16 or float16.
    """
    nearby = (np.float32(guess).view(np.int32) + np.arange(-3, 4, dtype=np.int32)).view(np.float32)
    matches = [amax for amax in nearby if amax > 0 and np.isfinite(amax) and scale_of(amax) == scale]
    return max(matches, key=lambda amax: _trailing_zeros(int(amax.view(np.int32))), default=None)


def _trailing_zeros(bits: int) -> int:
    return (bits & -bits).bit_length()


@dataclasses.dataclass(frozen=True)
class _TwoLevel(Scheme):
    """The common part of both kinds of NVFP4 files.

    Arguments:
        nearest_amax: whether `load` takes the nearest float32 amax if no amax has exactly the stored tensor scale, as
            with other writers (such as 1536 / amax). False: that is an error, because `store` could not give it back.
        scale_rule: by which `compress` chooses block scales, see `jaxlowprec.NVFP4`. Scales of every rule are read in
            the same way.
    """

    nearest_amax: bool = False
    scale_rule: ScaleRule = "six"

    shares_global_scale: ClassVar[bool] = True
    codes: ClassVar[str]
    """The name of the tensor of codes."""

    @property
    def format(self) -> Format:
        """The NVFP4 format in blocks of 1x16."""
        return NVFP4(scale_rule=self.scale_rule)

    @abc.abstractmethod
    def _tensor_scale(self, tensors: Tensors) -> np.float32:
        """The tensor scale as it is stored."""

    @abc.abstractmethod
    def _amax(self, stored: np.float32) -> tuple[np.float32 | None, np.float32]:
        """The amax that has exactly the stored scale (or None), and the nearest one."""

    @abc.abstractmethod
    def _block_scales(self, scale: np.ndarray, stored: np.float32) -> np.ndarray:
        """The float32 numbers that codes are multiplied by."""

    def output_specs(self, shape: Sequence[int], dtype: Any = "bfloat16") -> dict[str, Spec]:
        """See `Scheme`."""
        n, k = shape
        return {self.codes: ("uint8", (n, k // 2)), "weight_scale": ("float8_e4m3fn", (n, k // BLOCK))}

    def _shape(self, tensors: Tensors) -> tuple[int, int]:
        codes = tensors[self.codes]
        return (codes.shape[0], 2 * codes.shape[1]) if codes.ndim == 2 else codes.shape  # type: ignore[return-value]

    def _says_zero(self, tensors: Tensors) -> bool:
        """Whether the tensor scale is 0, as some writers store it for a tensor of zeros."""
        return self._tensor_scale(tensors) == 0 and not (tensors[self.codes] & 0x77).any()

    def _decode(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
        if self._says_zero(tensors):
            return np.zeros(shape, dtype)
        n, k = shape
        scale = self._block_scales(tensors["weight_scale"].astype(np.float32), self._positive(tensors))
        codes = E2M1[unpack_bytes(tensors[self.codes], k)].reshape(n, -1, BLOCK)
        codes *= scale[..., None]
        return codes.reshape(n, k).astype(dtype)

    def _positive(self, tensors: Tensors) -> np.float32:
        stored = self._tensor_scale(tensors)
        if not 0 < stored < np.inf:
            raise ValueError(
                f"{self.name}: {self.required[-1]} is {stored}, but the codes are not all zero; needs a positive number"
            )
        return stored

    def _read(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> QuantizedArray:
        amax = np.float32(0) if self._says_zero(tensors) else self._exact_amax(self._positive(tensors))
        data, scale = as_array(tensors[self.codes]), as_array(tensors["weight_scale"])
        return QuantizedArray(data, scale, as_array(amax), None, self.format, shape, dtype, -1, None)

    def _exact_amax(self, stored: np.float32) -> np.float32:
        amax, nearest = self._amax(stored)
        if amax is None and not self.nearest_amax:
            raise ValueError(
                f"{self.name}.load: {self.required[-1]} is {stored}, which no float32 amax has as its scale; "
                f'by_name("{self.name}", nearest_amax=True) loads it with the nearest, 2**-23 off at most'
            )
        return nearest if amax is None else amax

    def _write(self, q: QuantizedArray) -> dict[str, np.ndarray]:
        amax = np.float32(q.amax)
        if not np.isfinite(amax):
            raise ValueError(f"{self.name}.store: the amax of q is {amax}: the weight held NaN or infinity")
        return {self.codes: np.asarray(q.data), "weight_scale": np.asarray(q.scale), **self._scales(amax)}

    @abc.abstractmethod
    def _scales(self, amax: np.float32) -> dict[str, np.ndarray]:
        """The tensors that hold one number each."""


@dataclasses.dataclass(frozen=True)
class PackedNVFP4(_TwoLevel):
    """Compressed-tensors "nvfp4-pack-quantized", weights only: activations stay in high precision (W4A16)."""

    name: ClassVar[str] = "nvfp4"
    required: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale", "weight_global_scale")
    optional: ClassVar[tuple[str, ...]] = ("input_global_scale",)
    family: ClassVar[str | None] = "compressed-tensors"
    codes: ClassVar[str] = "weight_packed"

    def output_specs(self, shape: Sequence[int], dtype: Any = "bfloat16") -> dict[str, Spec]:
        """See `Scheme`."""
        return {**super().output_specs(shape, dtype), "weight_global_scale": ("float32", (1,))}

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """See `Scheme`."""
        return config_of("nvfp4-pack-quantized", _ARGUMENTS, ignore)

    def _tensor_scale(self, tensors: Tensors) -> np.float32:
        return tensors["weight_global_scale"][0]

    def _amax(self, stored: np.float32) -> tuple[np.float32 | None, np.float32]:
        nearest = LARGEST / stored
        return amax_of(stored, encode_scale, nearest), nearest

    def _block_scales(self, scale: np.ndarray, stored: np.float32) -> np.ndarray:
        return scale / stored

    def _scales(self, amax: np.float32) -> dict[str, np.ndarray]:
        return {"weight_global_scale": np.asarray([encode_scale(amax)])}


_ARGUMENTS = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor_group",
    "group_size": BLOCK,
    "scale_dtype": "torch.float8_e4m3fn",
}
"""How compressed-tensors describes NVFP4."""


@dataclasses.dataclass(frozen=True)
class PackedNVFP4W4A4(PackedNVFP4):
    """Compressed-tensors "nvfp4-pack-quantized" with activations in NVFP4 too, its preset "NVFP4" (W4A4).

    Engines find the block scales of activations at run time, relative to the module's `input_global_scale`.

    Arguments:
        input_global_scale: the encode scale of activations that `store` writes, 2688 over their amax. It comes from
            calibration and does not belong to a weight, so `load` ignores it. 1 stands for no calibration.
    """

    input_global_scale: float = 1.0

    name: ClassVar[str] = "nvfp4_w4a4"
    input_range: ClassVar[float | None] = float(LARGEST)

    def of_inputs(self, amax: float) -> PackedNVFP4W4A4:
        """See `Scheme`."""
        return dataclasses.replace(self, input_global_scale=float(encode_scale(np.float32(amax))))

    def output_specs(self, shape: Sequence[int], dtype: Any = "bfloat16") -> dict[str, Spec]:
        """See `Scheme`."""
        return {**super().output_specs(shape, dtype), "input_global_scale": ("float32", (1,))}

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """See `Scheme`."""
        activations = {**_ARGUMENTS, "dynamic": "local", "observer": "static_minmax"}
        return config_of("nvfp4-pack-quantized", _ARGUMENTS, ignore, activations)

    def _scales(self, amax: np.float32) -> dict[str, np.ndarray]:
        return {**super()._scales(amax), "input_global_scale": np.asarray([self.input_global_scale], np.float32)}


@dataclasses.dataclass(frozen=True)
class ModelOptNVFP4(_TwoLevel):
    """ModelOpt's NVFP4, which SGLang, vLLM and TensorRT-LLM call "modelopt": weights and activations are quantised.

    Arguments:
        input_scale: the decode scale of activations that `store` writes, their amax / 2688. It comes from calibration
            and does not belong to a weight, so `load` ignores it. The default, 1, stands for no calibration.
    """

    input_scale: float = 1.0

    name: ClassVar[str] = "modelopt_nvfp4"
    required: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "weight_scale_2")
    optional: ClassVar[tuple[str, ...]] = ("input_scale",)
    family: ClassVar[str | None] = "modelopt"
    codes: ClassVar[str] = "weight"
    scalars: ClassVar[tuple[str, ...]] = ("weight_scale_2",)
    input_range: ClassVar[float | None] = float(LARGEST)
    regex_ignores: ClassVar[bool] = False

    def output_specs(self, shape: Sequence[int], dtype: Any = "bfloat16") -> dict[str, Spec]:
        """See `Scheme`."""
        scalars: dict[str, Spec] = {"weight_scale_2": ("float32", ()), "input_scale": ("float32", ())}
        return {**super().output_specs(shape, dtype), **scalars}

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """See `Scheme`. Modules by name, or with the wildcards * and ?."""
        self._refuse_regexes(ignore)
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": BLOCK,
            "exclude_modules": list(ignore),
            "producer": {"name": "jaxlowprec"},
        }

    def _tensor_scale(self, tensors: Tensors) -> np.float32:
        return np.float32(tensors["weight_scale_2"])

    def _amax(self, stored: np.float32) -> tuple[np.float32 | None, np.float32]:
        nearest = stored * LARGEST
        return amax_of(stored, decode_scale, nearest), nearest

    def _block_scales(self, scale: np.ndarray, stored: np.float32) -> np.ndarray:
        return scale * stored

    def _scales(self, amax: np.float32) -> dict[str, np.ndarray]:
        scale = np.asarray(decode_scale(amax))
        return {"weight_scale_2": scale, "input_scale": np.asarray(self.input_scale, np.float32)}
