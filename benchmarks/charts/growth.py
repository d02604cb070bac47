"""How time grows with the size of an array."""

from __future__ import annotations

import math

from recorded import load, where

from charts.lines import Axis, Curve, LineChart, Plot


def growth() -> LineChart:
    """Time per element from the smallest to the largest array."""
    result = load("scaling")
    sizes = sorted({c["elements"] for c in result["cases"]})
    names = dict.fromkeys(c["operation"] for c in result["cases"])
    curves = tuple(
        Curve(
            name,
            tuple(
                (math.log2(c["elements"]), c["nanoseconds_per_element"])
                for c in sorted(result["cases"], key=lambda c: c["elements"])
                if c["operation"] == name
            ),
            f"line{i}",
        )
        for i, name in enumerate(names)
    )
    high = 0.1 * math.ceil(10 * max(y for curve in curves for _, y in curve.points))
    plot = Plot(
        "NVFP4",
        "nanoseconds per element, by elements",
        Axis(tuple((math.log2(n), f"{n >> 20} M") for n in sizes), math.log2(sizes[0]), math.log2(sizes[-1])),
        Axis(tuple((0.1 * i, f"{0.1 * i:.1f}") for i in range(round(10 * high) + 1)), 0, high),
        curves,
        180,
    )
    about = (
        "A flat line: an array of four times the size takes four times as long. AVX-512 only: AVX2 was not recorded."
    )
    return LineChart("Growth", about, (plot,), where(result))
