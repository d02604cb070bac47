"""A picture of the error of each layer."""

from __future__ import annotations

import pathlib
import statistics
from collections import defaultdict

from jaxlowprec.checkpoints.conversion.inspect import Inspection, is_number, layer_of
from jaxlowprec.checkpoints.errors import CheckpointError

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
