"""`jaxlowprec watch`: a run's worst layers now, while it trains."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from typing import Any

import numpy as np

from jaxlowprec.arguments import cut
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.cli.report import add_limits, limits_of, loaded
from jaxlowprec.cli.streams import as_json, emit, printable
from jaxlowprec.recipes.roles import GEMMS
from jaxlowprec.telemetry.limits import LONGEST_NAME, Limits, findings
from jaxlowprec.telemetry.recording import RecordFollower, Run

_COLUMNS = ("underflow", "saturation", "floor", "sqnr", "bias")


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("watch", help="a training run's worst layers now, trends and alarms")
    parser.add_argument("run_path", metavar="RUN", help="file of a Recorder, or its folder")
    parser.add_argument("--once", action="store_true", help="print the latest record and end")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="between looks (default 2)")
    parser.add_argument(
        "--layers", type=int, default=12, metavar="N", help="tensors shown, the worst first (default 12)"
    )
    add_limits(parser)
    parser.add_argument("--json", action="store_true", help="print the latest record for machines, and end")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    if not math.isfinite(options.every) or options.every <= 0 or options.layers < 1:
        raise CheckpointError(f"--every {options.every} --layers {options.layers}; needs positive numbers")
    limits = limits_of(options)
    if options.json:
        emit(as_json(_content(loaded(options.run_path), limits)))
        return 0
    if options.once or not sys.stdout.isatty():
        emit(lines(loaded(options.run_path), limits, options.layers))
        return 0
    try:
        from rich.console import Group
        from rich.live import Live
    except ImportError:
        raise CheckpointError("watch: needs rich; pip install 'jaxlowprec[report]', or use --once") from None
    following = RecordFollower(options.run_path)
    with Live(refresh_per_second=4) as live:
        while True:
            live.update(Group(*_shown(loaded(options.run_path, following), limits, options.layers)))
            time.sleep(options.every)


def worst(run: Run, count: int) -> list[tuple[str, str, Any, float]]:
    """Layer, tensor, statistics and the change of the SQNR over the run, of the tensors with the least SQNR."""
    if not run.records:
        return []
    last = run.records[-1]
    names = [name for name in last.names if ", " not in name[1] and name[1] not in GEMMS]
    chosen = []
    for i in np.argsort(last.of(names).sqnr, kind="stable")[:count]:
        layer, tensor = names[i]
        statistics = last.layers[layer][tensor]
        series = [v for v in run.series(layer, tensor, "sqnr") if math.isfinite(v)]
        chosen.append((layer, tensor, statistics, series[-1] - series[0] if series else 0.0))
    return chosen


def _content(run: Run, limits: Limits) -> dict[str, Any]:
    """The latest record and what is wrong in it."""
    about: dict[str, Any] = {"command": "watch", "run": str(run.path), "about": run.about}
    if not run.records:
        return about | {"step": None, "scalars": {}, "findings": [], "layers": {}}
    last = run.records[-1]
    layers = {layer: {name: s.scalars() for name, s in tensors.items()} for layer, tensors in last.layers.items()}
    found = [dataclasses.asdict(finding) for finding in findings(run, limits)]
    numbers = {"scalars": last.scalars, "layers": layers, "changed": last.changed}
    return about | {"step": last.step, "findings": found} | numbers


def _rows(run: Run, count: int) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("layer", "tensor", *_COLUMNS, "trend")]
    for layer, tensor, statistics, trend in worst(run, count):
        shares = [f"{100 * float(getattr(statistics, name)):.1f} %" for name in ("underflow", "saturation", "floor")]
        numbers = (
            *shares,
            f"{float(statistics.sqnr):.1f} dB",
            f"{100 * float(statistics.bias):+.2f} %",
            f"{trend:+.1f} dB",
        )
        rows.append((*(printable(cut(name, LONGEST_NAME)) for name in (layer, tensor)), *numbers))
    return rows


def _head(run: Run) -> str:
    if not run.records:
        return f"{run.path}: nothing is recorded yet"
    last = run.records[-1]
    scalars = "".join(f", {cut(name, LONGEST_NAME)} {value:.4g}" for name, value in last.scalars.items())
    ago = max(0.0, time.time() - last.time)
    return f"{run.path}: step {last.step}{scalars}, {ago:.0f} s ago"


def lines(run: Run, limits: Limits, count: int) -> list[str]:
    """The latest record as lines of text."""
    rows = _rows(run, count)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [_head(run), *(finding.text for finding in findings(run, limits)), *(table if len(rows) > 1 else [])]


def _shown(run: Run, limits: Limits, count: int) -> list[Any]:
    """The table for a terminal, in colours."""
    from rich.table import Table
    from rich.text import Text

    head, *rows = _rows(run, count)
    table = Table(*head)
    for row in rows:
        table.add_row(*map(Text, row))
    alarms = [Text(printable(f.text), style="bold red" if f.severity == 2 else "yellow") for f in findings(run, limits)]
    return [Text(printable(_head(run))), *alarms, table]
