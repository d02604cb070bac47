"""A Hugging Face folder as a GGUF file for llama.cpp: tensor by tensor, without quantising codes and scales again."""

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
import shutil
import time
from collections import Counter as Counted
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxlowprec.checkpoints.conversion.convert import ConvertOptions, Report
from jaxlowprec.checkpoints.conversion.heads import shares_embedding
from jaxlowprec.checkpoints.conversion.jobs import Counter, in_parallel
from jaxlowprec.checkpoints.conversion.modules import QuantisedModule, naming, quantised_modules, scheme_of
from jaxlowprec.checkpoints.conversion.plan import Job, Plan
from jaxlowprec.checkpoints.conversion.quantizing import plan_quantization
from jaxlowprec.checkpoints.conversion.resume import check_unchanged, fingerprint
from jaxlowprec.checkpoints.conversion.rules import DEFAULTS, Choice, Rules
from jaxlowprec.checkpoints.errors import CheckpointError, brief
from jaxlowprec.checkpoints.files.config import quantization_of, without_quantization
from jaxlowprec.checkpoints.files.dtypes import HIGH_PRECISION
from jaxlowprec.checkpoints.files.folder import CONFIG_FILE, CheckpointFolder
from jaxlowprec.checkpoints.gguf.block_types import TYPES
from jaxlowprec.checkpoints.gguf.exact import GROUP, blocks_of_tensors, rows, type_of_scheme
from jaxlowprec.checkpoints.gguf.gguf_file import SUFFIX, GGUFFile, GGUFWriter
from jaxlowprec.checkpoints.gguf.header import TensorSpec, Value
from jaxlowprec.checkpoints.gguf.model_config import QUANTIZATION_VERSION, ROPE_FREQS, Config
from jaxlowprec.checkpoints.gguf.names import (
    Architecture,
    Place,
    by_config,
    heads_of,
    is_float32,
    places,
    require_counts,
    text_of,
    to_neighbours,
)
from jaxlowprec.checkpoints.gguf.tokenizers import tokenizer_metadata
from jaxlowprec.checkpoints.schemes import Scheme, by_name
from jaxlowprec.checkpoints.schemes.base import Tensors, on_the_cpu

_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "BF16": 32, "MXFP4": 38}
"""llama.cpp's numbers for "most matrices are of this type"."""

