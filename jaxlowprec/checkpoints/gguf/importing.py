"""A GGUF file as a Hugging Face folder: plain, or with the codes and scales that a scheme holds exactly."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections import Counter as Counted
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jaxlowprec.checkpoints.conversion.convert import ConvertOptions, Report
from jaxlowprec.checkpoints.conversion.jobs import compare_shards, write_shards
from jaxlowprec.checkpoints.conversion.plan import Arrays, Job, LeftModule, Plan
from jaxlowprec.checkpoints.conversion.resume import check_apart, check_claim, claimed
from jaxlowprec.checkpoints.conversion.rules import splits
from jaxlowprec.checkpoints.errors import CheckpointError, brief
from jaxlowprec.checkpoints.files.config import with_quantization
from jaxlowprec.checkpoints.files.dtypes import HIGH_PRECISION, all_finite, file_dtype
from jaxlowprec.checkpoints.files.folder import CONFIG_FILE, SINGLE_FILE, CheckpointFolder, write_index
from jaxlowprec.checkpoints.files.safetensors_header import TensorSpec
from jaxlowprec.checkpoints.files.written_whole import write_json
from jaxlowprec.checkpoints.gguf.exact import rows, scheme_of_type, tensors_of_blocks
from jaxlowprec.checkpoints.gguf.gguf_file import GGUFFile
from jaxlowprec.checkpoints.gguf.model_config import ROPE_FREQS, Config, config_of_metadata
from jaxlowprec.checkpoints.gguf.names import (
    Architecture,
    Place,
    by_metadata,
    heads_of,
    is_float32,
    places,
    text_of,
    to_halves,
)
from jaxlowprec.checkpoints.schemes import Scheme
from jaxlowprec.checkpoints.schemes.base import as_dtype

_SHARD_BYTES = 5 * 10**9
_SHOWN = 8
_FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclasses.dataclass(frozen=True)
class _Model:
    """The model to import: the file, its family and config, the dtype of plain tensors, and the scheme that is kept."""

    file: GGUFFile
    architecture: Architecture
    config: Config
    main: str
    dtype: str | None
    scheme: Scheme | None


def import_gguf(
    source: str | pathlib.Path,
    destination: str | pathlib.Path,
    *,
    dtype: str | None = None,
    keep: bool = True,
    options: ConvertOptions = ConvertOptions(),  # noqa: B008 (frozen)
) -> Report:
    """Makes a Hugging Face folder from a GGUF file of Llama, Mixtral, Qwen2, Qwen3 or Qwen3-MoE.

    The tokenizer is not written: transformers reads it from the GGUF file.

    Arguments:
        source: the file.
        destination: folder that does not exist or is empty, or one that the same conversion left unfinished.
        dtype: "bfloat16", "float16" or "float32": of all weights that are decoded or plain. None: plain matrices keep
            their dtype; the rest gets that of the embedding, or float16 if that is quantised; norms that lose bits in
            it stay float32.
        keep: keep the codes and scales of Q4_0 (`w4a16`, groups of 32, float16 scales) or MXFP4 (`mxfp4`). Other
            types, and the embedding and the head, are decoded. False: decode everything.
        options: how the conversion is carried out.

    Raises:
        CheckpointError: another family, a type that is not decoded, tensors that are missing or have no name in Hugging
            Face's model, weights in both Q4_0 and MXFP4, or a number that is not finite in `dtype`.
    """
    path, started = pathlib.Path(destination), time.perf_counter()
    if dtype is not None and dtype not in _FLOATS.values():
        raise CheckpointError(f"import_gguf: dtype={dtype!r}; needs one of {', '.join(_FLOATS.values())}")
    with GGUFFile(source) as file:
        check_apart(file.path, path)
        model = _model(file, dtype, keep)
        plan = _planned(model)
        wanted = _fingerprint(file, {"command": "import_gguf", "dtype": dtype, "keep": keep})
        report = Report.of_plan(plan, f"GGUF to {model.scheme.name if model.scheme else 'plain weights'}")
        if options.dry_run:
            check_claim(path, wanted)
            return report
        verified = None
        with claimed(path, wanted):
            kept = write_shards(plan, None, path, options.workers, options.progress)
            if len(plan.shards) > 1:
                write_index(path, plan.shard_of, plan.output_bytes)
            write_json(path / CONFIG_FILE, plan.config)
            if options.verify:
                with CheckpointFolder(path) as made:
                    verified = compare_shards(plan, None, made, options.workers, options.progress)
            if _fingerprint(file, wanted["options"]) != wanted:
                raise CheckpointError(f"{file.path}: changed while it was converted; remove {path}, and convert again")
    written = [shard for shard in plan.shards if shard not in kept]
    seconds = time.perf_counter() - started
    return dataclasses.replace(report, written=written, kept=kept, verified=verified, seconds=seconds)


def _model(file: GGUFFile, dtype: str | None, keep: bool) -> _Model:
    specs = file.specs
    named = file.metadata.get("general.architecture")
    experts = file.metadata.get(f"{named}.expert_count", 0)
    architecture = by_metadata(file.path, named, int(experts) if isinstance(experts, np.integer) else 0)
    embedding = specs.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file.path}: has no token_embd.weight [tokens, width]; needs a whole model")
    freqs = file.read(ROPE_FREQS) if ROPE_FREQS in specs else None
    content = config_of_metadata(file.path, file.metadata, architecture, embedding.shape[0], freqs)
    content["tie_word_embeddings"] = "output.weight" not in specs
    biased = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    if architecture.name == "llama":
        content |= {key: name in specs for key, name in biased.items()}
    for kind in ("bos", "eos", "pad"):
        number = file.metadata.get(f"tokenizer.ggml.{'padding' if kind == 'pad' else kind}_token_id")
        content[f"{kind}_token_id"] = int(number) if isinstance(number, np.integer) else None
    main = dtype or _FLOATS.get(embedding.type.name, "float16")
    scheme = _kept_scheme(file) if keep else None
    content["dtype"] = "float16" if scheme is not None and scheme.name == "w4a16" else main
    return _Model(file, architecture, Config(file.path, content, architecture), main, dtype, scheme)


def _kept_scheme(file: GGUFFile) -> Scheme | None:
    """The scheme of the layers' quantised weights, or None if none holds them."""
    found = Counted(
        spec.type.name
        for name, spec in file.specs.items()
        if name.startswith("blk.") and scheme_of_type(spec.type) is not None
    )
    if len(found) > 1:
        raise CheckpointError(
            f"{file.path}: has weights in {' and '.join(sorted(found))}, and a folder's config names one format; "
            "decode them with `jaxlowprec dequantize`"
        )
    types = [spec.type for spec in file.specs.values() if spec.type.name in found]
    return scheme_of_type(types[0]) if types else None


