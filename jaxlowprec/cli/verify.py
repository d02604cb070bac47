"""`jaxlowprec verify`: compares what a device computes with what it must."""

from __future__ import annotations

import argparse
import time
from typing import Any

from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.cli.streams import as_json, emit
from jaxlowprec.diagnostics.verify import Report, verify
from jaxlowprec.diagnostics.verify.run import Result
from jaxlowprec.wiring import native

_DIFFERS = 1


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("verify", help="whether the device here computes the bytes and sums that it must")
    parser.add_argument("--platform", metavar="NAME", help="cpu, gpu, tpu, ...: default: JAX's default backend")
    parser.add_argument("--only", metavar="TEXT", default="", help="only the items whose names contain this")
    names = ("ffi", "portable", "reference")
    parser.add_argument("--implementation", choices=names, help="what computes; default: the best that is available")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    began = time.monotonic()
    try:
        done = None if options.json else lambda result: emit(lines(result))
        report = verify(options.platform, options.only, options.implementation, done)
    except native.NO_PLATFORM as error:
        raise CheckpointError(f"--platform {options.platform or 'of JAX'}: {native.why_no_platform(error)}") from None
    if not report.results:
        raise CheckpointError(f"--only {options.only!r}; no item has that in its name")
    emit(as_json(_content(report)) if options.json else [summary(report, time.monotonic() - began)])
    return 0 if report.ok else _DIFFERS


def lines(result: Result) -> list[str]:
    """A line for the item, and one for each array that differs."""
    if result.ok:
        return [f"ok       {result.item}"]
    return [f"DIFFERS  {result.item}", *(f"         {text}" for text in result.found)]


def summary(report: Report, seconds: float) -> str:
    """The last line."""
    count = len(report.results)
    wrong = sum(not result.ok for result in report.results)
    took = f"{report.device}, {seconds:.0f} s"
    if not wrong:
        return f"all {count} items are as they must be ({took})"
    return f"{wrong} of {count} items differ ({took}; elements compared with {report.compared_with})"


def _content(report: Report) -> dict[str, Any]:
    return {
        "ok": report.ok,
        "device": report.device,
        "compared_with": report.compared_with,
        "items": [{"item": r.item, "ok": r.ok, "found": list(r.found)} for r in report.results],
    }
