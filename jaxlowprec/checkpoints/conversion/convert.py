"""Quantises plain checkpoints and decodes quantised ones: streamed, resumable, complete or not there."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxlowprec.checkpoints.conversion import jobs
from jaxlowprec.checkpoints.conversion.heads import with_true_tie
from jaxlowprec.checkpoints.conversion.jobs import Progress, compare_shards, is_finished, write_shards
from jaxlowprec.checkpoints.conversion.modules import (
    GPTQ_FILE,
    MODELOPT_FILE,
    QuantisedModule,
    quantised_modules,
    require_no_other_codes,
    scheme_of,
)
from jaxlowprec.checkpoints.conversion.plan import (
    Arrays,
    CalibrationReport,
    Calibrator,
    Job,
    LeftModule,
    Plan,
    PreparedCalibration,
    copy_job,
    require_distinct,
)
from jaxlowprec.checkpoints.conversion.quantizing import plan_quantization
from jaxlowprec.checkpoints.conversion.resume import check_apart, check_claim, check_unchanged, claimed, fingerprint
from jaxlowprec.checkpoints.conversion.rules import DEFAULTS, Choice, Rules
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.config import deployment_dtype, without_quantization
from jaxlowprec.checkpoints.files.dtypes import file_dtype
from jaxlowprec.checkpoints.files.folder import CONFIG_FILE, CheckpointFolder, real_path, require_folder, write_index
from jaxlowprec.checkpoints.files.other_files import copy_files, other_files, own_files
from jaxlowprec.checkpoints.files.safetensors_header import TensorSpec
from jaxlowprec.checkpoints.files.written_whole import read_json_object, write_json
from jaxlowprec.checkpoints.schemes import Scheme, by_name
from jaxlowprec.checkpoints.schemes.base import as_dtype, on_the_cpu

Path = str | pathlib.Path

_OTHER_CONFIGS = (MODELOPT_FILE, GPTQ_FILE, "quant_config.json")


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcome of a conversion, or of its plan.

    Attributes:
        scheme: the format that weights were converted to, or from.
        changed: modules whose format changed.
        formats: how many of them are in each format.
        left: matrices that stayed as they were, with the reasons.
        ignore: the entry of the new config.
        warnings: complete sentences.
        source_bytes, output_bytes: the bytes of all tensors.
        written, kept: files of weights that were written now, and that were found finished.
        copied, left_out: other files.
        verified: the number of tensors compared with the source; None if that was not asked for.
        calibrated: what calibration found; None without it, or if all files of weights had been finished before.
        seconds: the time that it took.
    """

    scheme: str
    changed: Sequence[str]
    formats: Mapping[str, int]
    left: Sequence[LeftModule]
    ignore: Sequence[str]
    warnings: Sequence[str]
    source_bytes: int
    output_bytes: int
    written: Sequence[str] = ()
    kept: Sequence[str] = ()
    copied: Sequence[str] = ()
    left_out: Sequence[str] = ()
    verified: int | None = None
    calibrated: CalibrationReport | None = None
    seconds: float = 0.0

    @classmethod
    def of_plan(cls, plan: Plan, scheme: str | None = None) -> Report:
        """The report of a plan, before it is carried out.

        Arguments:
            plan: the plan.
            scheme: see the attributes. None: the plan's only format, or "mixed".
        """
        formats = dict(Counter(plan.formats.values()).most_common())
        return cls(
            scheme=scheme or ("mixed" if len(formats) > 1 else next(iter(formats))),
            changed=plan.changed,
            formats=formats,
            left=plan.left,
            ignore=plan.ignore,
            warnings=plan.warnings,
            source_bytes=plan.source_bytes,
            output_bytes=plan.output_bytes,
        )

    def as_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class ConvertOptions:
    """How a conversion is carried out: in parallel, on trial, verified.

    Attributes:
        workers: how many tensors are converted, and are in memory, at a time.
        dry_run: plan, and write nothing.
        verify: compute everything again at the end, and compare it with the files.
        progress: see `jobs.Progress`.
        follow_links: also copy what links in the source point to outside of it.
    """

    workers: int = 2
    dry_run: bool = False
    verify: bool = False
    progress: Progress | None = None
    follow_links: bool = False

    def __post_init__(self):
        if type(self.workers) is not int or self.workers < 1:
            raise CheckpointError(f"workers={self.workers!r}; needs 1 or more")


