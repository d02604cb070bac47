"""`jaxlowprec info`: what runs here, how, and why not otherwise."""

from __future__ import annotations

import argparse
import json

from jaxlowprec.cli.info import collect, render


def main(argv: list[str] | None = None) -> int:
    """The command's entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="jaxlowprec", description="Low-precision training and serving for JAX.")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser(
        "info", help="versions, platforms, and what runs natively, emulated or by reference here"
    )
    info.add_argument("--json", action="store_true", help="for machines")
    options = parser.parse_args(argv)
    found = collect()
    print(json.dumps(found, indent=2) if options.json else render(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
