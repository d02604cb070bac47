"""The `jaxlowprec` command: finds the command's module, and turns its errors into one line and exit status 2."""

from __future__ import annotations

import argparse
import os
import sys

from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.cli import convert, dequantize, info, inspect

_COMMANDS = (info, convert, dequantize, inspect)
_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """The command's entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="jaxlowprec", description="Low-precision training and serving for JAX.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in _COMMANDS:
        command.add_parser(commands)
    options = parser.parse_args(argv)
    try:
        status = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of a pipe had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (CheckpointError, OSError) as error:
        print(f"jaxlowprec {options.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"jaxlowprec {options.command}: interrupted", file=sys.stderr)
        return _INTERRUPTED


if __name__ == "__main__":
    raise SystemExit(main())