def scheme_for(source: Path, name: str, *, group_size: int | None = None, static: bool = False) -> Scheme:
    """A scheme for a checkpoint, with INT4 scales in the dtype that its config says engines compute in.

    Arguments:
        source: the checkpoint's folder.
        name, group_size: see `schemes.by_name`.
        static: whether activations have static scales, where a format leaves that open.

    Raises:
        CheckpointError: the scheme does not have this group size, or the folder has no config.
    """
    require_folder(pathlib.Path(source))
    config = read_json_object(pathlib.Path(source) / CONFIG_FILE)
    options = {"scale_dtype": deployment_dtype(config)} if name.startswith("w4a16") else {}
    try:
        scheme = by_name(name, group_size=group_size, **options)
    except (TypeError, ValueError) as error:
        raise CheckpointError(str(error)) from None
    leaves_open = static and "activations" in scheme.__dataclass_fields__
    return dataclasses.replace(scheme, activations="static") if leaves_open else scheme  # type: ignore[call-arg]


def convert(
    source: Path,
    destination: Path,
    scheme: Scheme,
    *,
    overrides: Mapping[str, Scheme] | None = None,
    ignore: Sequence[str] = (),
    include: Sequence[str] = (),
    defaults: Sequence[str] = DEFAULTS,
    leave_unfit: bool = False,
    calibration: Calibrator | None = None,
    options: ConvertOptions = ConvertOptions(),  # noqa: B008 (frozen)
) -> Report:
    """Quantises a checkpoint.

    Arguments:
        source: folder of a Hugging Face checkpoint in bfloat16, float16 or float32.
        destination: folder that does not exist or is empty, or one that the same conversion left unfinished.
        scheme: the format of the new weights.
        overrides: other formats for the modules that rules match (see `Rules`), such as
            `{"re:.*self_attn": schemes.by_name("fp8_channel")}`; the first rule that matches is followed. Formats in
            one checkpoint are all of compressed-tensors or all of ModelOpt.
        ignore, include, defaults: which weights are left alone; see `Rules`.
        leave_unfit: leave weights alone that the scheme cannot hold, instead of raising an error.
        calibration: chooses codes and scales of INT4 and NVFP4 by a text, see `calibration.Calibration`; None: they are
            chosen by the weights alone.
        options: how the conversion is carried out.

    Raises:
        TypeError: a scheme that is none.
        CheckpointError: the source, the destination or the rules do not allow it; see `plan_quantization`.
    """
    rules = Rules(tuple(ignore), tuple(include), tuple(defaults))
    choice = Choice(scheme, tuple((overrides or {}).items()))
    if not options.dry_run:
        on_the_cpu()  # raises at once if JAX cannot use the CPU
    with CheckpointFolder(source) as opened:
        plan = plan_quantization(opened, choice, rules, leave_unfit)
        choices = {
            "command": "convert",
            "scheme": repr(scheme),
            "ignore": list(rules.ignore),
            "include": list(rules.include),
            "defaults": list(rules.defaults),
            "leave_unfit": leave_unfit,
        }
        if choice.overrides:
            choices["overrides"] = [[rule, repr(other)] for rule, other in choice.overrides]
        prepared = None
        if calibration is not None:
            prepared = calibration.prepare(plan, opened)
            choices["calibration"] = prepared.options
        return _carry_out(plan, opened, pathlib.Path(destination), choices, options, prepared)


def dequantize(
    source: Path,
    destination: Path,
    *,
    dtype: str = "bfloat16",
    options: ConvertOptions = ConvertOptions(),  # noqa: B008 (frozen)
) -> Report:
    """The inverse of `convert`: a plain checkpoint from a quantised one, with every weight as an engine decodes it.

    Arguments:
        source: folder of a checkpoint in one of the formats of `schemes`.
        destination: as in `convert`.
        dtype: the dtype of the weights: "bfloat16", "float16" or "float32".
        options: how the conversion is carried out.

    Raises:
        CheckpointError: the source is not quantised, its tensors are not what its config says, or the destination is
            not allowed.
    """
    with CheckpointFolder(source) as opened:
        scheme = scheme_of(opened)
        plan = plan_dequantization(opened, scheme, dtype)
        choices = {"command": "dequantize", "scheme": repr(scheme), "dtype": dtype}
        return _carry_out(plan, opened, pathlib.Path(destination), choices, options)


def _all_finished(plan: Plan, destination: pathlib.Path) -> bool:
    return all(is_finished(plan, shard, destination) for shard in plan.shards)


