"""`jaxlowprec inspect`: lists what a checkpoint holds."""

from __future__ import annotations

import argparse
from typing import Any

from jaxlowprec.arguments import cut
from jaxlowprec.checkpoints.conversion.inspect import InspectedModule, Inspection, inspect, plot_sqnr
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.gguf import inspect_gguf
from jaxlowprec.cli.conversion import is_gguf
from jaxlowprec.cli.streams import as_json, bar, emit, printable, readable

_WIDEST = 120  # characters of a column; longer cells stick out, so that a name of a megabyte does not widen every line


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("inspect", help="formats, sizes and errors of a checkpoint's weights")
    parser.add_argument("path", metavar="PATH", help="folder of a checkpoint, plain or quantised; or a GGUF file")
    parser.add_argument("--reference", metavar="PATH", help="the same checkpoint in high precision, to compare with")
    parser.add_argument("--json", action="store_true", help="for machines, and no progress bar")
    parser.add_argument("--plot", metavar="FILE", help="a picture of the SQNR of each layer (needs --reference)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="modules compared at a time (default 2)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    if options.plot and not options.reference:
        raise CheckpointError("--plot draws errors; give --reference, the checkpoint in high precision")
    if options.workers < 1:
        raise CheckpointError(f"--workers {options.workers}; needs 1 or more")
    if is_gguf(options.path):
        if options.reference:
            raise CheckpointError(
                "--reference compares folders; make one with `jaxlowprec dequantize FILE.gguf FOLDER`"
            )
        found = inspect_gguf(options.path)
    else:
        found = inspect(options.path, options.reference, workers=options.workers, progress=bar(options.json))
    if options.plot:
        plot_sqnr(found, options.plot)
    emit(as_json(found.as_json()) if options.json else render(found))
    return 0


def render(found: Inspection) -> list[str]:
    """The inspection as lines of text."""
    compared = any(module.error for module in found.modules)
    heads = ("module", "format", "shape", "size", "bits/element", *(("SQNR / dB", "max error") if compared else ()))
    rows = [heads, *(_row(module, compared) for module in found.modules)]
    widths = [min(max(len(row[i]) for row in rows), _WIDEST) for i in range(len(heads))]
    table = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    total = sum(module.nbytes for module in found.modules)
    formats = [f"  {name}: {count}, {readable(nbytes)}" for name, (count, nbytes) in sorted(found.by_format.items())]
    head = f"{found.path}: {found.scheme or 'not quantised'}, {len(found.modules)} modules, {readable(total)}"
    return [head, *formats, "", table[0], "-" * len(table[0]), *table[1:]]


def _row(module: InspectedModule, compared: bool) -> tuple[str, ...]:
    shape = " x ".join(map(str, module.shape)) or "scalar"
    row = (printable(cut(module.name, _WIDEST)), module.format, shape, readable(module.nbytes), f"{module.bits:.2f}")
    if not compared:
        return row
    if module.error is None:
        return (*row, "-", "-")
    sqnr = module.error.sqnr_db
    return (*row, "exact" if sqnr is None else f"{sqnr:.2f}", f"{module.error.max_abs:.3g}")
