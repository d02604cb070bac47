"""`jaxlowprec convert`: makes a quantised checkpoint from a plain one."""

from __future__ import annotations

import argparse
from typing import Any

from jaxlowprec.checkpoints import schemes
from jaxlowprec.checkpoints.conversion import convert
from jaxlowprec.checkpoints.conversion.presets import DEFAULTS
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.cli import conversion

_RULE = "a module's name, or \"re:\" and a regular expression matched from the name's start"


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("convert", help="quantise a checkpoint")
    conversion.add_arguments(parser)
    parser.add_argument("--scheme", required=True, choices=schemes.NAMES, help="format of the new weights")
    parser.add_argument(
        "--group-size", type=int, metavar="N", help="elements that share a scale, where that is open; -1: a whole row"
    )
    parser.add_argument(
        "--scheme-for",
        nargs="+",
        action="extend",
        default=[],
        metavar="RULE=SCHEME",
        help=f"another format for some weights, as NAME or NAME:GROUP_SIZE. A rule is {_RULE}; the first counts",
    )
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
        overrides=_overrides(options),
        ignore=options.ignore,
        include=options.include,
        defaults=() if options.no_defaults else DEFAULTS,
        leave_unfit=options.leave_unfit,
        run=conversion.run_of(options),
    )
    return conversion.show(report, options)


def _overrides(options: argparse.Namespace) -> dict[str, schemes.Scheme]:
    """What --scheme-for says: rules and their schemes."""
    found: dict[str, schemes.Scheme] = {}
    for given in options.scheme_for:
        rule, equals, said = given.rpartition("=")
        name, colon, size = said.partition(":")
        if not equals or name not in schemes.NAMES or (colon and not size.removeprefix("-").isdecimal()):
            raise CheckpointError(
                f"--scheme-for {given!r}; needs RULE=SCHEME or RULE=SCHEME:GROUP_SIZE, such as "
                f"'re:.*self_attn=fp8_channel'; schemes are {', '.join(schemes.NAMES)}"
            )
        if rule in found:
            raise CheckpointError(f"--scheme-for {given!r}: the rule {rule!r} was given before; needs one scheme")
        found[rule] = convert.scheme_for(options.source, name, group_size=int(size) if colon else None)
    return found
