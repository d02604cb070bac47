"""A run's record, or several, as one self-contained page: no network, no server.

Charts are Vega-Lite specifications; `vl_convert` has the scripts that draw them. The page's own script, page.js,
chooses what they show.
"""

from __future__ import annotations

import html
import json
import math
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxlowprec.recipes.roles import GEMMS
from jaxlowprec.telemetry.limits import Finding, Limits, findings
from jaxlowprec.telemetry.recording import Run

_HERE = pathlib.Path(__file__).parent
STATISTICS = {
    "underflow": "underflow, fraction of elements",
    "sqnr": "SQNR, dB",
    "saturation": "cut off, fraction of elements",
    "nonfinite": "infinite or NaN, fraction of elements",
    "poisoned": "lost to a neighbour, fraction of elements",
    "zeros": "zeros, fraction of elements",
    "bias": "bias of the rounding",
    "amax": "largest magnitude",
    "rms": "root mean square",
    "smallest_scale": "smallest scale",
    "largest_scale": "largest scale",
    "floor": "blocks at the smallest scale, fraction",
    "block_range": "largest over median of a block",
    "outliers": "outliers, fraction of elements",
    "changed": "codes changed since the record before, fraction",
}
"""The statistics of a tensor or of a GEMM's result that the page shows, with the words for them."""


def page(
    runs: Sequence[Run], limits: Limits | None = None, title: str = "Telemetry", noise_floor: Run | None = None
) -> str:
    """The page's HTML.

    Arguments:
        runs: the first one is what the others are compared with.
        limits: see `findings`.
        noise_floor: a run that differs from the first one by nothing but noise; its gap is drawn dashed.

    Raises:
        ImportError: vl-convert-python is not installed.
    """
    try:
        import vl_convert
    except ImportError as error:
        raise ImportError("telemetry report: needs vl-convert-python; pip install 'jaxlowprec[report]'") from error
    runs = [*runs] if noise_floor is None else [*runs, noise_floor]
    names = _names(runs)
    found = {name: findings(run, limits) for name, run in zip(names, runs, strict=True)}
    content = {
        "runs": [_of_run(name, run) for name, run in zip(names, runs, strict=True)],
        "noise_floor": None if noise_floor is None else names[-1],
        "statistics": STATISTICS,
    }
    parts = {
        "title": html.escape(title),
        "summary": _summary(names, runs, found),
        "findings": _offenders(found),
        "style": (_HERE / "page.css").read_text(),
        "vega": vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"),
        "data": json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "script": (_HERE / "page.js").read_text(),
    }
    template = (_HERE / "page.html").read_text()
    return re.sub(r"<!--(\w+)-->", lambda found: parts[found[1]], template)  # once: parts may look like the template's


def _names(runs: Sequence[Run]) -> list[str]:
    """A name for each run: its folder's or file's, with a number where two are alike."""
    names: list[str] = []
    for run in runs:
        name = run.path.parent.name if run.path.name == "telemetry.jsonl" else run.path.stem
        names.append(name if name not in names else f"{name} ({len(names) + 1})")
    return names


def _of_run(name: str, run: Run) -> dict[str, Any]:
    """The data of the script's charts: for each layer and tensor a list of numbers by statistic, one per step."""
    tensors: dict[str, dict[str, Any]] = {}
    for layer, tensor in (name for record in run.records for name in record.names):
        tensors.setdefault(layer, {})[tensor] = {}
    layers = {layer: tensors[layer] for layer in sorted(tensors, key=_natural)}
    names = [(layer, tensor) for layer, found in layers.items() for tensor in found]
    seen = [(record.of(names), record.changes(names)) for record in run.records]
    for statistic in STATISTICS:
        series = [changes if statistic == "changed" else getattr(found, statistic) for found, changes in seen]
        for (layer, tensor), values in zip(names, np.transpose(series), strict=False):
            if not np.isnan(values).all():
                layers[layer][tensor][statistic] = _numbers(values)
    last = run.records[-1].layers if run.records else {}
    distributions = {
        layer: {
            tensor: {k: _numbers(getattr(s, k)) for k in ("codes", "scales")}
            for tensor, s in tensors.items()
            if tensor not in GEMMS
        }
        for layer, tensors in last.items()
    }
    scalars = dict.fromkeys(name for record in run.records for name in record.scalars)
    return {
        "name": name,
        "steps": run.steps,
        "scalars": {n: _numbers([record.scalars.get(n, math.nan) for record in run.records]) for n in scalars},
        "layers": layers,
        "distributions": distributions,
    }


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts names so that blocks/2 comes before blocks/10. Python's int() takes only some thousands of digits."""
    parts = re.split(r"(\d+)", name)
    return [(len(part.lstrip("0")), part.lstrip("0")) if part.isdecimal() else (-1, part) for part in parts]


def _numbers(values: Any) -> list[float | None]:
    """Rounds to four digits; None where there is no finite number."""
    return [float(f"{v:.4g}") if math.isfinite(v) else None for v in map(float, values)]


def _summary(names: Sequence[str], runs: Sequence[Run], found: dict[str, list[Finding]]) -> str:
    rows = []
    for name, run in zip(names, runs, strict=True):
        about = ", ".join(f"{key} {value}" for key, value in run.about.items()) or "-"
        steps = f"{len(run.records)} records, step {run.steps[0]} to {run.steps[-1]}" if run.records else "no records"
        loss = run.records[-1].scalars.get("loss") if run.records else None
        count = len(found[name])
        rows.append((0, (name, about, steps, "-" if loss is None else f"{loss:.4f}", str(count) if count else "none")))
    return _table(("run", "about", "recorded", "loss", "findings"), rows)


def _offenders(found: dict[str, list[Finding]]) -> str:
    rows = [
        (finding.severity, (name, finding.layer, finding.tensor, finding.problem, str(finding.since), finding.remedy))
        for name, of_run in found.items()
        for finding in of_run
    ]
    if not rows:
        return "<p>Nothing is beyond its limit in the latest records.</p>"
    return _table(("run", "layer", "tensor", "finding", "since step", "remedy"), rows)


def _table(head: Sequence[str], rows: Sequence[tuple[int, Sequence[str]]]) -> str:
    """A table; each row comes with its severity."""
    names = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(
        f'<tr class="severity{severity}">' + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for severity, row in rows
    )
    return f"<table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"
