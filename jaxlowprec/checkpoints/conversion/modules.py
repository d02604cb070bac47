"""Modules of a checkpoint: tensors grouped by their names, and arrays of experts as the matrices [N, K] of single ones.

    mlp.experts.gate_up_proj  [E, 2I, H] or [E, H, 2I]   ->  mlp.experts.<e>.gate_proj [I, H], .up_proj [I, H]
    mlp.experts.down_proj     [E, H, I] or [E, I, H]     ->  mlp.experts.<e>.down_proj [H, I]

The model type of the config says which order the axes have; the array does not. Single experts have the names under
which engines read quantised experts. Source: transformers 5.23, the models' modules and conversion_mapping.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.config import quantization_of, text_configs
from jaxlowprec.checkpoints.files.dtypes import QUANTISED, all_finite, amax, limit, numpy_dtype
from jaxlowprec.checkpoints.files.folder import CONFIG_FILE, CheckpointFolder
from jaxlowprec.checkpoints.files.safetensors_header import TensorSpec
from jaxlowprec.checkpoints.files.written_whole import read_json_object
from jaxlowprec.checkpoints.schemes import Scheme, from_config

MODELOPT_FILE = "hf_quant_config.json"
GPTQ_FILE = "quantize_config.json"  # of tools that leave config.json as it was
"""The files beside config.json in which older ModelOpt and GPTQ tools say how weights are quantised."""

_PLAIN = ("weight", "bias")
_SHAPE_BYTES = 64  # the most that a tensor holding a shape takes
_CODES_OR_SCALES = re.compile(
    r".*(\.(weight_packed|weight_scale|weight_scale_inv|weight_scale_2|weight_zero_point|qweight|qzeros)|_blocks|_scale_inv)"
)
_LISTED = 8

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
class QuantisedModule:
    """A module held in a scheme's format.

    Attributes:
        name: the module's name.
        scheme: the format, with the dtype of the module's scales, which the config does not say.
        tensors: full tensor names by their last parts.
    """

    name: str
    scheme: Scheme
    tensors: Mapping[str, str]

    def read(self, source: CheckpointFolder) -> dict[str, np.ndarray]:
        """The module's tensors, by the last parts of their names."""
        return {last: source.read(name) for last, name in self.tensors.items()}

    @property
    def weight_name(self) -> str:
        """The name of the tensor that holds the weight in high precision."""
        return self.scheme.weight_name(self.name)

    def shape(self, source: CheckpointFolder) -> tuple[int, ...]:
        """The weight's, [N, K]. Raises CheckpointError unless the tensors fit the scheme."""
        with naming(source, self.name):
            return self.scheme.shape_of({last: _announced(source, name) for last, name in self.tensors.items()})

    def decode(self, source: CheckpointFolder, dtype: str) -> np.ndarray:
        """The weight [N, K], infinite where its codes and scales decode to infinity in this dtype.

        Raises:
            CheckpointError: as `shape`, and for scales that no weight can have.
        """
        return self._decoded(source, self.read(source), dtype)

    def decode_finite(self, source: CheckpointFolder, dtype: str) -> np.ndarray:
        """`decode` that raises CheckpointError if the weight is not finite."""
        return self._finite(source, self.read(source), dtype)

    def experts_finite(self, source: CheckpointFolder, dtype: str) -> Iterator[np.ndarray]:
        """`decode_finite` of an array of all experts: [1, ...] of each expert, one in memory at a time."""
        return (self._finite(source, tensors, dtype) for tensors in self._experts(source))

    def experts(self, source: CheckpointFolder, dtype: str) -> Iterator[np.ndarray]:
        """`decode` of an array of all experts: [1, ...] of each expert, one in memory at a time."""
        return (self._decoded(source, tensors, dtype) for tensors in self._experts(source))

    def _experts(self, source: CheckpointFolder) -> Iterator[dict[str, np.ndarray]]:
        for expert in range(self.shape(source)[0]):
            yield {part: source.file_of(name).read_at(name, expert)[None] for part, name in self.tensors.items()}

    def _decoded(self, source: CheckpointFolder, tensors: Mapping[str, np.ndarray], dtype: str) -> np.ndarray:
        with naming(source, self.name), np.errstate(over="ignore", invalid="ignore"):
            return self.scheme.decompress(tensors, dtype)

    def _finite(self, source: CheckpointFolder, tensors: Mapping[str, np.ndarray], dtype: str) -> np.ndarray:
        decoded = self._decoded(source, tensors, dtype)
        if not all_finite(decoded):
            where, largest = f"{source.path}: module {self.name!r}", amax(self._decoded(source, tensors, "float32"))
            if not np.isfinite(largest):
                raise CheckpointError(f"{where}: its codes and scales stand for infinity or NaN where engines compute")
            raise CheckpointError(
                f"{where}: its numbers reach {largest:.6g}, but {dtype} ends at {limit(decoded.dtype):.6g}; "
                "choose a dtype of larger numbers (--dtype float32)"
            )
        return decoded

    def nbytes(self, source: CheckpointFolder) -> int:
        """Bytes of all tensors of the module."""
        return sum(source.spec(name).nbytes for name in self.tensors.values())


def _announced(source: CheckpointFolder, name: str) -> np.ndarray:
    """A tensor with the right dtype and shape; its bytes are read only if it is short enough to hold a shape."""
    spec = source.spec(name)
    dtype = numpy_dtype(spec.dtype)
    if dtype is None or spec.nbytes <= _SHAPE_BYTES:
        return source.read(name)
    return np.broadcast_to(np.zeros((), dtype), spec.shape)


