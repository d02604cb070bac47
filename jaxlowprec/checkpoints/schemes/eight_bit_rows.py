"""Eight bits with one scale per row of the weight: compressed-tensors "float-quantized" and "int-quantized" (W8A8).

    w = code * scale       in float32, rounded once

An engine scales each token at run time, or by the module's `input_scale`. compressed-tensors' rule of quantising:

    scale = RNE_dtype(amax of the row / (448 or 127.5)), in the weight's dtype; the dtype's epsilon where that is 0
    code  = RNE(clamp(fl(w / scale)))                    in float32

Its kernels divide in float32, as here. Its other path, on CPUs, rounds the quotient to the weight's dtype too.
Source: compressed-tensors 0.20.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxlowprec.arguments import as_array
from jaxlowprec.arrays.formats import Float8Block, Float8Tensor, Format
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.files.dtypes import all_finite
from jaxlowprec.checkpoints.schemes.base import FLOATS, Scheme, Spec, Tensors, as_dtype, on_the_cpu
from jaxlowprec.checkpoints.schemes.codes import E4M3
from jaxlowprec.checkpoints.schemes.compressed_tensors import config_of
from jaxlowprec.checkpoints.schemes.eight_bit_tensors import FLOAT8, Activations, activations_of, check_activations
from jaxlowprec.ops.quantize.api import quantize

_AT_ONCE = 1 << 22  # elements


@dataclasses.dataclass(frozen=True)
class _Rows(Scheme):
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
    def _quantised(self, weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Codes of rows in float32, scaled by [rows, 1]."""

    @abc.abstractmethod
    def _numbers(self, codes: np.ndarray) -> np.ndarray:
        """Codes as float32 numbers; the result may be overwritten."""

    @property
    @abc.abstractmethod
    def _half_range(self) -> float:
        """The divisor of a row's amax."""

    @property
    def format(self) -> Format:
        """Raises ValueError: no format of this library quantises by rows."""
        raise ValueError(f"{self.name}.format: no format of this library quantises by rows; use `compress`")

    @property
    def has_tensor_scale(self) -> bool:
        """See `Scheme`."""
        return False

    def check(self, shape: Sequence[int]) -> str | None:
        """See `Scheme`."""
        if len(shape) != 2:
            return f"it has {len(shape)} dimensions; {self.name} holds matrices [N, K]"
        return "it is empty" if 0 in shape else None

    def compute_dtype(self, dtype: np.dtype) -> np.dtype:
        """See `Scheme`."""
        return dtype

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
        n, k = weight.shape
        dtype = self._scale_dtype(weight.dtype)
        scale = np.empty((n, 1), dtype)
        codes = np.empty((n, k), as_dtype(self.codes))
        step = max(1, _AT_ONCE // k)
        for begin in range(0, n, step):
            rows = slice(begin, begin + step)
            part = weight[rows].astype(np.float32)
            largest = np.abs(part).max(axis=1, keepdims=True)
            found = (largest / np.float32(self._half_range)).astype(dtype)
            found[found == 0] = ml_dtypes.finfo(dtype).eps
            scale[rows] = found
            codes[rows] = self._quantised(part, found.astype(np.float32))
        return self._with_input_scale({"weight": codes, "weight_scale": scale})

    def _with_input_scale(self, made: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self.activations == "static":
            made["input_scale"] = np.full((1,), self.input_scale, np.float32)
        return made

    def _shape(self, tensors: Tensors) -> tuple[int, int]:
        return tensors["weight"].shape  # type: ignore[return-value]

    def _decode(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
        values = self._numbers(tensors["weight"])
        values *= tensors["weight_scale"].astype(np.float32)
        return values.astype(dtype, copy=False)


@dataclasses.dataclass(frozen=True)
class Float8Rows(_Rows):
    """Compressed-tensors "float-quantized" with one scale per row ("channel").

    `load` gives Float8Block arrays in blocks of 1x128 that all have the scale of their row; `store` takes such arrays.
    """

    name: ClassVar[str] = "fp8_channel"
    input_range: ClassVar[float | None] = 448.0
    codes: ClassVar[str] = "float8_e4m3fn"

    @property
    def held(self) -> Format:
        """Float8Block E4M3 in blocks of 1x128."""
        return Float8Block(power_of_two=False)

    @property
    def _half_range(self) -> float:
        return 448.0

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """See `Scheme`."""
        activations = activations_of(FLOAT8, self.activations)
        return config_of("float-quantized", {**FLOAT8, "strategy": "channel"}, ignore, activations)

    def _quantised(self, weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
        weight /= scale
        with on_the_cpu():  # the kernel rounds and saturates as numpy casts what is clipped, several times faster
            codes = np.asarray(quantize(jax.device_put(weight), Float8Tensor(), encode_scale=jnp.float32(1)).data)
        negative = (weight.view(np.uint32) >> 24).astype(np.uint8) & 0x80  # numpy's zeros have a sign
        return (codes.view(np.uint8) | negative).view(codes.dtype)

    def _numbers(self, codes: np.ndarray) -> np.ndarray:
        return E4M3[codes.view(np.uint8)]

    def _read(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> QuantizedArray:
        scale = np.repeat(tensors["weight_scale"].astype(np.float32), -(-shape[1] // self.held.length), axis=1)
        data = as_array(tensors["weight"])
        return QuantizedArray(data, as_array(scale), None, None, self.held, shape, dtype, -1, None)

    def _write(self, q: QuantizedArray) -> dict[str, np.ndarray]:
        scale = np.asarray(q.scale)
        if (scale != scale[:, :1]).any():
            raise ValueError(
                f"{self.name}.store: blocks of one row of q have different scales, and the file has one for the row; "
                "decode q and use `compress`"
            )
        dtype = self._scale_dtype(q.dtype)
        stored = scale[:, :1].astype(dtype)
        if not np.array_equal(stored.astype(np.float32), scale[:, :1]):
            raise ValueError(
                f"{self.name}.store: scales of q are not {dtype.name} numbers; give the scheme scale_dtype='float32'"
            )
        return self._with_input_scale({"weight": np.asarray(q.data), "weight_scale": stored})


@dataclasses.dataclass(frozen=True)
class Int8Rows(_Rows):
    """Compressed-tensors "int-quantized": 8-bit integers with one scale per row ("channel").

    No element of this library's formats holds all integers from -128 to 127, so such weights are compressed and
    decompressed, and not loaded.
    """

    name: ClassVar[str] = "int8_channel"
    optional: ClassVar[tuple[str, ...]] = ("input_scale", "input_zero_point")
    input_range: ClassVar[float | None] = 127.5
    codes: ClassVar[str] = "int8"

    @property
    def held(self) -> Format:
        """Raises ValueError: no format of this library has codes of 8-bit integers."""
        raise ValueError(self._not_loadable("held"))

    @property
    def _half_range(self) -> float:
        return 127.5

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """See `Scheme`."""
        common = {"num_bits": 8, "type": "int", "symmetric": True}
        activations = activations_of(common, self.activations)
        return config_of("int-quantized", {**common, "strategy": "channel"}, ignore, activations)

    def _quantised(self, weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
        weight /= scale
        return np.rint(np.clip(weight, -128, 127, out=weight), out=weight).astype(np.int8)

    def _numbers(self, codes: np.ndarray) -> np.ndarray:
        return codes.astype(np.float32)

    def store(self, q: QuantizedArray) -> dict[str, np.ndarray]:
        """Raises ValueError, as `held`."""
        raise ValueError(self._not_loadable("store"))

    def holds(self, q: QuantizedArray) -> bool:
        """See `Scheme`: never."""
        return False

    def _read(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> QuantizedArray:
        raise ValueError(self._not_loadable("load"))

    def _write(self, q: QuantizedArray) -> dict[str, np.ndarray]:
        raise ValueError(self._not_loadable("store"))

    def _not_loadable(self, verb: str) -> str:
        return (
            f"{self.name}.{verb}: no format of this library has codes of 8-bit integers; run `jaxlowprec dequantize`, "
            "load the result and quantise it, for example to Int4() or MXFP8(), schemes w4a16 and mxfp8"
        )
