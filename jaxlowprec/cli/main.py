"""The `jaxlowprec` command: finds the command's module, and turns its errors into one line and exit status 2."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.cli import convert, dequantize, info, inspect, report, verify, watch
from jaxlowprec.cli.streams import printable, say
from jaxlowprec.wiring import native
from jaxlowprec_command import occupy_standard_descriptors

_COMMANDS = (info, verify, convert, dequantize, inspect, watch, report)
_ERROR, _INTERRUPTED = 2, 130


class _Parser(argparse.ArgumentParser):
    """Shows unknown arguments with control characters escaped."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message, sys.stderr))


def main(argv: list[str] | None = None) -> int:
    """The command's entry point; returns the exit status."""
    name = "jaxlowprec"
    try:
        occupy_standard_descriptors()
        options = _parsed(argv)
        name = f"jaxlowprec {options.command}"
        if sys.stdout is None:
            raise CheckpointError("standard output is closed, and the report has no other place; send it to a file")
        native.library()  # raises if the environment asks for something that is not there
        return options.run(options)
    except (CheckpointError, OSError, native.NotAvailable) as error:
        say(f"{name}: {' '.join(str(error).split())}")
        return _ERROR
    except MemoryError as error:
        say(f"{name}: out of memory ({error}); give fewer --workers, or use a machine with more")
        return _ERROR
    except KeyboardInterrupt:
        say(f"{name}: interrupted")
        return _INTERRUPTED


def _parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="jaxlowprec", description="Low-precision training and serving for JAX.")
    commands: Any = parser.add_subparsers(dest="command", required=True)
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
