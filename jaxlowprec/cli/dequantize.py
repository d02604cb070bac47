"""`jaxlowprec dequantize`: makes a plain checkpoint from a quantised one."""

from __future__ import annotations

import argparse
from typing import Any

from jaxlowprec.checkpoints.conversion import convert
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.gguf.importing import import_gguf
from jaxlowprec.cli import conversion


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("dequantize", help="bring a quantised checkpoint back to high precision")
    conversion.add_arguments(parser)
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="of the weights"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    how = conversion.convert_options(options)
    if conversion.is_gguf(options.destination):
        raise CheckpointError(
            f"{options.destination}: is a GGUF file; needs a folder: `jaxlowprec convert` writes GGUF"
        )
    if conversion.is_gguf(options.source):
        report = import_gguf(options.source, options.destination, dtype=options.dtype, keep=False, options=how)
    else:
        report = convert.dequantize(options.source, options.destination, dtype=options.dtype, options=how)
    return conversion.show(report, options)
