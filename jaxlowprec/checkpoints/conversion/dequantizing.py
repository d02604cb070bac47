"""The plan that decodes a quantised checkpoint to high precision."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from jaxlowprec.checkpoints.conversion.heads import with_true_tie
from jaxlowprec.checkpoints.conversion.modules import (
    GPTQ_FILE,
    MODELOPT_FILE,
    QuantisedModule,
    quantised_modules,
    require_no_other_codes,
)
from jaxlowprec.checkpoints.conversion.plan import Arrays, Job, Plan, copy_job, require_distinct
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.config import without_quantization
from jaxlowprec.checkpoints.files.dtypes import file_dtype
from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from jaxlowprec.checkpoints.files.safetensors_header import TensorSpec
from jaxlowprec.checkpoints.schemes.base import Scheme, as_dtype

_OTHER_CONFIGS = (MODELOPT_FILE, GPTQ_FILE, "quant_config.json")


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
    jobs = {module: _job(source, held, dtype) for module, held in modules.items()}
    first = {held.tensors[held.scheme.required[0]]: module for module, held in modules.items()}
    shards: dict[str, list[Job]] = {}
    for shard, file in source.shards.items():
        held = [
            jobs[first[name]] if name in first else copy_job(name, source.spec(name))
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
