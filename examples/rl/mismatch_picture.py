"""A picture of how far an engine's log-probabilities are from the trainer's."""

from __future__ import annotations

import functools
import math
import operator
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxlowprec.arguments import shown
from jaxlowprec.rl.measures import BINS, DECADES, EDGES, PER_DECADE, PROBABILITIES, Mismatch

_MIDDLE = BINS // 2
_BODY, _EXTREME, _LINE, _BAND, _MUTED = "#3b6ea8", "#d1495b", "#2a4d77", "#a9c3e0", "#5c6670"


def plot(found: Mismatch | Sequence[Mismatch], path: str | pathlib.Path, *, title: str = "Engine and trainer") -> None:
    """Draws the distribution of log-ratios, over the engine's probability too; of several, also how it changes.

    The scale of log-ratios is logarithmic on both sides of zero. Each row of the map is one tenth of the engine's
    probability; its colours are shares of that row's tokens. Columns at both ends have what is outside of the scale.

    Arguments:
        found: of one batch, or one of each iteration in their order.
        path: the picture's path; its ending says the format (png, svg, pdf).
        title: the words above the picture.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: `found` is something else.
        ValueError: there is nothing to draw, thresholds differ, or matplotlib does not know the format.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ImportError("plot: needs matplotlib; pip install matplotlib") from error
    series = [found] if isinstance(found, Mismatch) else found
    if not isinstance(series, list | tuple) or not all(isinstance(each, Mismatch) for each in series):
        raise TypeError(f"plot: found={shown(found)}; needs a Mismatch, or a list of them")
    series = [each.on_host() for each in series]
    whole = functools.reduce(operator.add, series) if series else None
    if whole is None or not int(whole.tokens):
        raise ValueError("plot: no token was compared; needs one or more")
    several = len(series) > 1
    figure = Figure(figsize=(12 if several else 7.6, 6.4), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06))
    grid = figure.add_gridspec(2, 2 if several else 1, width_ratios=(1.15, 1) if several else None)
    _distribution(figure.add_subplot(grid[0, 0]), whole)
    _by_probability(figure, figure.add_subplot(grid[1, 0]), whole)
    if several:
        _divergence(figure.add_subplot(grid[0, 1]), series)
        _ratios(figure.add_subplot(grid[1, 1]), series)
    figure.suptitle(f"{title}\n", fontsize=14, fontweight="bold", x=0.01, ha="left", parse_math=False)
    figure.text(0.012, 0.945, _words(whole), fontsize=9.5, color=_MUTED, va="top")
    figure.savefig(path, dpi=130)


def _words(whole: Mismatch) -> str:
    parts = [
        f"{int(whole.tokens):,} tokens",
        f"k1 {whole.k1:+.2e}",
        f"k3 {whole.k3:.2e}",
        f"extreme {100 * whole.extreme_fraction:.2g} %",
        f"effective sample size {100 * whole.effective_sample_size:.4g} %",
    ]
    left_out = int(whole.nonfinite)
    return "   ·   ".join(parts + ([f"{left_out:,} not finite"] if left_out else []))


def _distribution(axes: Any, whole: Mismatch) -> None:
    counts = whole.histogram
    extreme = _extreme_bins(whole.threshold)
    axes.bar(range(BINS), counts, width=0.9, color=[_EXTREME if far else _BODY for far in extreme])
    axes.set_yscale("log")
    axes.set_ylim(0.7, max(2.0, 3.0 * counts.max()))
    axes.set_ylabel("tokens")
    axes.set_title("How far log-probabilities are apart", loc="left", fontsize=11)
    ratio = f"{math.exp(whole.threshold):.3g}"
    words = f"ratio above {ratio} or below 1/{ratio}: {int(whole.extreme):,} of {int(whole.tokens):,}"
    axes.set_title(words, loc="right", fontsize=9, color=_EXTREME)
    axes.axvline(_MIDDLE, color="0.55", linewidth=0.6, zorder=0)
    _log_ratio_axis(axes)


def _extreme_bins(threshold: float) -> np.ndarray:
    """bool [bins]: whether the log-ratio in the middle of a bin is extreme."""
    centres = np.asarray([_centre(place) for place in range(BINS)])
    return np.abs(centres) >= threshold


def _centre(place: int) -> float:
    if place == _MIDDLE:
        return 0.0
    if place in (0, BINS - 1):
        return math.copysign(math.inf, place - _MIDDLE)
    low, high = EDGES[place - 1], EDGES[place]
    return math.copysign(math.sqrt(low * high), low)


def _log_ratio_axis(axes: Any) -> None:
    """Ticks at some powers of ten on both sides of zero."""
    ticks = {float(_MIDDLE): "0"}
    for exponent, name in {-4: "$10^{-4}$", -2: "0.01", -1: "0.1", 0: "1", 1: "10"}.items():
        beside = 0.5 + PER_DECADE * (exponent - DECADES[0])
        ticks |= {_MIDDLE - beside: "\N{MINUS SIGN}" + name, _MIDDLE + beside: name}
    axes.set_xticks(list(ticks), list(ticks.values()), fontsize=8.5)
    axes.set_xlim(-0.6, BINS - 0.4)
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_axisbelow(True)
    axes.set_xlabel("trainer's log-probability minus the engine's")


def _by_probability(figure: Any, axes: Any, whole: Mismatch) -> None:
    counts = np.asarray(whole.counts, np.float64)
    rows = counts.sum(axis=1, keepdims=True)
    shares = np.where(counts > 0, counts / np.maximum(rows, 1), np.nan)
    extent = (-0.5, BINS - 0.5, 0, 1)
    darkest = 100 * float(np.nanmax(shares))
    image = axes.imshow(
        100 * shares, origin="lower", aspect="auto", extent=extent, cmap="Blues", vmin=-darkest / 6, vmax=darkest
    )
    _log_ratio_axis(axes)
    axes.set_yticks(np.arange(0, PROBABILITIES + 1, 2) / PROBABILITIES)
    axes.set_ylabel("engine's probability")
    axes.set_title("Which tokens they are apart for", loc="left", fontsize=11)
    axes.grid(visible=False)
    bar = figure.colorbar(image, ax=axes, pad=0.015, fraction=0.045)
    bar.set_label("tokens of the row (%)", fontsize=9)
    bar.ax.set_ylim(0, darkest)
    bar.outline.set_visible(False)


def _divergence(axes: Any, series: Sequence[Mismatch]) -> None:
    steps = np.arange(1, len(series) + 1)
    lines = {
        "mean size of log-ratios": ([each.mean_absolute for each in series], _BAND),
        "k3": ([each.k3 for each in series], _LINE),
        "k2": ([each.k2 for each in series], "#e0a458"),
        "extreme fraction": ([each.extreme_fraction for each in series], _EXTREME),
    }
    drawn = []
    for name, (values, color) in lines.items():
        positive = np.where(np.asarray(values) > 0, values, np.nan)
        if np.isfinite(positive).any():
            drawn += positive[np.isfinite(positive)].tolist()
            style: dict[str, Any] = {"linestyle": (0, (2, 2)) if name == "k2" else "-", "linewidth": 1.6}
            if name == "extreme fraction":
                style = {"marker": "o", "ms": 3, "linestyle": ""}
            axes.plot(steps, positive, color=color, label=name, **style)
    axes.set_title("Over the iterations", loc="left", fontsize=11)
    if drawn:
        axes.set_yscale("log")
        axes.set_ylim(min(drawn) / 3, max(drawn) * 30)
        axes.legend(frameon=False, fontsize=9, loc="upper left", ncols=2)
    else:
        axes.text(0.5, 0.5, "no log-probability differs", transform=axes.transAxes, ha="center", color=_MUTED)
        axes.set_yticks([])
    _over_iterations(axes, len(series))


def _ratios(axes: Any, series: Sequence[Mismatch]) -> None:
    from matplotlib.ticker import LogLocator

    steps = np.arange(1, len(series) + 1)
    low, high = [each.least_ratio for each in series], [each.largest_ratio for each in series]
    axes.fill_between(steps, low, high, color=_BAND, alpha=0.8, linewidth=0, label="least to largest ratio")
    size = [each.effective_sample_size for each in series]
    axes.plot(steps, size, color=_LINE, linewidth=1.6, label="effective sample size, share")
    axes.axhline(1, color="0.4", linewidth=0.6)
    axes.set_title("Ratios of probabilities", loc="left", fontsize=11)
    finite = [math.log(v) for v in low + high + size if 0 < v < math.inf]
    if max(map(abs, finite), default=0.0) > 0.5:
        axes.set_yscale("log")
        bottom, top = math.exp(min(finite)), math.exp(max(finite))
        axes.set_ylim(bottom / 1.3, top * (top / bottom) ** 0.25)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if top / bottom < 1e3 else (1,)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    else:
        apart = max(0.01, *(abs(v - 1) for v in low + high + size))
        axes.set_ylim(1 - 1.2 * apart, 1 + 1.8 * apart)
    axes.legend(frameon=False, fontsize=9, loc="upper left", ncols=2)
    _over_iterations(axes, len(series))


def _over_iterations(axes: Any, count: int) -> None:
    axes.set_xlim(1, count)
    axes.set_xlabel("iteration")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25, linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
