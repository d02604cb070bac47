"""The common part of the commands that write checkpoints."""

from __future__ import annotations

import argparse
import pathlib
from collections import Counter
from collections.abc import Sequence

from jaxlowprec.checkpoints.conversion.convert import ConvertOptions, Report
from jaxlowprec.checkpoints.conversion.plan import CalibrationReport
from jaxlowprec.checkpoints.gguf.gguf_file import SUFFIX
from jaxlowprec.cli.streams import as_json, bar, emit, readable, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments that these commands share."""
    parser.add_argument("source", metavar="SRC", help="folder of a Hugging Face checkpoint, or a GGUF file")
    parser.add_argument(
        "destination", metavar="DST", help="new folder, or one that this command left unfinished; or a GGUF file"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and write nothing")
    parser.add_argument(
        "--verify", action="store_true", help="at the end compute all again and compare it with the files"
    )
    parser.add_argument(
        "--follow-links", action="store_true", help="also copy what links in SRC point to outside of it"
    )
    parser.add_argument("--json", action="store_true", help="report for machines, and no progress bar")
    parser.add_argument(
        "--workers", type=int, default=2, metavar="N", help="tensors at work, and in memory (default 2)"
    )


def is_gguf(path: str) -> bool:
    """Whether a path names a GGUF file."""
    return pathlib.Path(path).suffix == SUFFIX


def convert_options(options: argparse.Namespace) -> ConvertOptions:
    """How the conversion is carried out, from the arguments."""
    return ConvertOptions(options.workers, options.dry_run, options.verify, bar(options.json), options.follow_links)


def show(report: Report, options: argparse.Namespace) -> int:
    """Prints a report; returns the exit status."""
    if options.json:
        content = {"command": options.command, "dry_run": options.dry_run, **report.as_json()}
        emit(as_json(content))
        return 0
    for warning in report.warnings:
        say(f"jaxlowprec {options.command}: warning: {warning}")
    emit(render(report, options))
    return 0


def render(report: Report, options: argparse.Namespace) -> list[str]:
    """A report as lines of text."""
    verb, left = "would change" if options.dry_run else "changed", "left alone"
    if is_gguf(options.source):  # no codes are made: some are kept, and the rest is decoded
        verb, left = "would keep the codes of" if options.dry_run else "kept the codes of", "in high precision"
    lines = [
        f"{report.scheme}: {verb} {len(report.changed)} weights; {readable(report.source_bytes)} -> "
        f"{readable(report.output_bytes)}"
    ]
    if len(report.formats) > 1:
        lines += [f"  {count} {name}" for name, count in report.formats.items()]
    if options.dry_run:
        lines += [f"  {module}" for module in report.changed]
    if report.left:
        lines.append(f"{left}: {len(report.left)} matrices")
        if options.dry_run:
            lines += [f"  {entry.module}  ({entry.reason})" for entry in report.left]
        else:
            counted = Counter(entry.reason for entry in report.left).most_common()
            lines += [f"  {count} {reason}" for reason, count in counted]
    if report.ignore:
        lines.append("ignore: " + "  ".join(report.ignore))
    if report.left_out:
        lines.append("files left out: " + ", ".join(report.left_out))
    if options.dry_run:
        return lines
    kept = f", {len(report.kept)} were finished before" if report.kept else ""
    lines.append(f"wrote {_files(report.written)} of weights{kept}; copied {_files(report.copied, 'other ')}")
    if report.calibrated is not None:
        lines += _of_calibration(report.calibrated)
    if report.verified is not None:
        lines.append(f"verified: {report.verified} tensors are what the source gives")
    lines.append(f"{report.seconds:.1f} s, {readable(report.source_bytes / max(report.seconds, 1e-9))}/s of the source")
    return lines


def _of_calibration(found: CalibrationReport) -> list[str]:
    """The results of a calibration, as lines of text."""
    lines = [
        f"calibrated by {found.calibration_tokens} tokens; perplexity of {found.held_out_tokens} others: "
        f"{found.perplexity_before:.4g} before, {found.perplexity_after:.4g} after",
        "relative error of each layer's result: " + "  ".join(f"{error:.3g}" for error in found.layer_errors),
    ]
    if found.without_inputs:
        lines.append(f"{len(found.without_inputs)} weights were quantised without their inputs")
    return lines


def _files(names: Sequence[str], kind: str = "") -> str:
    """A number of files, in words."""
    return f"{len(names)} {kind}file{'' if len(names) == 1 else 's'}"
