"""Eight bits with one scale per row of the weight: compressed-tensors "float-quantized" and "int-quantized" (W8A8).

    w = code * scale       in float32, rounded once

An engine scales each token at run time, or by the module's `input_scale`. The rules are compressed-tensors', those of
`jaxlowprec.Float8Rows` and `Int8Rows` with scales in the weight's dtype (numerics.md 18), and its kernels', which
divide in float32. Its other path, on CPUs, rounds the quotient to the weight's dtype too.
Source: compressed-tensors 0.20.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from jaxlowprec.arguments import as_array
from jaxlowprec.arrays.formats import Format
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.arrays.row_formats import Float8Rows, Int8Rows
from jaxlowprec.checkpoints.files.dtypes import all_finite
from jaxlowprec.checkpoints.schemes.base import FLOATS, Scheme, Spec, Tensors, as_dtype, on_the_cpu
from jaxlowprec.checkpoints.schemes.codes import E4M3
from jaxlowprec.checkpoints.schemes.compressed_tensors import config_of
from jaxlowprec.checkpoints.schemes.eight_bit_tensors import FLOAT8, Activations, activations_of, check_activations
from jaxlowprec.ops.quantize.api import quantize


@dataclasses.dataclass(frozen=True)
class _Channels(Scheme):
    """The common part.

    Arguments:
        activations, input_scale: see `Float8PerTensor`.
        scale_dtype: "bfloat16", "float16" or "float32"; None: the weight's dtype, as in compressed-tensors. To store
            arrays that were loaded in another dtype, give that of the file.
    """

    activations: Activations = "dynamic"
    input_scale: float = 1.0
    scale_dtype: str | None = None

    required: ClassVar[tuple[str, ...]] = ("weight", "weight_scale")
    optional: ClassVar[tuple[str, ...]] = ("input_scale",)
    family: ClassVar[str | None] = "compressed-tensors"
    has_format: ClassVar[bool] = False
    scale_dtypes: ClassVar[tuple[str, ...]] = FLOATS
    also_shaped = {"input_scale": ((),)}  # noqa: RUF012
    also_read = {"weight_scale": FLOATS, "input_scale": FLOATS}  # noqa: RUF012
    codes: ClassVar[str]
    """The dtype of codes."""

    def __post_init__(self):
        check_activations(self.name, self.activations)
        if self.scale_dtype not in (None, *FLOATS):
            raise ValueError(f"{self.name}: scale_dtype={self.scale_dtype!r}; needs {' or '.join(FLOATS)}, or None")

    @abc.abstractmethod
    def _format(self, scale_dtype: str) -> Format:
        """The format with scales of a dtype."""

    @abc.abstractmethod
    def _numbers(self, codes: np.ndarray) -> np.ndarray:
        """Codes as float32 numbers; the result may be overwritten."""

    @property
    def format(self) -> Format:
        """Float8Rows or Int8Rows with scales of `scale_dtype`, or of a bfloat16 weight."""
        return self._format(self.scale_dtype or "bfloat16")

    def holds(self, q: QuantizedArray) -> bool:
        """See `Scheme`: whatever dtype and rule the scales have."""
        return type(q.format) is type(self.format) and q.format.element == self.format.element

    def check(self, shape: Sequence[int]) -> str | None:
        """See `Scheme`."""
        if len(shape) != 2:
            return f"it has {len(shape)} dimensions; {self.name} holds matrices [N, K]"
        return "it is empty" if 0 in shape else None

    def output_specs(self, shape: Sequence[int], dtype: Any = "bfloat16") -> dict[str, Spec]:
        """See `Scheme`. Scales have the weight's dtype."""
        n, k = shape
        scales = self._scale_dtype(dtype).name, (n, 1)
        specs: dict[str, Spec] = {"weight": (self.codes, (n, k)), "weight_scale": scales}
        return specs if self.activations == "dynamic" else {**specs, "input_scale": ("float32", (1,))}

    def _scale_dtype(self, dtype: Any) -> np.dtype:
        """The dtype of the scales of a weight of this dtype."""
        return as_dtype(self.scale_dtype or dtype)

    def _compress(self, weight: np.ndarray, amax: float | None) -> dict[str, np.ndarray]:
        if amax is not None:
            raise ValueError(f"{self.name}.compress: amax={amax!r}; its scales are those of rows")
        if not all_finite(weight):
            raise ValueError(f"{self.name}.compress: the weight holds NaN or infinity, which no scale can hold")
        fmt = self._format(self._scale_dtype(weight.dtype).name)
        with on_the_cpu():
            made = self._write(quantize(jax.device_put(weight), fmt))
        scale = made["weight_scale"]
        if scale.dtype == np.float32:  # of a row of zeros: theirs, where the format has 1
            made["weight_scale"] = np.where(weight.any(axis=1, keepdims=True), scale, np.finfo(np.float32).eps)
        made["weight"] = self._with_signs(made["weight"], weight)
        return made

    def _with_signs(self, codes: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """The codes of a weight, of zeros with their signs, if codes have them."""
        return codes

    def _shape(self, tensors: Tensors) -> tuple[int, int]:
        return tensors["weight"].shape  # type: ignore[return-value]

    def _decode(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
        values = self._numbers(tensors["weight"])
        values *= tensors["weight_scale"].astype(np.float32)
        return values.astype(dtype, copy=False)

    def _read(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> QuantizedArray:
        data, scale = (as_array(tensors[name]) for name in self.required)
        return QuantizedArray(data, scale, None, None, self._format(scale.dtype.name), shape, dtype, -1, None)

    def _write(self, q: QuantizedArray) -> dict[str, np.ndarray]:
        scale, dtype = np.asarray(q.scale), self._scale_dtype(q.dtype)
        stored = scale.astype(dtype, copy=False)
        if not np.array_equal(stored.astype(np.float32), scale.astype(np.float32)):
            raise ValueError(
                f"{self.name}.store: scales of q are not {dtype.name} numbers; give the scheme "
                f"scale_dtype='{scale.dtype.name}'"
            )
        made = {"weight": np.asarray(q.data), "weight_scale": stored}
        if self.activations == "static":
            made["input_scale"] = np.full((1,), self.input_scale, np.float32)
        return made


@dataclasses.dataclass(frozen=True)
class Float8Channel(_Channels):
    """Compressed-tensors "float-quantized" with one scale per row ("channel")."""

    name: ClassVar[str] = "fp8_channel"
    input_range: ClassVar[float | None] = 448.0
    codes: ClassVar[str] = "float8_e4m3fn"

    def _format(self, scale_dtype: str) -> Format:
        return Float8Rows(scale_dtype=scale_dtype)

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """See `Scheme`."""
        activations = activations_of(FLOAT8, self.activations)
        return config_of("float-quantized", {**FLOAT8, "strategy": "channel"}, ignore, activations)

    def _with_signs(self, codes: np.ndarray, weight: np.ndarray) -> np.ndarray:
        signs = np.signbit(weight).view(np.uint8) << 7
        return (codes.view(np.uint8) | signs).view(codes.dtype)

    def _numbers(self, codes: np.ndarray) -> np.ndarray:
        return E4M3[codes.view(np.uint8)]


@dataclasses.dataclass(frozen=True)
class Int8Channel(_Channels):
    """Compressed-tensors "int-quantized": 8-bit integers with one scale per row ("channel")."""

    name: ClassVar[str] = "int8_channel"
    optional: ClassVar[tuple[str, ...]] = ("input_scale", "input_zero_point")
    input_range: ClassVar[float | None] = 127.5
    codes: ClassVar[str] = "int8"

    def _format(self, scale_dtype: str) -> Format:
        return Int8Rows(scale_dtype, "compressed-tensors")

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """See `Scheme`."""
        common = {"num_bits": 8, "type": "int", "symmetric": True}
        activations = activations_of(common, self.activations)
        return config_of("int-quantized", {**common, "strategy": "channel"}, ignore, activations)

    def _numbers(self, codes: np.ndarray) -> np.ndarray:
        return codes.astype(np.float32)
