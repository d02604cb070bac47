"""`jaxlowprec report`: a run's telemetry as one self-contained page."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from typing import Any

from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.written_whole import written_whole
from jaxlowprec.cli.streams import as_json, emit
from jaxlowprec.telemetry.limits import Limits, findings
from jaxlowprec.telemetry.recording import RecordFollower, Run
from jaxlowprec.telemetry.report.page import page

_LIMITS = {field.name: field.default for field in dataclasses.fields(Limits)}


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("report", help="a training run's telemetry as a page, and what is wrong with it")
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="file of a Recorder, or its folder; the first is compared with"
    )
    parser.add_argument(
        "--noise-floor",
        metavar="RUN",
        help="a run that differs from the first one by nothing but noise, as by its seed",
    )
    parser.add_argument("--out", metavar="FILE", default="report.html", help="the page (default report.html)")
    parser.add_argument("--title", default="Telemetry", help="the page's heading")
    add_limits(parser)
    parser.add_argument("--json", action="store_true", help="print the findings for machines")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    limits = limits_of(options)
    runs = [loaded(path) for path in options.runs]
    noise_floor = None if options.noise_floor is None else loaded(options.noise_floor)
    try:
        text = page(runs, limits, title=options.title, noise_floor=noise_floor)
    except ImportError as error:
        raise CheckpointError(str(error)) from None
    out, data = pathlib.Path(options.out), text.encode("utf-8", "backslashreplace")
    if out.exists() and not out.is_file():  # such as /dev/stdout
        out.write_bytes(data)
    else:
        with written_whole(out) as file:
            file.write(0, memoryview(data))
    found = [(run, findings(run, limits)) for run in runs]
    if options.json:
        content = [{"run": str(run.path), "findings": [dataclasses.asdict(f) for f in of_run]} for run, of_run in found]
        emit(as_json({"command": "report", "out": str(out), "runs": content}))
        return 0
    count = sum(len(of_run) for _, of_run in found)
    emit(f"{run.path}: {finding.text}" for run, of_run in found for finding in of_run)
    counts = f"{len(runs)} run{'s' * (len(runs) > 1)}, {count} finding{'s' * (count != 1)}"
    emit([f"{out}: {counts}, {len(text) / 2**20:.1f} MiB"])
    return 0


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Declares the option that says what a finding is."""
    parser.add_argument(
        "--limit", metavar="NAME=VALUE", action="append", default=[], help="what counts as a finding: saturation=0.2"
    )


def limits_of(options: argparse.Namespace) -> Limits:
    """The limits beyond which a statistic is a finding."""
    values = {}
    for given in options.limit:
        name, _, value = given.partition("=")
        if name not in _LIMITS:
            raise CheckpointError(f"--limit {given}: there is no {name!r}; needs one of {', '.join(_LIMITS)}")
        try:
            values[name] = float(value)
        except ValueError:
            raise CheckpointError(f"--limit {given}; needs a number, such as {name}={_LIMITS[name]}") from None
    return Limits(**values)


def loaded(path: str, following: RecordFollower | None = None) -> Run:
    """A run's record, or what is new in the one that is followed; an error that the command prints if there is none."""
    try:
        return (RecordFollower(path) if following is None else following).run()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: there is no record of a run; give the file of a telemetry.Recorder, or its folder"
        ) from None
    except ValueError as error:
        raise CheckpointError(str(error)) from None