def _planned(model: _Model) -> Plan:
    """The plan that writes the folder."""
    file, config = model.file, model.config
    tied = config.content["tie_word_embeddings"]
    _require_counts(model)
    where = places(model.architecture, config.layers, config.experts)
    if tied:
        del where["lm_head"]
    jobs, left, taken = [], [], {ROPE_FREQS}
    for module, at in where.items():
        for last in ("weight", "bias"):
            place = Place(at.tensor + last, at.part)
            if place.tensor not in file.specs:
                if last == "weight":
                    raise CheckpointError(f"{file.path}: has no tensor {place.tensor!r}, which {module} needs")
                continue
            taken.add(place.tensor)
            job, reason = _job(model, f"{module}.{last}", place)
            jobs.append(job)
            if reason:
                left.append(LeftModule(module, reason))
    if unknown := [name for name in file.specs if name not in taken]:
        raise CheckpointError(
            f"{file.path}: {len(unknown)} tensors have no place in {model.architecture.classes}: "
            f"{', '.join(map(brief, unknown[:_SHOWN]))}"
        )
    changed = sorted(job.module for job in jobs if len(job.outputs) > 1)
    if changed and (pairs := splits({entry.module for entry in left}, set(changed))):
        raise CheckpointError(
            f"{file.path}: {' and '.join(pairs[0])} are in different types, and engines hold them as one weight: "
            "decode the file with `jaxlowprec dequantize`"
        )
    ignore = sorted(e.module for e in left) + (["lm_head"] if tied else [])
    content = config.content
    if model.scheme is not None:
        content = with_quantization(content, model.scheme.quantization_config(ignore))
    return Plan(
        _shards(jobs),
        content,
        changed,
        formats={module: model.scheme.name for module in changed} if model.scheme else {},
        left=left,
        warnings=_warnings(model),
        ignore=ignore if model.scheme else (),
    )


def _require_counts(model: _Model) -> None:
    """Raises CheckpointError if the metadata says more layers or experts than the file has tensors of."""
    layers = {parts[1] for name in model.file.specs if len(parts := name.split(".")) > 2 and parts[0] == "blk"}
    if model.config.layers > len(layers):
        raise CheckpointError(
            f"{model.file.path}: the metadata says {model.config.layers} layers; the file has tensors of {len(layers)}"
        )
    held = [spec.shape for name, spec in model.file.specs.items() if name.endswith("_exps.weight")]
    count = sum(shape[0] for shape in held if shape and 0 not in shape)
    if model.config.layers * model.config.experts > count:
        raise CheckpointError(
            f"{model.file.path}: the metadata says {model.config.experts} experts in each layer; all tensors together "
            f"hold {count} matrices of experts"
        )


