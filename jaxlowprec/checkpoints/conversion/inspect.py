"""Lists a checkpoint: format and size of each module, its error against high precision, and a picture of it."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxlowprec.checkpoints.conversion.jobs import Counter, Progress, in_parallel
from jaxlowprec.checkpoints.conversion.modules import (
    QuantisedModule,
    Weight,
    is_quantised,
    quantised_modules,
    scheme_of,
    weights_in,
)
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.dtypes import HIGH_PRECISION
from jaxlowprec.checkpoints.files.folder import CONFIG_FILE, CheckpointFolder
from jaxlowprec.checkpoints.schemes.base import Scheme

_CHUNK = 1 << 20
_DIGITS = 9  # of a layer's number: a longer run of digits is a name


@dataclasses.dataclass(frozen=True)
class WeightError:
    """How far decoded weights are from the reference.

    Attributes:
        sqnr_db: signal-to-quantisation-noise ratio, 10 log10(sum w^2 / sum (w - decoded)^2); None if there is no noise,
            -infinity where decoded weights are infinite, NaN where either is NaN.
        max_abs: the largest |w - decoded|, infinity and NaN included.
    """

    sqnr_db: float | None
    max_abs: float


@dataclasses.dataclass(frozen=True)
class InspectedModule:
    """A module's weight, or a tensor that belongs to no module.

    Attributes:
        name: the name of the module or tensor.
        format: a scheme's name, or the dtype in the file.
        shape: the shape of the weight.
        nbytes: the bytes of all tensors of the module.
        error: the error against the reference; None if there is nothing to compare with.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    nbytes: int
    error: WeightError | None = None

    @property
    def bits(self) -> float:
        """Bits per element of the weight, scales included."""
        return 8 * self.nbytes / max(math.prod(self.shape), 1)


@dataclasses.dataclass(frozen=True)
class Inspection:
    """A checkpoint's modules, in the order of their layers."""

    path: str
    scheme: str | None
    modules: tuple[InspectedModule, ...]

    @property
    def by_format(self) -> dict[str, tuple[int, int]]:
        """Maps each format to the number of its modules and their bytes."""
        found: dict[str, tuple[int, int]] = {}
        for module in self.modules:
            count, nbytes = found.get(module.format, (0, 0))
            found[module.format] = (count + 1, nbytes + module.nbytes)
        return found

    def as_json(self) -> dict[str, Any]:
        """The inspection as a JSON object."""
        formats = {name: {"modules": count, "bytes": nbytes} for name, (count, nbytes) in self.by_format.items()}
        modules = [{**dataclasses.asdict(m), "bits_per_element": m.bits} for m in self.modules]
        return {"path": self.path, "scheme": self.scheme, "formats": formats, "modules": modules}


def inspect(
    path: str | pathlib.Path,
    reference: str | pathlib.Path | None = None,
    *,
    workers: int = 2,
    progress: Progress | None = None,
) -> Inspection:
    """Lists a checkpoint's modules.

    Arguments:
        path: folder of a checkpoint, plain or quantised.
        reference: folder of the same checkpoint in high precision: each module is compared with it.
        workers: modules compared, and in memory, at a time.
        progress: see `jobs.Progress`.

    Raises:
        CheckpointError: a folder is not a checkpoint, the config's format is unknown, or the reference lacks a weight
            or has it in another shape.
    """
    with CheckpointFolder(path) as opened:
        scheme = _scheme_of(opened)
        held = quantised_modules(opened, scheme) if scheme else {}
        modules = _modules(opened, held)
        if reference is not None:
            with CheckpointFolder(reference) as against:
                modules = _compared(modules, opened, against, held, workers, progress)
    ordered = sorted(modules, key=lambda module: _layer_order(module.name))
    return Inspection(str(path), scheme.name if scheme else None, tuple(ordered))


def _scheme_of(folder: CheckpointFolder) -> Scheme | None:
    return scheme_of(folder) if is_quantised(folder) else None


def _modules(folder: CheckpointFolder, held: Mapping[str, QuantisedModule]) -> list[InspectedModule]:
    found = [
        InspectedModule(name, module.scheme.name, module.shape(folder), module.nbytes(folder))
        for name, module in held.items()
    ]
    tensors = {name for module in held.values() for name in module.tensors.values()}
    for name in folder.shard_of:
        if name not in tensors:
            spec = folder.spec(name)
            found.append(InspectedModule(name.removesuffix(".weight"), spec.dtype, spec.shape, spec.nbytes))
    return found


def _compared(
    modules: list[InspectedModule],
    folder: CheckpointFolder,
    reference: CheckpointFolder,
    held: Mapping[str, QuantisedModule],
    workers: int,
    progress: Progress | None,
) -> list[InspectedModule]:
    counter = Counter(sum(module.nbytes for module in modules), "comparing", progress)
    config = reference.config() if (reference.path / CONFIG_FILE).exists() else {}
    of_arrays = weights_in(reference, config)
    found: list[InspectedModule] = []

    def compare(module: InspectedModule) -> None:
        own = held.get(module.name)
        name = module.name if module.name in folder.shard_of else f"{module.name}.weight"
        name = own.weight_name if own else name
        if name in reference.shard_of:
            against = Weight(module.name, name, reference.spec(name))
        elif module.name in of_arrays:
            against = of_arrays[module.name]
        else:
            raise CheckpointError(f"{reference.path}: has no {name!r} to compare with")
        other = against.spec
        if other.shape != module.shape:
            raise CheckpointError(
                f"{reference.path}: {name!r} is {list(other.shape)}, in {folder.path} it is {list(module.shape)}"
            )
        error = None
        if own and own.scheme.of_expert_arrays:
            error = error_of_parts(zip(own.experts(folder, "float32"), against.experts(reference), strict=True))
        elif own:
            error = error_of(own.decode(folder, "float32"), against.read(reference))
        elif other.dtype in HIGH_PRECISION and folder.spec(name).dtype in HIGH_PRECISION:
            error = error_of(folder.read(name), against.read(reference))
        found.append(dataclasses.replace(module, error=error))
        counter.add(module.nbytes)

    in_parallel(compare, modules, workers)
    return found


