"""FP8 with one scale per tensor or per tile of 128x128: compressed-tensors, AutoFP8, ModelOpt and DeepSeek's own files.

    w = e4m3 * scale       in float32, rounded once

Activations are quantised too: with a scale per token at run time, or with one that calibration found ("static").
Weights in tiles are stored without padding; the last tiles may be partly filled.
Source: compressed-tensors 0.20; vLLM's Fp8Config and ModelOptFp8Config; numerics.md 7; int4_qat.md 2.4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np

from jaxlowprec.arguments import as_array
from jaxlowprec.arrays.formats import Float8Block, Float8Tensor, Format
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.schemes.base import Scheme, Spec, Tensors, as_dtype
from jaxlowprec.checkpoints.schemes.codes import E4M3
from jaxlowprec.checkpoints.schemes.compressed_tensors import config_of

FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}

Activations = Literal["dynamic", "static"]


def check_activations(name: str, activations: str) -> None:
    """Raises ValueError unless activations are "dynamic" or "static"."""
    if activations not in ("dynamic", "static"):
        raise ValueError(f'{name}: activations={activations!r}; needs "dynamic" or "static"')


def activations_of(element: Mapping[str, Any], activations: Activations) -> dict[str, Any]:
    """A configuration's entry about activations of an element type: a scale per token at run time, or a fixed one.

    >>> activations_of(FLOAT8, "dynamic")["strategy"]
    'token'
    """
    if activations == "dynamic":
        return {**element, "strategy": "token", "dynamic": True}
    return {**element, "strategy": "tensor", "dynamic": False, "observer": "minmax"}


@dataclasses.dataclass(frozen=True)
class Float8PerTensor(Scheme):
    """Compressed-tensors "float-quantized" with one scale per tensor (W8A8).

    Projections that an engine fuses share one scale: it would quantise them again if theirs differed.

    Arguments:
        activations: "dynamic": an engine scales each token at run time. "static": by `input_scale` of the module.
        input_scale: the decode scale of activations that `store` writes where they are static. It comes from
            calibration and does not belong to a weight, so `load` ignores it. 1 stands for no calibration.
        scale_dtype: "float32", or "bfloat16" or "float16", which some writers use. `compress` does not round scales to
            it; `store` accepts scales that are such numbers.
    """

    activations: Activations = "dynamic"
    input_scale: float = 1.0
    scale_dtype: str = "float32"

    name: ClassVar[str] = "fp8_tensor"
    required: ClassVar[tuple[str, ...]] = ("weight", "weight_scale")
    optional: ClassVar[tuple[str, ...]] = ("input_scale",)
    family: ClassVar[str | None] = "compressed-tensors"
    shares_global_scale: ClassVar[bool] = True
    scale_dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")
    scalars: ClassVar[tuple[str, ...]] = ("weight_scale",)
    also_shaped = {"weight_scale": ((), (1,)), "input_scale": ((), (1,))}  # noqa: RUF012
    also_read = {"input_scale": ("bfloat16", "float16")}  # noqa: RUF012
    input_range: ClassVar[float | None] = 448.0
    scalar_shape: ClassVar[tuple[int, ...]] = (1,)
    """The shape of scales as they are written. Both [] and [1] are read."""

    def __post_init__(self):
        if self.scale_dtype not in self.scale_dtypes:
            raise ValueError(f"{self.name}: scale_dtype={self.scale_dtype!r}; needs {' or '.join(self.scale_dtypes)}")
        check_activations(self.name, self.activations)

    @property
    def format(self) -> Format:
        """Float8Tensor E4M3."""
        return Float8Tensor()

    def output_specs(self, shape: Sequence[int], dtype: Any = "bfloat16") -> dict[str, Spec]:
        """See `Scheme`."""
        n, k = shape
        specs: dict[str, Spec] = {
            "weight": ("float8_e4m3fn", (n, k)),
            "weight_scale": (self.scale_dtype, self.scalar_shape),
        }
        return specs if self.activations == "dynamic" else {**specs, "input_scale": ("float32", self.scalar_shape)}

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """See `Scheme`."""
        activations = activations_of(FLOAT8, self.activations)
        return config_of("float-quantized", {**FLOAT8, "strategy": "tensor"}, ignore, activations)

    def _shape(self, tensors: Tensors) -> tuple[int, int]:
        return tensors["weight"].shape  # type: ignore[return-value]

    def _decode(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
        values = E4M3[tensors["weight"].view(np.uint8)]
        values *= tensors["weight_scale"].astype(np.float32).reshape(())
        return values.astype(dtype, copy=False)

    def _read(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> QuantizedArray:
        scale = as_array(tensors["weight_scale"].astype(np.float32).reshape(()))
        return QuantizedArray(as_array(tensors["weight"]), scale, None, None, self.format, shape, dtype, -1, None)

    def _write(self, q: QuantizedArray) -> dict[str, np.ndarray]:
        scale = np.asarray(q.scale)
        stored = scale.astype(as_dtype(self.scale_dtype)).reshape(self.scalar_shape)
        if stored.astype(np.float32) != scale:
            raise ValueError(f"{self.name}.store: the scale {scale} is not a {self.scale_dtype} number; use float32")
        made = {"weight": np.asarray(q.data), "weight_scale": stored}
        if self.activations == "static":
            made["input_scale"] = np.full(self.scalar_shape, self.input_scale, np.float32)
        return made


@dataclasses.dataclass(frozen=True)
class AutoFloat8(Float8PerTensor):
    """The older files of `"quant_method": "fp8"` without tiles, as AutoFP8 wrote them: scales are scalars."""

    name: ClassVar[str] = "autofp8"
    family: ClassVar[str | None] = None
    regex_ignores: ClassVar[bool] = False
    scalar_shape: ClassVar[tuple[int, ...]] = ()

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """See `Scheme`. Modules by name."""
        self._refuse_regexes(ignore)
        return {"quant_method": "fp8", "activation_scheme": self.activations, "ignored_layers": list(ignore)}


@dataclasses.dataclass(frozen=True)
class ModelOptFloat8(Float8PerTensor):
    """ModelOpt's FP8, which SGLang, vLLM and TensorRT-LLM call "modelopt": activations have a static scale."""

    activations: Activations = "static"

    name: ClassVar[str] = "modelopt_fp8"
    family: ClassVar[str | None] = "modelopt"
    regex_ignores: ClassVar[bool] = False
    scalar_shape: ClassVar[tuple[int, ...]] = ()

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """See `Scheme`. Modules by name, or with the wildcards * and ?."""
        self._refuse_regexes(ignore)
        return {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "kv_cache_quant_algo": None,
            "exclude_modules": list(ignore),
            "producer": {"name": "jaxlowprec"},
        }


