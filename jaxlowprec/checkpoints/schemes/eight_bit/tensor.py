"""FP8 with one scale per tensor: compressed-tensors "float-quantized", AutoFP8's files and ModelOpt's.

    w = e4m3 * scale       in float32, rounded once

Activations are quantised too: with a scale per token at run time, or with one that calibration found ("static").
Source: compressed-tensors 0.20; vLLM's Fp8Config and ModelOptFp8Config; numerics.md 7.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from jaxlowprec.arguments import as_array
from jaxlowprec.arrays.formats import Float8Tensor, Format
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
