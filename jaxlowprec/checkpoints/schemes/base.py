"""The interface of a published format of quantised weights."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxlowprec.arguments import shown
from jaxlowprec.arrays.formats import Format
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.dtypes import all_finite, amax, limit
from jaxlowprec.ops.quantize.api import quantize
from jaxlowprec.wiring import native

Tensors = Mapping[str, np.ndarray]
"""The tensors of one module, by the last part of their names: "weight_packed", "weight_scale" and so on."""

Spec = tuple[str, tuple[int, ...]]
"""The name of a dtype, and a shape."""

FLOATS = ("bfloat16", "float16", "float32")

_MOST_THAT_ROUNDING_ADDS = 4  # a factor: a range is at most twice the amax, and rounding at most doubles a scale


@dataclasses.dataclass(frozen=True)
class Scheme(abc.ABC):
    """One published format of a weight [N, K], the matrix that a Hugging Face checkpoint calls `<module>.weight`.

    `store` is the inverse of `load`: no number is quantised again.

    Attributes:
        name: what `schemes.by_name` calls it.
        required: names of a module's tensors, by their last parts.
        optional: tensors that `load` accepts but does not need.
        shares_global_scale: whether projections that an engine fuses (q, k and v; gate and up) must be compressed with
            one `amax`, the largest of them.
        scale_dtypes: dtypes that scales may have, for schemes with a `scale_dtype` of their own.
        regex_ignores: whether `quantization_config` can name modules by regular expressions ("re:...").
        family: the `quant_method` whose configurations can name several schemes; None: only one.
        has_format: whether `compress(w)` is `store(quantize(w, format))`, whatever the dtype of w.
        of_expert_arrays: whether weights are arrays that hold all experts of a layer, instead of matrices.
        joint: what stands between a module's name and the last part of a tensor's.
        scalars: required tensors whose shape may be [].
        also_shaped: other shapes that `load` accepts for a tensor.
        repacked: whether engines hold weights in an order of their kernels, which they have to undo before they load
            others.
    """

    name: ClassVar[str]
    required: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()
    shares_global_scale: ClassVar[bool] = False
    scale_dtypes: ClassVar[tuple[str, ...]] = ()
    regex_ignores: ClassVar[bool] = True
    family: ClassVar[str | None] = None
    has_format: ClassVar[bool] = True
    of_expert_arrays: ClassVar[bool] = False
    joint: ClassVar[str] = "."
    scalars: ClassVar[tuple[str, ...]] = ()
    also_shaped: ClassVar[Mapping[str, tuple[tuple[int, ...], ...]]] = {}
    repacked: ClassVar[bool] = False
    also_read: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Other dtypes that `load` accepts for a tensor."""
    input_range: ClassVar[float | None] = None
    """The divisor of the largest activation that gives its `input_scale`, in schemes that have one."""

    @property
    @abc.abstractmethod
    def format(self) -> Format:
        """The format that weights are quantised to."""

    @property
    def held(self) -> Format:
        """The format of the arrays that `load` gives and `store` takes."""
        return self.format

    @abc.abstractmethod
    def output_specs(self, shape: Sequence[int], dtype: Any = "bfloat16") -> dict[str, Spec]:
        """Dtype and shape of each tensor that `compress` makes of a weight. Nothing is computed.

        Arguments:
            shape: the weight's, [N, K].
            dtype: the weight's.
        """

    @abc.abstractmethod
    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """The value of `quantization_config` in a checkpoint's config.json.

        Arguments:
            ignore: modules left in high precision: names, or "re:" and a regular expression.
        """

    @abc.abstractmethod
    def _shape(self, tensors: Tensors) -> tuple[int, int]:
        """[N, K], as far as the tensors show it."""

    @abc.abstractmethod
    def _decode(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
        """Decodes the weight [N, K] and rounds it to a dtype."""

    @abc.abstractmethod
    def _read(self, tensors: Tensors, shape: tuple[int, int], dtype: np.dtype) -> QuantizedArray:
        """Makes a QuantizedArray of tensors that were checked."""

    @abc.abstractmethod
    def _write(self, q: QuantizedArray) -> dict[str, np.ndarray]:
        """The inverse of `_read`."""

    @property
    def has_tensor_scale(self) -> bool:
        """Whether the amax of a whole weight is needed before its elements can be cast."""
        return self.format.has_tensor_scale

    def of_module(self, module: str) -> Scheme | None:
        """The scheme of one module: this one, unless a configuration names several (`Mixed`). None: no scheme."""
        return self

    def why_no_scheme(self, module: str) -> str:
        """A sentence about a module for which `of_module` gives None."""
        return f"{self.name} is not for {module}"

    def of_shape(self, shape: Sequence[int]) -> Scheme:
        """The scheme for weights of one shape: this one, unless its groups are whole rows (`group_size=-1`)."""
        return self

    @property
    def has_static_inputs(self) -> bool:
        """Whether files have a scale of activations that calibration finds."""
        return self.input_range is not None and getattr(self, "activations", "static") == "static"

    def of_inputs(self, amax: float) -> Scheme:
        """The scheme with the static scale of activations whose largest magnitude is this one, if it has such a scale.

        Activations that are all zero keep the scale 1.
        """
        if not self.has_static_inputs or not amax or self.input_range is None:
            return self
        return dataclasses.replace(self, input_scale=float(np.float32(amax / self.input_range)))  # type: ignore[call-arg]

    def weight_name(self, module: str) -> str:
        """The name of the tensor that holds a module's weight in high precision."""
        return f"{module}.weight"

    def module_of(self, weight: str) -> str:
        """The module of a weight's name: the inverse of `weight_name`, whatever the last part of the name is."""
        return weight.rpartition(".")[0]

    def check(self, shape: Sequence[int]) -> str | None:
        """Why a weight of this shape does not fit the format; None if it fits."""
        if len(shape) != 2:
            return f"it has {len(shape)} dimensions; {self.name} holds matrices [N, K]"
        if 0 in shape:
            return "it is empty"
        length = self.format.length
        if not self.format.tiles and shape[1] % length:
            return f"its {shape[1]} columns are not a multiple of the {length} that share a scale"
        return None

    def compress(self, weight: np.ndarray, *, amax: float | None = None) -> dict[str, np.ndarray]:
        """Quantises a weight with `jaxlowprec.quantize` on the CPU: the bytes are the same on every machine.

        Arguments:
            weight: [N, K], bfloat16, float16 or float32.
            amax: the magnitude to scale by, for formats with a scale per tensor, where several weights must share it.

        Raises:
            TypeError: another dtype.
            ValueError: a shape that does not fit (`check`), NaN or infinity, or numbers so close to the largest of
                their dtype that they would be rounded to infinity.
        """
        weight = np.asarray(weight)
        if weight.dtype.name not in FLOATS:
            raise TypeError(f"{self.name}.compress: weight has dtype {weight.dtype}; needs {' or '.join(FLOATS)}")
        self._require(weight.shape, "compress")
        made = self._compress(weight, amax)
        self._require_finite(made, weight)
        return made

    def _compress(self, weight: np.ndarray, amax: float | None) -> dict[str, np.ndarray]:
        """Quantises a weight whose dtype and shape were checked."""
        with on_the_cpu():
            given = None if amax is None else jnp.float32(amax)
            x = jax.device_put(weight)  # uses the same memory if it is aligned; jnp.asarray would copy it
            return self.store(quantize(x, self.of_shape(weight.shape).format, amax=given))

    def shape_of(self, tensors: Tensors) -> tuple[int, int]:
        """Checks the tensors; returns [N, K] of the weight that they hold. Raises ValueError as `decompress` does."""
        return self._checked(tensors, "shape_of")

    def decompress(self, tensors: Tensors, dtype: Any = "bfloat16") -> np.ndarray:
        """The weight [N, K] as a reader of the published format computes it.

        Raises:
            ValueError: tensors that are missing, unexpected, or of other dtypes and shapes than the format has.
        """
        target = as_dtype(dtype)
        if target.name not in FLOATS:
            raise TypeError(f"{self.name}.decompress: dtype={target.name}; needs {' or '.join(FLOATS)}")
        shape = self._checked(tensors, "decompress")
        return self.of_shape(shape)._decode(tensors, shape, target)

    def load(self, tensors: Tensors, dtype: Any = "bfloat16") -> QuantizedArray:
        """The tensors as a QuantizedArray [N, K] with `axis=-1`; codes and scales stay as they are.

        Arguments:
            tensors: the tensors of one module.
            dtype: what the result dequantises to by default.

        Raises:
            ValueError: as in `decompress`.
        """
        shape = self._checked(tensors, "load")
        return self.of_shape(shape)._read(tensors, shape, as_dtype(dtype))

    def as_stored(self, dtypes: Mapping[str, str]) -> Scheme:
        """The scheme with the scale dtype that a module's tensors have, if supported; no configuration names it.

        Arguments:
            dtypes: names of the tensors' dtypes, by the last part of the tensors' names.
        """
        dtype = next((dtypes[name] for name in ("weight_scale", "weight_scale_inv", "scales") if name in dtypes), None)
        if dtype not in self.scale_dtypes or dtype == getattr(self, "scale_dtype", dtype):
            return self
        return dataclasses.replace(self, scale_dtype=dtype)  # type: ignore[call-arg]

    def store(self, q: QuantizedArray) -> dict[str, np.ndarray]:
        """The inverse of `load`.

        Raises:
            TypeError: q is not a QuantizedArray.
            ValueError: q has another format, orientation or shape, or holds NaN.
        """
        who = f"{self.name}.store"
        if not isinstance(q, QuantizedArray):
            raise TypeError(f"{who}: q is a {type(q).__name__}; needs a QuantizedArray")
        if q.axis != -1:
            raise ValueError(f"{who}: q, of shape {q.shape}, is quantised along axis -2; pass q.mT, which is [N, K]")
        fixed = self.of_shape(q.shape)
        if not fixed.holds(q):
            raise ValueError(f"{who}: q has format {q.format!r}; needs {fixed.held!r}")
        if q.hadamard is not None:
            raise ValueError(f"{who}: q is rotated by {q.hadamard}, which this format cannot say; quantise without it")
        self._require(q.shape, "store")
        if not _all_finite(np.asarray(q.scale)):
            raise ValueError(
                f"{who}: a scale of q is not finite: the weight held NaN or infinity, or its dtype's limit"
            )
        return fixed._write(q)

    def holds(self, q: QuantizedArray) -> bool:
        """Whether codes and scales of an array have this scheme's layout, however they were chosen."""
        layout = operator.attrgetter("element", "block", "scale_dtype", "has_zero_point", "row_scaled")
        own = self.of_shape(q.shape).held
        return type(q.format) is type(own) and layout(q.format) == layout(own)

    def compute_dtype(self, dtype: np.dtype) -> np.dtype:
        """The dtype that engines decode a weight to: for INT4 that of its scales, otherwise the weight's own."""
        return dtype if self.format.served_dtype is None else as_dtype(self.format.served_dtype)

    def _require_finite(self, made: Tensors, weight: np.ndarray) -> None:
        """Raises ValueError if a weight is not finite, or decodes to infinity in the dtype that engines compute in."""
        dtype, largest = self.compute_dtype(weight.dtype), amax(weight)
        if not np.isfinite(largest):
            raise ValueError(f"{self.name}.compress: the weight is not finite: it holds NaN or infinity")
        if largest <= limit(dtype) / _MOST_THAT_ROUNDING_ADDS:
            return
        with np.errstate(over="ignore", invalid="ignore"):
            decoded = self.decompress(made, dtype)
        if not all_finite(decoded):
            raise ValueError(
                f"{self.name}.compress: the weight's largest magnitude, {largest:.6g}, is rounded to infinity in "
                f"{dtype.name}, which ends at {limit(dtype):.6g}; leave it in high precision, or choose a scheme or "
                "scale_dtype of larger numbers"
            )

    def _refuse_regexes(self, ignore: Sequence[str]) -> None:
        if regexes := [rule for rule in ignore if rule.startswith("re:")]:
            raise ValueError(
                f"{self.name}.quantization_config: readers do not support regular expressions; name the modules that "
                f"{', '.join(regexes)} stands for"
            )

    def _require(self, shape: Sequence[int], verb: str) -> None:
        if reason := self.check(shape):
            raise ValueError(f"{self.name}.{verb}: cannot hold a weight of shape {tuple(shape)}: {reason}")

    def _checked(self, tensors: Tensors, verb: str) -> tuple[int, int]:
        """[N, K], after comparing the tensors with `output_specs` of that shape."""
        who = f"{self.name}.{verb}"
        if missing := [name for name in self.required if name not in tensors]:
            raise ValueError(f"{who}: tensors {', '.join(missing)} are missing; given: {', '.join(sorted(tensors))}")
        known = (*self.required, *self.optional)
        if unexpected := sorted(set(tensors) - set(known)):
            raise ValueError(f"{who}: unexpected tensors {', '.join(unexpected)}; the format has {', '.join(known)}")
        for name in self.required:
            if tensors[name].ndim == 0 and name not in self.scalars:
                raise ValueError(f"{who}: {name} is a scalar; needs an array")
        shape = self._shape(tensors)
        self._require(shape, verb)
        for name, (dtype, needed) in self.output_specs(shape).items():
            given = tensors.get(name)
            if given is None:
                continue
            dtypes = (dtype, *self.also_read.get(name, ()))
            if given.dtype.name not in dtypes or given.shape not in (needed, *self.also_shaped.get(name, ())):
                raise ValueError(
                    f"{who}: {name} is {given.dtype.name} {list(given.shape)}; needs {' or '.join(dtypes)} "
                    f"{list(needed)} for a weight of shape {list(shape)}"
                )
        return shape


def as_dtype(dtype: Any) -> np.dtype:
    """A numpy dtype; accepts names that numpy lacks, too."""
    return (
        np.dtype(getattr(ml_dtypes, dtype)) if isinstance(dtype, str) and hasattr(ml_dtypes, dtype) else np.dtype(dtype)
    )


def _all_finite(scale: np.ndarray) -> bool:
    if scale.dtype.itemsize > 1:
        return bool(np.isfinite(scale).all())
    table = np.isfinite(np.arange(256, dtype=np.uint8).view(scale.dtype).astype(np.float32))
    return bool(table[scale.view(np.uint8)].all())


def on_the_cpu() -> contextlib.AbstractContextManager[Any]:
    """A context in which JAX puts arrays and work on the CPU, also if there is an accelerator.

    Raises:
        CheckpointError: the platforms that JAX is told to use cannot be started, or the CPU is not among them.
    """
    try:
        if jax.default_backend() == "cpu":
            return contextlib.nullcontext()
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except native.NO_PLATFORM as error:
        raise CheckpointError(
            f"weights are quantised on the CPU: {native.why_no_platform(error)}; unset that, or add cpu to it"
        ) from None


def require_scheme(who: str, scheme: Any, or_none: bool = True) -> None:
    """Raises TypeError unless an argument is a scheme or, where it may be, None."""
    if not (isinstance(scheme, Scheme) or (or_none and scheme is None)):
        needed = f'a scheme, such as checkpoints.schemes.by_name("w4a16"){", or None" if or_none else ""}'
        raise TypeError(f"{who}: scheme={shown(scheme)}; needs {needed}")