def error_of(decoded: np.ndarray, reference: np.ndarray) -> WeightError:
    """Compares two arrays of one size piece by piece, with sums in float64. NaN and infinity stay what they are."""
    return error_of_parts([(decoded, reference)])


def error_of_parts(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> WeightError:
    """`error_of` of two arrays that come in parts."""
    signal: Any = np.float64(0)
    noise: Any = np.float64(0)
    largest = np.float64(0)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for decoded, reference in pairs:
            a, b = decoded.reshape(-1), reference.reshape(-1)
            for begin in range(0, b.size, _CHUNK):
                w = b[begin : begin + _CHUNK].astype(np.float64)
                difference = w - a[begin : begin + _CHUNK].astype(np.float64)
                signal += w @ w
                noise += difference @ difference
                largest = np.maximum(largest, np.abs(difference).max())
        if noise == 0:
            return WeightError(None, float(largest))
        return WeightError(float(10 * np.log10(signal / noise)), float(largest))


def is_number(part: str) -> bool:
    """Whether a part of a module's name is the number of a layer or expert: ASCII digits, not too many.

    >>> [is_number(part) for part in ("12", "w1", "²", "9" * 5000)]
    [True, False, False, False]
    """
    return part.isascii() and part.isdigit() and len(part) <= _DIGITS


def layer_of(name: str) -> int | None:
    """The first number in a module's name, which is its layer."""
    return next((int(part) for part in name.split(".") if is_number(part)), None)


def _layer_order(name: str) -> list[tuple[int, int, str]]:
    """A sort key that orders numbers in names as numbers."""
    return [(0, int(part), "") if is_number(part) else (1, 0, part) for part in name.split(".")]


_LEAST_RANGE = 2.0  # dB: tenths of a dB are not a difference between layers


def plot_sqnr(inspection: Inspection, path: str | pathlib.Path) -> None:
    """Draws the SQNR of every compared module that has noise, over the layers; one line per kind of module.

    If a layer has several modules of a kind (experts), the line is their median the band goes from least to largest.

    Arguments:
        inspection: an inspection with a reference.
        path: the picture's path; its ending says the format (png, svg, pdf).

    Raises:
        CheckpointError: matplotlib is missing or does not know the format, or nothing was compared.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise CheckpointError("--plot needs matplotlib: pip install matplotlib") from None
    series = sqnr_by_kind(inspection)
    if not series:
        raise CheckpointError(f"{inspection.path}: no module has an error to draw; give --reference, of other numbers")
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    axes = figure.subplots()
    layers = sorted({layer for points in series.values() for layer in points if layer is not None})
    outside = (layers[-1] if layers else -1) + 1  # the place of modules that belong to no layer
    for number, (kind, points) in enumerate(series.items()):
        places = sorted((outside if layer is None else layer, values) for layer, values in points.items())
        x = [place for place, _ in places]
        color = f"C{number % 10}"
        marker = "os^Dv"[number // 10 % 5]
        axes.plot(x, [statistics.median(values) for _, values in places], marker=marker, ms=4, color=color, label=kind)
        if any(len(values) > 1 for _, values in places):
            low, high = [min(values) for _, values in places], [max(values) for _, values in places]
            axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
    axes.set_xlabel("layer")
    axes.set_ylabel("SQNR / dB")
    title = f"{pathlib.Path(inspection.path).name}: {inspection.scheme or 'weights'} against the reference"
    axes.set_title(title, parse_math=False)  # a name is not a formula
    ticks = [int(t) for t in MaxNLocator(integer=True).tick_values(0, max(outside - 1, 1)) if 0 <= t < outside]
    labels = [str(tick) for tick in ticks]
    if any(None in points for points in series.values()):
        axes.axvline(outside - 0.5, color="0.8", linewidth=1)
        ticks, labels = [*ticks, outside], [*labels, "others"]
    axes.set_xticks(ticks, labels)
    bottom, top = axes.get_ylim()
    margin = max(0.0, _LEAST_RANGE - (top - bottom)) / 2
    axes.set_ylim(bottom - margin, top + margin)
    axes.grid(alpha=0.3)
    legend = axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize="small")
    for text in legend.get_texts():
        text.set_parse_math(False)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise CheckpointError(f"{path}: cannot be drawn: {error}") from None


def sqnr_by_kind(inspection: Inspection) -> dict[str, dict[int | None, list[float]]]:
    """Maps each kind of module (its name without numbers, from the layer on) to {layer: SQNR of its modules in dB}."""
    found: dict[str, dict[int | None, list[float]]] = defaultdict(lambda: defaultdict(list))
    for module in inspection.modules:
        if module.error is not None and module.error.sqnr_db is not None:
            parts = module.name.split(".")
            layer = layer_of(module.name)
            after = (
                parts[next(i for i, part in enumerate(parts) if is_number(part)) + 1 :] if layer is not None else parts
            )
            found[".".join(part for part in after if not is_number(part))][layer].append(module.error.sqnr_db)
    return found
