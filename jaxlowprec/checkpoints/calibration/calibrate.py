"""Calibrates a checkpoint: quantises layer after layer by what each reads behind the quantised layers before it."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxlowprec.checkpoints.calibration.feedback import Factors, Method, output_error, quantized
from jaxlowprec.checkpoints.calibration.grids import Grid, grid_of
from jaxlowprec.checkpoints.calibration.layers import (
    LayerSource,
    LoadedLayer,
    batches,
    config_of,
    embedded,
    negative_log_likelihood,
)
from jaxlowprec.checkpoints.conversion.plan import Arrays, CalibrationReport, Job, Plan
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.dtypes import HIGH_PRECISION, all_finite
from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from jaxlowprec.checkpoints.files.safetensors_file import SafetensorsFile, SafetensorsWriter
from jaxlowprec.checkpoints.files.safetensors_header import TensorSpec
from jaxlowprec.checkpoints.files.written_whole import TEMPORARY_PREFIX
from jaxlowprec.checkpoints.tokens import Rows, rows_of
from jaxlowprec.checkpoints.trees.rule import EXPERT
from jaxlowprec.models.decoder.config import DecoderConfig
from jaxlowprec.telemetry.scopes import Inputs, added

_EXPERT = re.compile(r"(?s)(.*\.experts\.)(\d+)(\..*)")


@dataclasses.dataclass(frozen=True)
class Calibration:
    """How a checkpoint is calibrated.

    Attributes:
        text: a UTF-8 text file like what the model is used for. Its last tenth measures the perplexity, and is not
            calibrated by.
        rows, context: so many rows of so many tokens are read by the model; fewer rows if the text is short.
        method: how codes and scales are chosen.
    """

    text: str | pathlib.Path
    rows: int = 64
    context: int = 512
    method: Method = Method()  # noqa: RUF009 (frozen)

    def __post_init__(self):
        for name in ("rows", "context"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise CheckpointError(f"calibration: {name}={value!r}; needs 1 or more")

    def prepare(self, plan: Plan, source: CheckpointFolder) -> _PreparedCalibration:
        """See `conversion.calibrating`.

        Raises:
            CheckpointError: the scheme has nothing to calibrate, the decoder does not have the model's architecture,
                there is no tokenizer, or the text cannot be read or is too short.
        """
        _check(plan)
        config, text = config_of(source), pathlib.Path(self.text)
        rows = rows_of(text, source.path, config, rows=self.rows, context=self.context)
        said = {"text_sha256": hashlib.sha256(text.read_bytes()).hexdigest(), "rows": self.rows}
        options = said | {"context": self.context, "method": dataclasses.asdict(self.method)}
        return _PreparedCalibration(config, rows, self.method, options)


@dataclasses.dataclass(frozen=True)
class _PreparedCalibration:
    """See `conversion.calibrating`."""

    config: DecoderConfig
    rows: Rows
    method: Method
    options: dict[str, Any]

    def choose(
        self, plan: Plan, source: CheckpointFolder, destination: pathlib.Path, done: Callable[[int], None]
    ) -> tuple[Plan, CalibrationReport]:
        """See `conversion.calibrating`."""
        work = _Work(plan, source, destination, self)
        for number in range(self.config.layers):
            work.calibrate(number, done)
        return _replaced(plan, work.files), work.report()


class _Work:
    """A calibration layer by layer.

    Attributes:
        files: by the name of a tensor that was chosen, the file that holds it.
    """

    def __init__(self, plan: Plan, source: CheckpointFolder, destination: pathlib.Path, prepared: _PreparedCalibration):
        self._source, self._destination, self._prepared = source, destination, prepared
        self._layers, self._jobs = LayerSource(source, prepared.config), _quantising(plan)
        self.files: dict[str, SafetensorsFile] = {}
        self._errors: list[float] = []
        self._weight_errors: dict[str, float] = {}
        self._ends, held_out = self._layers.ends(), prepared.rows.held_out[:, :-1]
        self._x = embedded(self._ends, prepared.rows.calibrating)  # behind the quantised layers so far
        self._held_out = embedded(self._ends, held_out)
        self._plain = self._held_out  # behind the layers of the source

    def calibrate(self, number: int, done: Callable[[int], None]) -> None:
        """Quantises a layer, and moves on behind it."""
        layer, y, moments = self._layers.layer(number, {}), np.empty_like(self._x), _Moments()
        for part in batches(self._x):
            y[part], found = layer.watched(self._x[part])
            moments.add(found)
        self._plain = _behind(layer, self._plain)
        del layer
        decoded = self._chosen(number, moments, done)
        layer = self._layers.layer(number, decoded)
        self._x, self._held_out = _behind(layer, self._x), _behind(layer, self._held_out)
        self._errors.append(float(np.linalg.norm(self._x - y) / np.fmax(np.linalg.norm(y), 1e-30)))

    def _chosen(self, number: int, moments: _Moments, done: Callable[[int], None]) -> Arrays:
        """Chooses and writes the tensors of a layer; returns the weights that they stand for."""
        inputs, factors = self._layers.inputs_of(number), Factors()
        decoded, made, specs = dict[str, np.ndarray](), dict[str, np.ndarray](), dict[str, TensorSpec]()
        for module, job in self._jobs.items():
            if not module.startswith(self._layers.prefix(number)):
                continue
            name = f"{module}.weight"
            weight, found = self._layers.read(name), moments.of(name, inputs)
            if found is not None and not (all_finite(found.moments) and np.isfinite(found.amax)):
                raise CheckpointError(_not_finite(self._source, module))
            tensors = _chosen(job, weight, found, self._prepared.method, factors)
            assert job.decode is not None
            decoded[name] = job.decode(tensors)
            if found is not None:
                self._weight_errors[module] = output_error(weight, decoded[name], found.moments)
            made |= tensors
            specs |= job.outputs
            done(job.source_bytes)
        path = self._destination / f"{TEMPORARY_PREFIX}calibrated-{number}"
        self.files |= dict.fromkeys(made, _written(path, made, specs))
        return decoded

    def report(self) -> CalibrationReport:
        """The results of the calibration, after the last layer."""
        targets = self._prepared.rows.held_out[:, 1:]
        before, after = (
            float(np.exp(negative_log_likelihood(self._ends, hidden, targets)))
            for hidden in (self._plain, self._held_out)
        )
        without = [module for module in self._jobs if module not in self._weight_errors]
        tokens = self._prepared.rows.calibrating.size
        return CalibrationReport(before, after, tokens, targets.size, self._errors, self._weight_errors, without)


def _check(plan: Plan) -> None:
    """Raises CheckpointError if there is nothing to calibrate."""
    jobs = _quantising(plan)
    if not any(_grid(job, 1.0) or (job.scheme and job.scheme.has_static_inputs) for job in jobs.values()):
        names = ", ".join(sorted({job.scheme.name for job in jobs.values() if job.scheme}))
        raise CheckpointError(
            f"calibration does nothing for {names}: it chooses codes and scales of INT4 and NVFP4, and static scales "
            "of activations; leave it out, or choose one of w4a16, w4a16_asym, gptq, awq, nvfp4, nvfp4_w4a4, "
            "modelopt_nvfp4, modelopt_fp8, autofp8, fp8_tensor, fp8_channel and int8_channel"
        )


class LinearInputs(NamedTuple):
    """The inputs of a linear: the mean of x^T x, float32 [K, K], and the largest magnitude, of all experts together."""

    moments: np.ndarray
    amax: float


class _Moments:
    """Sums over batches of what the linears of a layer read."""

    def __init__(self) -> None:
        self._sums: dict[str, Inputs] = {}

    def add(self, found: Mapping[str, Inputs]) -> None:
        """Adds those of a batch."""
        for linear, new in found.items():
            held = self._sums.get(linear)
            self._sums[linear] = new if held is None else added(held, new)

    def of(self, weight: str, inputs: Mapping[str, str]) -> LinearInputs | None:
        """The inputs by which a weight was multiplied; None if there were none."""
        expert = _EXPERT.fullmatch(weight)
        linear = inputs.get(weight) or (inputs.get(f"{expert[1]}{EXPERT}{expert[3]}") if expert else None)
        if linear is None or linear not in self._sums:
            return None
        sums, count, amax = (np.asarray(each) for each in self._sums[linear])
        if sums.ndim == 3:
            assert expert is not None
            sums, count = sums[int(expert[2])], count[int(expert[2])]
        return LinearInputs(sums / np.float32(count), float(amax)) if count > 0 else None


def _not_finite(source: CheckpointFolder, module: str) -> str:
    """Why a linear reads numbers that are not finite: the first tensor that holds such numbers, if there is one."""
    for name in source.shard_of:
        if source.spec(name).dtype in HIGH_PRECISION and not all_finite(source.read(name)):
            return f"{source.path}: tensor {name!r} holds NaN or infinity; calibration needs a model that computes"
    return f"{source.path}: calibration: what {module!r} reads is beyond float32; needs a model that computes"


def _chosen(job: Job, weight: np.ndarray, read: LinearInputs | None, method: Method, factors: Factors) -> Arrays:
    """A module's tensors: by its inputs, or as without calibration."""
    assert job.scheme is not None and job.make is not None
    if read is None or not all_finite(weight):
        return job.make()  # raises for what is not finite
    scheme, grid = job.scheme.of_inputs(read.amax), _grid(job, None)
    if grid is not None:
        stored = scheme.store(quantized(weight, read.moments, grid, method, weight.dtype, factors=factors))
    else:
        stored = scheme.compress(weight, amax=None if job.amax is None else job.amax())
    return {f"{job.module}{scheme.joint}{suffix}": array for suffix, array in stored.items()}