_NOT_WEIGHTS = ".rotary_emb.inv_freq"
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class _HeldModule:
    """A module whose weight is held in a scheme's format, in the folder or made from a plain one on the way."""

    scheme: Scheme
    shape: tuple[int, ...]
    nbytes: int
    read: Callable[[], Tensors]


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A tensor of the GGUF file, or an index of its first axis.

    Attributes:
        place: where it goes.
        spec: its own type and shape.
        source_bytes: the bytes that it reads.
        make: its elements or blocks.
    """

    place: Place
    spec: TensorSpec
    source_bytes: int
    make: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class _Model:
    """The model to export: the folder, its config and family, and its quantised modules."""

    folder: CheckpointFolder
    config: Config
    architecture: Architecture
    held: Mapping[str, _HeldModule]


def export_gguf(
    source: str | pathlib.Path,
    destination: str | pathlib.Path,
    scheme: Scheme | None = None,
    *,
    ignore: Sequence[str] = (),
    include: Sequence[str] = (),
    defaults: Sequence[str] = DEFAULTS,
    leave_unfit: bool = False,
    options: ConvertOptions = ConvertOptions(),  # noqa: B008 (frozen)
) -> Report:
    """Writes a GGUF file for llama.cpp from a folder of Llama, Mistral, Mixtral, Qwen2, Qwen3 or Qwen3-MoE.

    Codes and scales keep their bits: `w4a16` with groups of 32 becomes Q4_0, `mxfp4` becomes MXFP4. Other matrices keep
    their dtype; norms, biases and routers become F32. Rows of q and k are put into llama.cpp's order.

    Arguments:
        source: folder of a Hugging Face checkpoint, plain or in one of these schemes.
        destination: the new file, which does not exist.
        scheme: quantise a plain folder on the way: `by_name("w4a16", group_size=32, scale_dtype="float16")` or
            `by_name("mxfp4")`.
        ignore, include, defaults, leave_unfit: what `scheme` leaves alone; see `checkpoints.convert`.
        options: how the conversion is carried out.

    Raises:
        CheckpointError: another family or scheme, scales that are no float16 numbers, tensors that llama.cpp has no
            name for or that are missing, or settings that it does not compute.
    """
    path = pathlib.Path(destination)
    if path.suffix != SUFFIX or path.exists() or not path.parent.is_dir():
        needs = f"a new file in an existing folder, with a name that ends with {SUFFIX}"
        raise CheckpointError(f"{path}: {'is there already' if path.exists() else 'cannot be written'}; needs {needs}")
    if scheme is not None:
        type_of_scheme(scheme)  # raises before anything is read
        on_the_cpu()
    started = time.perf_counter()
    with CheckpointFolder(source) as folder:
        plan = None
        if scheme is not None:
            plan = plan_quantization(
                folder,
                Choice(scheme),
                Rules(tuple(ignore), tuple(include), tuple(defaults)),
                leave_unfit,
                for_llama_cpp=True,
            )
        model = _model(folder, scheme, plan)
        pieces, specs = _planned(model)
        metadata, warnings = _metadata(model, specs)
        if _says_tied(folder) and "output.weight" in specs:
            warnings.append(
                "config.json says tie_word_embeddings, but lm_head has a weight of its own: it is written, and "
                "llama.cpp computes with it, as transformers does"
            )
        changed = sorted(model.held)
        report = Report(
            scheme="GGUF" if not changed else f"GGUF {type_of_scheme(model.held[changed[0]].scheme).name}",
            changed=changed,
            formats=dict(collections.Counter(type_of_scheme(held.scheme).name for held in model.held.values())),
            left=plan.left if plan else (),
            ignore=plan.ignore if plan else (),
            warnings=[*(plan.warnings if plan else ()), *model.config.warnings(), *warnings],
            source_bytes=sum(piece.source_bytes for piece in pieces),
            output_bytes=sum(spec.nbytes for spec in specs.values()),
        )
        if options.dry_run:
            return report
        verified = _carry_out(model.folder, path, (pieces, specs, metadata), options)
    seconds = time.perf_counter() - started
    return dataclasses.replace(report, written=[path.name], verified=verified, seconds=seconds)


def scheme_for_gguf(name: str, group_size: int | None = None) -> Scheme:
    """The scheme of a name with the group size and the scales that GGUF holds. Raises CheckpointError for another."""
    options = {"scale_dtype": "float16"} if name == "w4a16" else {}
    size = GROUP if group_size is None and name.startswith("w4a16") else group_size
    try:
        scheme = by_name(name, group_size=size, **options)
    except (TypeError, ValueError) as error:
        raise CheckpointError(str(error)) from None
    type_of_scheme(scheme)
    return scheme


def _carry_out(
    folder: CheckpointFolder,
    path: pathlib.Path,
    planned: tuple[Sequence[_Piece], Mapping[str, TensorSpec], Mapping[str, Value]],
    options: ConvertOptions,
) -> int | None:
    """Writes the file and compares it if that is asked for; returns the number of tensors compared."""
    pieces, specs, metadata = planned
    total, before = sum(piece.source_bytes for piece in pieces), fingerprint(folder, {})
    needed, free = sum(spec.nbytes for spec in specs.values()), shutil.disk_usage(path.parent).free
    if needed > free:
        raise CheckpointError(f"{path}: needs {needed} bytes, only {free} are free on its disk; free some first")
    with GGUFWriter(path, specs, metadata) as writer:
        counter = Counter(total, "converting", options.progress)

        def write(piece: _Piece) -> None:
            writer.write(piece.place.tensor, piece.make(), piece.place.part)
            counter.add(piece.source_bytes)

        in_parallel(write, pieces, options.workers)
        check_unchanged(folder, before)
    if not options.verify:
        return None
    with GGUFFile(path) as made:
        counter = Counter(total, "verifying", options.progress)

        def compare(piece: _Piece) -> None:
            expected = np.ascontiguousarray(piece.make()).reshape(-1).view(np.uint8)
            if not np.array_equal(made.blocks(piece.place.tensor, piece.place.part).reshape(-1), expected):
                raise CheckpointError(f"{path}: tensor {piece.place.tensor!r} differs from the source's; convert again")
            counter.add(piece.source_bytes)

        in_parallel(compare, pieces, options.workers)
    return len(specs)


def _model(folder: CheckpointFolder, scheme: Scheme | None, plan: Plan | None) -> _Model:
    where = folder.path / CONFIG_FILE
    content = folder.config()
    plain = without_quantization(content)
    architecture = by_config(where, plain)
    held: dict[str, _HeldModule] = {}
    if scheme is not None and plan is not None:
        wanted = set(plan.changed)
        jobs = {job.module: job for jobs in plan.shards.values() for job in jobs if job.module in wanted}
        held = {module: _made(folder, scheme, job) for module, job in jobs.items()}
    elif quantization_of(content):
        found = quantised_modules(folder, scheme_of(folder))
        held = {module: _stored(folder, stored) for module, stored in found.items()}
    return _Model(folder, Config(where, plain, architecture), architecture, held)


def _made(folder: CheckpointFolder, scheme: Scheme, job: Job) -> _HeldModule:
    def read() -> Tensors:
        assert job.make is not None
        return {name.removeprefix(f"{job.module}."): tensor for name, tensor in job.make().items()}

    return _HeldModule(scheme, folder.spec(f"{job.module}.weight").shape, job.source_bytes, read)


def _stored(folder: CheckpointFolder, stored: QuantisedModule) -> _HeldModule:
    with naming(folder, stored.name):
        type_of_scheme(stored.scheme)
    return _HeldModule(
        stored.scheme, stored.shape(folder), stored.nbytes(folder), functools.partial(stored.read, folder)
    )


def _planned(model: _Model) -> tuple[list[_Piece], dict[str, TensorSpec]]:
    """The pieces to write, and the tensors that they make up."""
    folder, config = model.folder, model.config
    require_counts(f"{folder.path / CONFIG_FILE}", folder.shard_of, config.layers, config.experts)
    where = places(model.architecture, config.layers, config.experts)
    tied, head = _says_tied(folder), "lm_head.weight"
    plain = {name: name.rpartition(".")[0] for name in _plain_tensors(model)}
    if tied and head in plain and shares_embedding(folder, head):
        del plain[head]
    _require_names(model, set(plain.values()) | set(model.held), set(where), tied)
    pieces = [_plain_piece(model, name, where[module]) for name, module in plain.items()]
    pieces += [_held_piece(model, module, where[module]) for module in model.held]
    if (divisors := config.rope_freqs()) is not None:
        pieces.append(_Piece(Place(ROPE_FREQS), TensorSpec(TYPES["F32"], divisors.shape), 0, lambda: divisors))
    return pieces, _specs(folder, pieces, config.experts)


def _says_tied(folder: CheckpointFolder) -> bool:
    """Whether the config says that the head is the embedding. A head of its own is computed with all the same."""
    return folder.config().get("tie_word_embeddings") is True


def _plain_tensors(model: _Model) -> Iterator[str]:
    """Names of the tensors that belong to no quantised weight."""
    for name in model.folder.shard_of:
        module, _, last = name.rpartition(".")
        if name.endswith(_NOT_WEIGHTS) or (module in model.held and last != "bias"):
            continue
        dtype = model.folder.spec(name).dtype
        if last not in ("weight", "bias") or dtype not in HIGH_PRECISION:
            raise CheckpointError(
                f"{model.folder.path}: tensor {brief(name)} is {dtype}; needs <module>.weight or .bias of "
                f"{', '.join(HIGH_PRECISION)}: run `jaxlowprec dequantize` first, or take it out"
            )
        yield name


def _require_names(model: _Model, modules: set[str], known: set[str], tied: bool) -> None:
    """Raises CheckpointError for modules that llama.cpp has no name for, and for those that it misses."""
    if unknown := sorted(modules - known):
        raise CheckpointError(
            f"{model.folder.path}: {len(unknown)} modules have no name in llama.cpp's {model.architecture.name}: "
            f"{', '.join(unknown[:_SHOWN])}; take them out, or use llama.cpp's own converter"
        )
    if missing := sorted(known - modules - ({"lm_head"} if tied else set())):
        remedy = (
            '; with tied embeddings, config.json says "tie_word_embeddings": true' if missing == ["lm_head"] else ""
        )
        raise CheckpointError(
            f"{model.folder.path}: {len(missing)} modules are missing: {', '.join(missing[:_SHOWN])}{remedy}"
        )


def _order(model: _Model, place: Place, count: int) -> np.ndarray | None:
    """The rows of a weight or bias in llama.cpp's order; None if that is the folder's."""
    heads = heads_of(model.architecture, place, model.config.heads, model.config.kv_heads)
    if heads is None:
        return None
    if count != heads * model.config.head_dim:
        raise CheckpointError(
            f"{model.folder.path}: {place.tensor}: {count} rows; config.json says {heads} heads of "
            f"{model.config.head_dim}"
        )
    return to_neighbours(count, heads)


def _plain_piece(model: _Model, name: str, at: Place) -> _Piece:
    place = Place(at.tensor + name.rpartition(".")[2], at.part)
    spec = model.folder.spec(name)
    model.config.require_shape(f"{model.folder.path}: {name}", place, spec.shape)
    dtype = "F32" if is_float32(place.tensor, len(spec.shape)) else spec.dtype
    order = _order(model, place, spec.shape[0])

    def make() -> np.ndarray:
        array = model.folder.read(name)
        array = array if order is None else array[order]
        return array.astype(np.float32, copy=False) if dtype == "F32" else array

    return _Piece(place, TensorSpec(TYPES[dtype], spec.shape), spec.nbytes, make)


def _held_piece(model: _Model, module: str, at: Place) -> _Piece:
    place, held = Place(at.tensor + "weight", at.part), model.held[module]
    model.config.require_shape(f"{model.folder.path}: {module}", place, held.shape)
    order = _order(model, place, held.shape[0])
    if is_float32(place.tensor, len(held.shape)):
        raise CheckpointError(f"{model.folder.path}: {module} is quantised; llama.cpp needs F32 there: leave it alone")

    def make() -> np.ndarray:
        tensors = held.read()
        with naming(model.folder, module):
            return blocks_of_tensors(held.scheme, tensors if order is None else rows(tensors, order))

    return _Piece(place, TensorSpec(type_of_scheme(held.scheme), held.shape), held.nbytes, make)


def _specs(folder: CheckpointFolder, pieces: Sequence[_Piece], experts: int) -> dict[str, TensorSpec]:
    """Type and shape of every tensor; the experts of a layer are one tensor."""
    by_tensor: dict[str, list[_Piece]] = defaultdict(list)
    for piece in pieces:
        by_tensor[piece.place.tensor].append(piece)
    specs = {}
    for name, parts in by_tensor.items():
        spec = parts[0].spec
        if parts[0].place.part is None:
            specs[name] = spec
            continue
        if len(parts) != experts or any(part.spec != spec for part in parts):
            raise CheckpointError(
                f"{folder.path}: the experts of {name} differ in type or shape, or some are missing; {experts} alike "
                "are one tensor in GGUF"
            )
        specs[name] = TensorSpec(spec.type, (experts, *spec.shape))
    return specs


def _metadata(model: _Model, specs: Mapping[str, TensorSpec]) -> tuple[dict[str, Value], list[str]]:
    """The file's metadata, and warnings."""
    content: dict[str, Any] = model.folder.config()
    vocabulary = specs["token_embd.weight"].shape[0]
    kinds = Counted(spec.type.name for name, spec in specs.items() if not is_float32(name, len(spec.shape)))
    tokenizer, warnings = tokenizer_metadata(model.folder.path, content, vocabulary)
    general: dict[str, Value] = {
        "general.architecture": model.architecture.name,
        "general.type": "model",
        "general.name": text_of(model.folder.path.resolve().name),
        "general.file_type": np.uint32(_FILE_TYPES[kinds.most_common(1)[0][0]]),
        "general.quantization_version": np.uint32(QUANTIZATION_VERSION),
    }
    return general | model.config.metadata(vocabulary) | tokenizer, warnings
