"""`jaxlowprec convert`: makes a quantised checkpoint from a plain one."""

from __future__ import annotations

import argparse
from typing import Any

from jaxlowprec.checkpoints import schemes
from jaxlowprec.checkpoints.conversion import convert
from jaxlowprec.checkpoints.conversion.presets import DEFAULTS
from jaxlowprec.cli import conversion

_RULE = "a module's name, or \"re:\" and a regular expression matched from the name's start"


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("convert", help="quantise a checkpoint")
    conversion.add_arguments(parser)
    parser.add_argument("--scheme", required=True, choices=schemes.NAMES, help="format of the new weights")
    parser.add_argument("--group-size", type=int, metavar="N", help="elements that share a scale, where that is open")
    parser.add_argument(
        "--ignore", nargs="+", action="extend", default=[], metavar="RULE", help=f"leave alone: {_RULE}"
    )
    parser.add_argument(
        "--include",
        nargs="+",
        action="extend",
        default=[],
        metavar="RULE",
        help="quantise although the default rules leave it alone",
    )
    parser.add_argument("--no-defaults", action="store_true", help="leave nothing alone but what --ignore says")
    parser.add_argument(
        "--leave-unfit", action="store_true", help="leave weights alone that the format cannot hold, and list them"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    report = convert.convert(
        options.source,
        options.destination,
        convert.scheme_for(options.source, options.scheme, group_size=options.group_size),
        ignore=options.ignore,
        include=options.include,
        defaults=() if options.no_defaults else DEFAULTS,
        leave_unfit=options.leave_unfit,
        run=conversion.run_of(options),
    )
    return conversion.show(report, options)
