"""The plan of a conversion: every file, tensor and byte is known before anything is computed, and a calibration, which
computes the model (`checkpoints.calibration`), changes only how codes and scales are chosen.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.dtypes import file_dtype
from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from jaxlowprec.checkpoints.files.safetensors_header import TensorSpec
from jaxlowprec.checkpoints.schemes.base import Scheme, as_dtype

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Job:
    """Tensors of an output file that are computed together.

    Attributes:
        module: the module that they belong to; for a copy the tensor's name.
        outputs: the tensors to write.
        source_bytes: the bytes that it reads.
        make: computes the tensors.
        parts: computes them piece by piece along their first axes, in order, one piece in memory at a time. Without it
            and `make` the one tensor is copied, byte for byte, from the tensor of the same name.
        decode: decodes the weight from tensors with the outputs' names, or from the pieces that belong together; set if
            a finite weight must stay finite.
        scheme: of a job that quantises: the format.
        shape: of a job that quantises: the weight's.
        amax: of a job that quantises to a format with a scale per tensor: the magnitude to scale by.
    """

    module: str
    outputs: Mapping[str, TensorSpec]
    source_bytes: int
    make: Callable[[], Arrays] | None = None
    decode: Callable[[Arrays], np.ndarray] | None = None
    scheme: Scheme | None = None
    shape: Sequence[int] = ()
    amax: Callable[[], float] | None = None
    parts: Callable[[], Iterator[Arrays]] | None = None

    @property
    def computes(self) -> bool:
        """Whether the tensors are computed, not copied."""
        return self.make is not None or self.parts is not None

    def made(self) -> Iterator[Arrays]:
        """The tensors that are computed, whole or piece by piece."""
        if self.parts is not None:
            yield from self.parts()
        elif self.make is not None:
            yield self.make()


@dataclasses.dataclass(frozen=True)
class LeftModule:
    """A matrix of the source that stays as it is, and why."""

    module: str
    reason: str


@dataclasses.dataclass
class Plan:
    """A whole conversion.

    Attributes:
        shards: file name to the jobs whose tensors it holds.
        config: the config of the new checkpoint.
        changed: modules whose format changes.
        formats: the names of their schemes.
        left: matrices that stay as they are. Vectors and scalars stay too, and are not listed.
        warnings: complete sentences.
        ignore: the `ignore` entry of the new config.
        drop_files: other files of the source that would be wrong beside the new weights.
    """

    shards: Mapping[str, Sequence[Job]]
    config: dict[str, Any]
    changed: Sequence[str]
    formats: Mapping[str, str] = dataclasses.field(default_factory=dict)
    left: Sequence[LeftModule] = ()
    warnings: Sequence[str] = ()
    ignore: Sequence[str] = ()
    drop_files: Sequence[str] = ()

    def specs(self, shard: str) -> dict[str, TensorSpec]:
        """Dtype and shape of each tensor of a file."""
        return {name: spec for job in self.shards[shard] for name, spec in job.outputs.items()}

    @property
    def shard_of(self) -> dict[str, str]:
        """The index: where each tensor will be."""
        return {name: shard for shard in self.shards for name in self.specs(shard)}

    @property
    def source_bytes(self) -> int:
        """Bytes of all tensors that are read."""
        return sum(job.source_bytes for jobs in self.shards.values() for job in jobs)

    @property
    def output_bytes(self) -> int:
        """Bytes of all tensors that are written."""
        return sum(spec.nbytes for shard in self.shards for spec in self.specs(shard).values())


def require_distinct(where: object, shards: Mapping[str, Sequence[Job]]) -> None:
    """Raises CheckpointError if two jobs write a tensor of one name, such as a copy and a module's new tensor."""
    module_of: dict[str, str] = {}
    for job in (job for jobs in shards.values() for job in jobs):
        for name in job.outputs:
            if name in module_of:
                modules = " and for ".join(sorted({repr(job.module), repr(module_of[name])}))
                raise CheckpointError(
                    f"{where}: tensor {name!r} would be written twice, for {modules}; leave the module alone, or take "
                    "the tensor out of the source"
                )
            module_of[name] = job.module


def copy_job(name: str, spec: TensorSpec) -> Job:
    """A job that copies a tensor unchanged."""
    return Job(name, {name: spec}, spec.nbytes)


def output_specs(scheme: Scheme, module: str, spec: TensorSpec) -> dict[str, TensorSpec]:
    """Dtype and shape of a module's future tensors, by their full names."""
    dtype = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[spec.dtype]
    announced = scheme.output_specs(spec.shape, dtype).items()
    return {
        f"{module}{scheme.joint}{suffix}": TensorSpec(file_dtype(as_dtype(name)), tuple(shape))
        for suffix, (name, shape) in announced
    }


@dataclasses.dataclass(frozen=True)
class CalibrationReport:
    """The results of a calibration.

    Attributes:
        perplexity_before, perplexity_after: of the source and of the quantised model, on text that it was not
            calibrated by.
        calibration_tokens: the number of tokens that it was calibrated by.
        held_out_tokens: the number of tokens that they were measured on.
        layer_errors: for each layer, the norm of the change of its result over that of the result, by what it reads
            behind the quantised layers before it.
        weight_errors: for each module, the same of its linear, by the inputs that it was calibrated by.
        without_inputs: modules quantised by their weights alone: those outside of layers, and experts that no token of
            the text was sent to.
    """

    perplexity_before: float
    perplexity_after: float
    calibration_tokens: int
    held_out_tokens: int
    layer_errors: Sequence[float]
    weight_errors: Mapping[str, float]
    without_inputs: Sequence[str]


class PreparedCalibration(Protocol):
    """A calibration of one checkpoint, whose arguments were checked."""

    @property
    def options(self) -> dict[str, Any]:
        """The options that decide the bytes of a calibration, for JSON."""

    def choose(
        self, plan: Plan, source: CheckpointFolder, destination: pathlib.Path, done: Callable[[int], None]
    ) -> tuple[Plan, CalibrationReport]:
        """The plan with the tensors that were chosen. They may lie in the destination under temporary names.

        Arguments:
            plan: of the conversion.
            source: what is converted.
            destination: the claimed folder.
            done: called with the bytes of the source that were calibrated.
        """


class Calibrator(Protocol):
    """How checkpoints are calibrated."""

    def prepare(self, plan: Plan, source: CheckpointFolder) -> PreparedCalibration:
        """Checks that this plan can be calibrated. Raises CheckpointError if not."""