def _carry_out(
    plan: Plan,
    source: CheckpointFolder,
    destination: pathlib.Path,
    choices: dict[str, Any],
    options: ConvertOptions,
    calibration: PreparedCalibration | None = None,
) -> Report:
    started = time.perf_counter()
    check_apart(source.path, destination)
    copied, left_out = other_files(source, plan.drop_files)
    for path in [*map(pathlib.Path, own_files(source)), *copied]:
        real_path(source.path, path, options.follow_links)
    report = dataclasses.replace(
        Report.of_plan(plan), copied=[str(path) for path in copied], left_out=[str(path) for path in left_out]
    )
    wanted = fingerprint(source, choices)
    if options.dry_run:
        check_claim(destination, wanted)
        return report
    verified, found = None, None
    with claimed(destination, wanted):
        if calibration is not None and (options.verify or not _all_finished(plan, destination)):
            counter = jobs.Counter(plan.source_bytes, "calibrating", options.progress)
            plan, found = calibration.choose(plan, source, destination, counter.add)
        kept = write_shards(plan, source, destination, options.workers, options.progress)
        if source.indexed:
            write_index(destination, plan.shard_of, plan.output_bytes)
        copy_files(source.path, destination, copied, options.follow_links)
        write_json(destination / CONFIG_FILE, plan.config)
        if options.verify:
            with CheckpointFolder(destination) as made:
                verified = compare_shards(plan, source, made, options.workers, options.progress)
        check_unchanged(source, wanted)
    finished_before = set(kept)
    return dataclasses.replace(
        report,
        written=[shard for shard in plan.shards if shard not in finished_before],
        kept=kept,
        verified=verified,
        calibrated=found,
        seconds=time.perf_counter() - started,
    )


def plan_dequantization(source: CheckpointFolder, scheme: Scheme, dtype: str) -> Plan:
    """The plan that decodes every quantised weight of a checkpoint to one tensor in the given dtype.

    A weight goes to the file that holds the first of its tensors. All other tensors stay as they are.

    Raises:
        CheckpointError: no module is quantised, a module's tensors do not fit the scheme, or a tensor holds codes and
            belongs to no weight in it; or, when the plan is carried out, a weight is not finite in that dtype.
    """
    modules = quantised_modules(source, scheme)
    require_no_other_codes(source, scheme, modules)
    if not modules:
        raise CheckpointError(f"{source.path}: its config says {scheme.name}, but no tensor is in that format")
    consumed = {name: module for module, held in modules.items() for name in held.tensors.values()}
    job_of = {module: _job(source, held, dtype) for module, held in modules.items()}
    first = {held.tensors[held.scheme.required[0]]: module for module, held in modules.items()}
    shards: dict[str, list[Job]] = {}
    for shard, file in source.shards.items():
        held = [
            job_of[first[name]] if name in first else copy_job(name, source.spec(name))
            for name in file.header.tensors
            if name in first or name not in consumed
        ]
        if held:  # a file that had only scales has nothing left to hold
            shards[shard] = held
    require_distinct(source.path, shards)
    config, warnings = with_true_tie(source, without_quantization(source.config()), modules)
    return Plan(
        shards=shards,
        config=config,
        warnings=warnings,
        changed=sorted(modules),
        formats={module: held.scheme.name for module, held in modules.items()},
        drop_files=_OTHER_CONFIGS,
    )


def _job(source: CheckpointFolder, held: QuantisedModule, dtype: str) -> Job:
    name = held.weight_name
    if name in source.shard_of and name not in held.tensors.values():
        raise CheckpointError(f"{source.path}: module {held.name!r} has a weight, and quantised tensors as well")
    spec = TensorSpec(file_dtype(as_dtype(dtype)), held.shape(source))
    arrays = held.scheme.of_expert_arrays
    make = None if arrays else functools.partial(_decompress, source, held, name, dtype)
    parts = functools.partial(_by_expert, source, held, name, dtype) if arrays else None
    return Job(held.name, {name: spec}, held.nbytes(source), make, lambda tensors: tensors[name], parts=parts)


def _by_expert(source: CheckpointFolder, held: QuantisedModule, name: str, dtype: str) -> Iterator[Arrays]:
    return ({name: decoded} for decoded in held.experts_finite(source, dtype))


def _decompress(source: CheckpointFolder, held: QuantisedModule, name: str, dtype: str) -> Arrays:
    return {name: held.decode_finite(source, dtype)}