@contextlib.contextmanager
def naming(source: CheckpointFolder, module: str) -> Iterator[None]:
    """Adds the name of the module to a scheme's error."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"{source.path}: module {module!r}: {error}") from None


def scheme_of(source: CheckpointFolder) -> Scheme:
    """The scheme that a checkpoint's config names. Raises CheckpointError if it names none that is supported."""
    file = CONFIG_FILE
    config = source.config()
    if quantization_of(config) is None and (source.path / MODELOPT_FILE).is_file():
        file, config = MODELOPT_FILE, read_json_object(source.path / MODELOPT_FILE)
    elif quantization_of(config) is None and (source.path / GPTQ_FILE).is_file():
        file, config = GPTQ_FILE, {"quant_method": "gptq", **read_json_object(source.path / GPTQ_FILE)}
    if file == CONFIG_FILE and quantization_of(config) is None:
        raise CheckpointError(
            f"{source.path / file}: has no quantization_config, so the weights are not quantised; nothing to decode"
        )
    try:
        return from_config(config)
    except ValueError as error:
        raise CheckpointError(f"{source.path / file}: {error}") from None


def is_quantised(source: CheckpointFolder) -> bool:
    """Whether a checkpoint's configuration says that it is quantised."""
    if not (source.path / CONFIG_FILE).exists():
        return False
    others = any((source.path / name).is_file() for name in (MODELOPT_FILE, GPTQ_FILE))
    return bool(quantization_of(source.config())) or others


def quantised_modules(source: CheckpointFolder, scheme: Scheme) -> dict[str, QuantisedModule]:
    """The modules held in a scheme's format, by their names; of a `Mixed`, each in its own scheme.

    Raises:
        CheckpointError: a module has some of the format's tensors, and lacks others; or no target names it.
    """
    known = {*scheme.required, *scheme.optional}
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name in source.shard_of:
        module, _, last = name.rpartition(scheme.joint)
        if last in known:
            found[module][last] = name
    modules = {}
    for module, tensors in found.items():
        if not set(tensors) - set(_PLAIN):
            continue  # in high precision
        if not module:
            listed = ", ".join(repr(name) for name in tensors.values())
            raise CheckpointError(f"{source.path}: {listed} belong to a module without a name, which no model has")
        own = _own_scheme(source, scheme, module, tensors)
        if missing := [last for last in own.required if last not in tensors]:
            raise CheckpointError(
                f"{source.path}: module {module!r} has {', '.join(sorted(tensors))}; {own.name} also needs "
                f"{', '.join(missing)}"
            )
        dtypes = {last: numpy_dtype(source.spec(name).dtype) for last, name in tensors.items()}
        stored = own.as_stored({last: dtype.name for last, dtype in dtypes.items() if dtype})
        modules[module] = QuantisedModule(module, stored, tensors)
    return modules


def holds_codes(name: str, spec: TensorSpec) -> bool:
    """Whether a tensor, by its name and dtype, holds codes or scales of a quantised weight.

    >>> [holds_codes("up.weight", TensorSpec(dtype, (8, 8))) for dtype in ("BF16", "I8", "F8_E4M3")]
    [False, True, True]
    """
    last = name.rpartition(".")[2]
    mask = spec.dtype == "U8" and (last == "bias" or "mask" in last)  # GPT-2's files have attn.bias, a causal mask
    of_eight_bits = spec.dtype in (*QUANTISED, "I8", "U8") and not mask
    return of_eight_bits or bool(_CODES_OR_SCALES.fullmatch(name))


def require_no_other_codes(source: CheckpointFolder, scheme: Scheme, modules: Mapping[str, QuantisedModule]) -> None:
    """Raises CheckpointError if a tensor of none of the modules holds codes or scales: it would pass for a weight."""
    known = {name: source.spec(name) for held in modules.values() for name in held.tensors.values()}
    packed = any(_words(spec) for spec in known.values())
    for name in source.shard_of:
        spec = source.spec(name)
        if name in known or not (holds_codes(name, spec) or (packed and _words(spec))):
            continue
        module = name.rpartition(".")[0]
        own = _own_scheme(source, scheme, module, [name.rpartition(".")[2]])
        tensors = sorted(other for other in source.shard_of if other.rpartition(".")[0] == module)
        more = f" and {len(tensors) - _LISTED} more" if len(tensors) > _LISTED else ""
        listed = ", ".join(_described(source, tensor) for tensor in tensors[:_LISTED])
        raise CheckpointError(
            f"{source.path}: module {module!r} has {listed}{more}; a weight in {own.name} consists of "
            f"{' and '.join(own.required)}: give its tensors these names, or take {name!r} out"
        )


def _words(spec: TensorSpec) -> bool:
    """Whether a tensor may be a matrix of INT4's words, of eight codes each."""
    return spec.dtype == "I32" and len(spec.shape) > 1


def _described(source: CheckpointFolder, name: str) -> str:
    spec = source.spec(name)
    return f"{name.rpartition('.')[2]} ({spec.dtype} {list(spec.shape)})"


def _own_scheme(source: CheckpointFolder, scheme: Scheme, module: str, tensors: Iterable[str]) -> Scheme:
    own = scheme.of_module(module)
    if own is None:
        why = scheme.why_no_scheme(module)
        raise CheckpointError(
            f"{source.path / CONFIG_FILE}: module {module!r} holds {', '.join(sorted(tensors))}, but {why}; add it to "
            "the targets of a group"
        )
    return own


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
        """The experts' matrices of a whole array, one after the other, as the array has them."""
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