def _grid(job: Job, amax: float | None) -> Grid | None:
    scheme = job.scheme
    if scheme is None or not scheme.has_format:
        return None
    fmt = scheme.of_shape(job.shape).format
    if amax is None and scheme.has_tensor_scale and job.amax is not None:
        amax = job.amax()
    return grid_of(fmt, amax)


def _quantising(plan: Plan) -> dict[str, Job]:
    return {job.module: job for jobs in plan.shards.values() for job in jobs if job.scheme is not None}


def _written(path: pathlib.Path, made: Arrays, specs: Mapping[str, TensorSpec]) -> SafetensorsFile:
    with SafetensorsWriter(path, specs) as writer:
        for name, array in made.items():
            writer.write(name, array)
    return SafetensorsFile(path)


def _behind(layer: LoadedLayer, x: np.ndarray) -> np.ndarray:
    return np.concatenate([layer(x[part]) for part in batches(x)])


def _replaced(plan: Plan, files: Mapping[str, SafetensorsFile]) -> Plan:
    """The plan whose jobs read the tensors that were chosen."""

    def job_of(job: Job) -> Job:
        if not set(job.outputs) <= set(files):
            return job
        return dataclasses.replace(job, make=lambda: {name: files[name].read(name) for name in job.outputs})

    shards = {shard: [job_of(job) for job in jobs] for shard, jobs in plan.shards.items()}
    return dataclasses.replace(plan, shards=shards)