def _job(model: _Model, name: str, place: Place) -> tuple[Job, str | None]:
    """The job that makes a tensor, or a module's tensors; and why a matrix does not keep its codes."""
    file = model.file
    spec = file.specs[place.tensor]
    shape, part = spec.shape, place.part
    if part is not None:
        if len(shape) != 3 or shape[0] != model.config.experts:
            raise CheckpointError(f"{file.path}: {place.tensor} is {list(shape)}; needs [{model.config.experts}, N, K]")
        shape = shape[1:]
    model.config.require_shape(f"{file.path}: {place.tensor}", place, shape)
    nbytes = spec.type.nbytes(shape)
    heads = heads_of(model.architecture, place, model.config.heads, model.config.kv_heads)
    order = None if heads is None else to_halves(shape[0], heads)
    module = name.rpartition(".")[0]
    scheme, is_matrix = model.scheme, len(shape) == 2 and place.tensor.startswith("blk.")  # norms, biases are decoded
    if scheme is not None and scheme_of_type(spec.type) == scheme and is_matrix:
        outputs = scheme.output_specs(shape)
        kept = {f"{module}.{last}": TensorSpec(file_dtype(as_dtype(d)), s) for last, (d, s) in outputs.items()}

        def make_kept() -> Arrays:
            with _naming(file, place):
                tensors = tensors_of_blocks(spec.type, file.blocks(place.tensor, part))
            return {f"{module}.{n}": a for n, a in (tensors if order is None else rows(tensors, order)).items()}

        return Job(module, kept, nbytes, make_kept), None
    file.decoder(place.tensor)  # raises before anything is written
    dtype = _dtype(model, place)

    def make() -> Arrays:
        array = file.read(place.tensor, part)
        return {name: _rounded(file, place, array if order is None else array[order], dtype)}

    reason = None if len(shape) < 2 else f"{spec.type.name} as {dtype}"
    return Job(module, {name: TensorSpec(file_dtype(as_dtype(dtype)), shape)}, nbytes, make), reason


def _dtype(model: _Model, place: Place) -> str:
    """The dtype that a tensor gets in the folder."""
    spec = model.file.specs[place.tensor]
    if model.dtype is not None:
        return model.dtype
    if not is_float32(place.tensor, len(spec.shape)) and spec.type.name in HIGH_PRECISION:
        return _FLOATS[spec.type.name]
    if spec.type.name == "F32":
        array = model.file.read(place.tensor)
        with np.errstate(over="ignore"):
            exact = np.array_equal(array.astype(as_dtype(model.main)).astype(np.float32), array)
        return model.main if exact else "float32"
    return model.main


def _rounded(file: GGUFFile, place: Place, array: np.ndarray, dtype: str) -> np.ndarray:
    """An array in the dtype of the folder. Raises CheckpointError if it is not finite there."""
    if array.dtype not in (np.float16, np.float32, ml_dtypes.bfloat16):
        raise CheckpointError(f"{file.path}: {place.tensor} is {array.dtype}; needs a type of weights")
    with np.errstate(over="ignore"):
        rounded = np.ascontiguousarray(array.astype(as_dtype(dtype), copy=False))
    if not all_finite(rounded):
        raise CheckpointError(
            f"{file.path}: {place.tensor} holds NaN or infinity, or numbers beyond {dtype}; choose a dtype of larger "
            "numbers (--dtype float32)"
        )
    return rounded


@contextlib.contextmanager
def _naming(file: GGUFFile, place: Place) -> Iterator[None]:
    """Adds the name of the tensor to an error."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: tensor {place.tensor!r}: {error}") from None


def _shards(jobs: Sequence[Job]) -> dict[str, list[Job]]:
    """Files of at most some gigabytes."""
    groups: list[list[Job]] = [[]]
    filled = 0
    for job in jobs:
        nbytes = sum(spec.nbytes for spec in job.outputs.values())
        if groups[-1] and filled + nbytes > _SHARD_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(job)
        filled += nbytes
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def _warnings(model: _Model) -> list[str]:
    if "tokenizer.ggml.tokens" not in model.file.metadata:
        return []
    return [
        "the tokenizer is not written; transformers reads it from the GGUF file: AutoTokenizer.from_pretrained(folder, "
        f"gguf_file={text_of(model.file.path.name)!r}).save_pretrained(...)"
    ]


def _fingerprint(file: GGUFFile, options: Mapping[str, Any]) -> dict[str, Any]:
    """The source and the options as JSON, as `resume.fingerprint` makes it of a folder."""
    status = file.path.stat()
    files = {text_of(file.path.name): {"size": status.st_size, "mtime_ns": status.st_mtime_ns}}
    return {"version": 1, "options": dict(options), "source_files": files}