TILE = 128


@dataclasses.dataclass(frozen=True)
class Float8Tiles(Scheme):
    """Compressed-tensors "float-quantized" in tiles: weights, and activations that are quantised at run time (W8A8).

    Arguments:
        power_of_two: round scales to powers of two.
        scale_dtype: "float32", which vLLM and SGLang use; "bfloat16", to read what compressed-tensors writes for a
            bfloat16 weight; or "float8_e8m0fnu", which DeepSeek-V4's files have. `compress` does not round scales to
            it; `store` accepts scales that are such numbers, for the last one powers of two.
    """

    power_of_two: bool = False
    scale_dtype: str = "float32"

    name: ClassVar[str] = "fp8_block"
    required: ClassVar[tuple[str, ...]] = ("weight", "weight_scale")
    family: ClassVar[str | None] = "compressed-tensors"
    scales: ClassVar[str] = "weight_scale"
    scale_dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float8_e8m0fnu")

    def __post_init__(self):
        if self.scale_dtype not in self.scale_dtypes:
            raise ValueError(f"{self.name}: scale_dtype={self.scale_dtype!r}; needs {' or '.join(self.scale_dtypes)}")

    @property
    def format(self) -> Format:
        """Float8Block E4M3 in tiles of 128x128."""
        return Float8Block(block=(TILE, TILE), power_of_two=self.power_of_two)

    def output_specs(self, shape: Sequence[int], dtype: Any = "bfloat16") -> dict[str, Spec]:
        """See `Scheme`."""
        n, k = shape
        tiles = (-(-n // TILE), -(-k // TILE))
        return {"weight": ("float8_e4m3fn", (n, k)), self.scales: (self.scale_dtype, tiles)}

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """See `Scheme`."""
        common = {"num_bits": 8, "type": "float", "symmetric": True}
        weights = {**common, "strategy": "block", "block_structure": [TILE, TILE]}
        activations = {**common, "strategy": "group", "group_size": TILE, "dynamic": True}
        return config_of("float-quantized", weights, ignore, activations)

    def _shape(self, tensors: Tensors) -> tuple[int, int]:
        return tensors["weight"].shape  # type: ignore[return-value]

    def _decode(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
        scale = tensors[self.scales].astype(np.float32)
        values = E4M3[tensors["weight"].view(np.uint8)]
        for row in range(scale.shape[0]):  # one row of tiles at a time, to avoid a float32 copy of all scales
            values[row * TILE : (row + 1) * TILE] *= np.repeat(scale[row], TILE)[: shape[1]]
        return values.astype(dtype, copy=False)

    def _read(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> QuantizedArray:
        scale = as_array(tensors[self.scales].astype(np.float32, copy=False))
        return QuantizedArray(as_array(tensors["weight"]), scale, None, None, self.format, shape, dtype, -1, None)

    def _write(self, q: QuantizedArray) -> dict[str, np.ndarray]:
        scale = np.asarray(q.scale)
        stored = scale.astype(jnp.dtype(self.scale_dtype), copy=False)
        if not np.array_equal(stored.astype(np.float32, copy=False), scale):
            raise ValueError(
                f"{self.name}.store: scales of q are not {self.scale_dtype} numbers; use scale_dtype='float32'"
            )
        return {"weight": np.asarray(q.data), self.scales: stored}


@dataclasses.dataclass(frozen=True)
class DeepSeekFloat8(Float8Tiles):
    """DeepSeek's files. Despite its name, `weight_scale_inv` is what a code is multiplied by.

    With `power_of_two` the configuration says `"scale_fmt": "ue8m0"`; scales are float32 nevertheless, unless
    `scale_dtype` says that they are stored in one byte, as DeepSeek-V4's are.
    """

    name: ClassVar[str] = "deepseek_fp8"
    required: ClassVar[tuple[str, ...]] = ("weight", "weight_scale_inv")
    family: ClassVar[str | None] = None
    scales: ClassVar[str] = "weight_scale_inv"
    regex_ignores: ClassVar[bool] = False

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """See `Scheme`. Modules by name."""
        self._refuse_regexes(ignore)
        config: dict[str, Any] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [TILE, TILE],
            "modules_to_not_convert": list(ignore),
        }
        return {**config, "scale_fmt": "ue8m0"} if self.power_of_two else config
