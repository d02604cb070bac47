"""FP8 in tiles of 128x128: compressed-tensors "float-quantized" and DeepSeek's own files.

    w = e4m3 * scale       in float32, rounded once

Weights are stored without padding; the last tiles may be partly filled. Source: int4_qat.md 2.4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from jaxlowprec.arguments import as_array
from jaxlowprec.arrays.formats import Float8Block, Format
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.schemes.base import Scheme, Spec, Tensors
from jaxlowprec.checkpoints.schemes.codes import E4M3
from jaxlowprec.checkpoints.schemes.compressed_tensors import config_of

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
