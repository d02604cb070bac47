"""Prints what an installed package requires, one requirement a line: requirements_of.py PACKAGE [--without NAME ...].

Its extras are left out, and the packages named, of which each must be among the requirements.
"""

import argparse
import importlib.metadata
import re
import sys


def requirements(package: str, without: set[str]) -> list[str]:
    """The requirements that are left."""
    lines = [line for line in importlib.metadata.requires(package) or [] if "extra ==" not in line.partition(";")[2]]
    names = [re.match(r"[\w.-]+", line)[0] for line in lines]  # type: ignore[index]
    if unknown := without - set(names):
        sys.exit(f"{package} does not require {', '.join(sorted(unknown))}")
    return [line for name, line in zip(names, lines, strict=True) if name not in without]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("package")
    parser.add_argument("--without", nargs="*", default=[], metavar="NAME")
    options = parser.parse_args()
    print(*requirements(options.package, set(options.without)), sep="\n")
