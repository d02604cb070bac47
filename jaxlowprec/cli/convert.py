"""`jaxlowprec convert`: makes a quantised checkpoint from a plain one, and GGUF files from folders and back."""

from __future__ import annotations

import argparse
import re
from typing import Any

from jaxlowprec.checkpoints import schemes
from jaxlowprec.checkpoints.calibration import Calibration, Method
from jaxlowprec.checkpoints.conversion import convert
from jaxlowprec.checkpoints.conversion.rules import DEFAULTS
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.gguf.exporting import export_gguf, scheme_for_gguf
from jaxlowprec.checkpoints.gguf.importing import import_gguf
from jaxlowprec.cli import conversion

_SIZE = re.compile(r"-?[0-9]{1,9}")
_RULE = "a module's name, or \"re:\" and a regular expression matched from the name's start"


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("convert", help="quantise a checkpoint, or convert to and from GGUF")
    conversion.add_arguments(parser)
    parser.add_argument(
        "--scheme", choices=schemes.NAMES, help="format of the new weights; may be left out to or from a GGUF file"
    )
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
    parser.add_argument(
        "--calibrate",
        metavar="TEXT_FILE",
        help="choose codes, scales and static scales of activations by what the model computes from this text (UTF-8)",
    )
    parser.add_argument(
        "--calibrate-by",
        choices=("feedback", "search"),
        help="hand the error of a column on to later ones (the default), or only search scales",
    )
    parser.add_argument("--calibrate-rows", type=int, metavar="N", help="rows of text to calibrate by (default 64)")
    parser.add_argument("--calibrate-context", type=int, metavar="N", help="tokens of a row (default 512)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    return conversion.show(_report(options), options)


def _report(options: argparse.Namespace) -> convert.Report:
    rules: dict[str, Any] = {
        "ignore": options.ignore,
        "include": options.include,
        "defaults": () if options.no_defaults else DEFAULTS,
        "leave_unfit": options.leave_unfit,
    }
    how, name, size = conversion.convert_options(options), options.scheme, options.group_size
    calibration = _calibration(options)
    if conversion.is_gguf(options.source):
        _refuse_rules(options, "from GGUF codes are kept as they are; `dequantize` decodes them")
        if conversion.is_gguf(options.destination):
            raise CheckpointError(f"{options.destination}: both are GGUF files; from GGUF needs the path of a folder")
        return import_gguf(options.source, options.destination, options=how)
    if conversion.is_gguf(options.destination):
        if name is None:
            _refuse_rules(options, "to GGUF without --scheme nothing is quantised")
            return export_gguf(options.source, options.destination, options=how)
        if options.scheme_for:
            raise CheckpointError("--scheme-for does nothing here: a GGUF file is written in one format")
        return export_gguf(options.source, options.destination, scheme_for_gguf(name, size), **rules, options=how)
    if name is None:
        raise CheckpointError(f"--scheme is missing; needs one of {', '.join(schemes.NAMES)}")
    rules |= {"overrides": _overrides(options), "calibration": calibration}
    scheme = convert.scheme_for(options.source, name, group_size=size, static=calibration is not None)
    return convert.convert(options.source, options.destination, scheme, **rules, options=how)


def _calibration(options: argparse.Namespace) -> Calibration | None:
    """The calibration that the options ask for. Raises CheckpointError where they do nothing."""
    given = {"rows": options.calibrate_rows, "context": options.calibrate_context}
    more = {name: value for name, value in given.items() if value is not None}
    if options.calibrate is None:
        if more or options.calibrate_by:
            raise CheckpointError("--calibrate-by, --calibrate-rows and --calibrate-context need --calibrate TEXT_FILE")
        return None
    if conversion.is_gguf(options.source) or conversion.is_gguf(options.destination):
        raise CheckpointError("--calibrate does nothing here: GGUF files are not calibrated; convert between folders")
    method = Method(feedback=options.calibrate_by != "search")
    return Calibration(options.calibrate, method=method, **more)


def _refuse_rules(options: argparse.Namespace, reason: str) -> None:
    """Raises CheckpointError for options about quantising where nothing is quantised."""
    given = ("scheme", "group_size", "scheme_for", "ignore", "include", "no_defaults", "leave_unfit")
    if named := [f"--{option.replace('_', '-')}" for option in given if getattr(options, option)]:
        raise CheckpointError(f"{', '.join(named)} does nothing here: {reason}")


def _overrides(options: argparse.Namespace) -> dict[str, schemes.Scheme]:
    """The rules and schemes of --scheme-for."""
    found: dict[str, schemes.Scheme] = {}
    for given in options.scheme_for:
        rule, equals, said = given.rpartition("=")
        name, colon, size = said.partition(":")
        if not equals or name not in schemes.NAMES or (colon and not _SIZE.fullmatch(size)):
            raise CheckpointError(
                f"--scheme-for {given!r}; needs RULE=SCHEME or RULE=SCHEME:GROUP_SIZE, such as "
                f"'re:.*self_attn=fp8_channel'; schemes are {', '.join(schemes.NAMES)}"
            )
        if rule in found:
            raise CheckpointError(f"--scheme-for {given!r}: the rule {rule!r} was given before; needs one scheme")
        groups, static = int(size) if colon else None, options.calibrate is not None
        found[rule] = convert.scheme_for(options.source, name, group_size=groups, static=static)
    return found
