"""Arrays that hold all experts of a layer, as the matrices [N, K] of single experts.

    mlp.experts.gate_up_proj  [E, 2I, H] or [E, H, 2I]   ->  mlp.experts.<e>.gate_proj [I, H], .up_proj [I, H]
    mlp.experts.down_proj     [E, H, I] or [E, I, H]     ->  mlp.experts.<e>.down_proj [H, I]

The model type of the config says which order the axes have; the array does not. Single experts have the names under
which engines read quantised experts. Source: transformers 5.23, the models' modules and conversion_mapping.py.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxlowprec.checkpoints.files.config import text_configs
from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from jaxlowprec.checkpoints.files.safetensors_header import TensorSpec

ARRAY = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")

_OUT_IN = (
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "gemma4",
    "gemma4_text",
    # transformers writes these with save_original_format=False; otherwise a tensor for each expert
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "qwen3_moe",
)
_IN_OUT = ("llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text")
_MOST_EXPERTS = 1 << 14

GPT_OSS = ("gpt_oss", "openai_privacy_filter")
"""Model types whose arrays [E, in, out] have gate and up in turns, with biases: only `gpt_oss_mxfp4` holds them."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of an array of all experts.

    Attributes:
        expert: the index of its first axis.
        begin, end: the rows of the matrix [N, K] of that expert.
        transposed: whether the array has [K, N].
    """

    expert: int
    begin: int
    end: int
    transposed: bool

    def of(self, matrix: np.ndarray) -> np.ndarray:
        """The part as a matrix [N, K], from the expert's own matrix in the array."""
        return np.ascontiguousarray((matrix.T if self.transposed else matrix)[self.begin : self.end])


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight of a checkpoint in high precision: a tensor, or the part of an array that is one expert's.

    Attributes:
        module: the name of its module.
        tensor: the tensor that holds it.
        spec: its dtype and shape.
        part: which part of the tensor it is; None: all of it.
    """

    module: str
    tensor: str
    spec: TensorSpec
    part: Part | None = None

    def read(self, source: CheckpointFolder) -> np.ndarray:
        """The weight. Of an array only the expert's matrix is read."""
        if self.part is None:
            return source.read(self.tensor)
        return self.part.of(source.file_of(self.tensor).read_at(self.tensor, self.part.expert))

    def experts(self, source: CheckpointFolder) -> Iterator[np.ndarray]:
        """Of a whole array, the experts' matrices one after the other, as the array has them."""
        file = source.file_of(self.tensor)
        return (file.read_at(self.tensor, expert) for expert in range(self.spec.shape[0]))


def model_types(config: dict[str, Any]) -> list[str]:
    """The model types that a config names: its own, and those of text models nested in it."""
    found = [place.get("model_type") for place in text_configs(config)]
    return [kind for kind in found if isinstance(kind, str)]


def is_transposed(config: dict[str, Any]) -> bool | None:
    """Whether a model's arrays are [E, in, out]; None if its type is not known."""
    for kind in model_types(config):
        if kind in (*_OUT_IN, *_IN_OUT):
            return kind in _IN_OUT
    return None


def weights_of(name: str, spec: TensorSpec, transposed: bool) -> dict[str, Weight] | None:
    """The matrices of an array by their modules' names; None if it is not such an array."""
    match = ARRAY.fullmatch(name)
    if match is None or len(spec.shape) != 3 or 0 in spec.shape or spec.shape[0] > _MOST_EXPERTS:
        return None
    count, n, k = (spec.shape[0], *(spec.shape[:0:-1] if transposed else spec.shape[1:]))
    if match[2] == "down_proj":
        rows = {"down_proj": (0, n)}
    elif n % 2:
        return None
    else:
        rows = {"gate_proj": (0, n // 2), "up_proj": (n // 2, n)}
    found = {}
    for expert in range(count):
        for last, (begin, end) in rows.items():
            module = f"{match[1]}.{expert}.{last}"
            own = TensorSpec(spec.dtype, (end - begin, k))
            found[module] = Weight(module, name, own, Part(expert, begin, end, transposed))
    return found


class SingleWeights:
    """The tensors of a checkpoint, in which arrays of all experts are the matrices of single experts.

    Attributes:
        names: of all tensors.
    """

    def __init__(self, source: CheckpointFolder):
        self._source = source
        self._parts = {f"{module}.weight": weight for module, weight in weights_in(source, source.config()).items()}
        arrays = {weight.tensor for weight in self._parts.values()}
        self.names = [*(name for name in source.shard_of if name not in arrays), *self._parts]

    def read(self, name: str) -> np.ndarray:
        """A tensor by its name."""
        return self._parts[name].read(self._source) if name in self._parts else self._source.read(name)


def weights_in(source: CheckpointFolder, config: dict[str, Any]) -> dict[str, Weight]:
    """The matrices of all arrays of a checkpoint, by their modules' names; none if the model's type is not known."""
    transposed = is_transposed(config)
    found: dict[str, Weight] = {}
    if transposed is not None:
        for name in source.shard_of:
            found |= weights_of(name, source.spec(name), transposed) or {}
    return found
