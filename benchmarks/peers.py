"""What a user could take instead of this library, beside it: ratios of one run.

    python benchmarks/peers.py                       # the best instruction set of this machine; about ten minutes
    python benchmarks/peers.py --only decoding       # one part
    python benchmarks/peers.py --save                # benchmarks/results/peers_<instruction set>.json, page and charts

All sides of an operation get the same inputs and run in turn. `pip install -e '.[peers]'` installs the others. One that
is not installed, or fails, is a result that says so. Before it is measured, every side's result is compared with the
numbers without rounding.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys

import rivals
from rivals.sides import measured, told, versions
from timing import RESULTS, environment, keep_memory, save

from jaxlowprec.wiring import native


def main() -> None:
    """Measures, prints, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=rivals.OPERATIONS, nargs="+", default=list(rivals.OPERATIONS))
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--divide", type=int, default=1, help="lengths by this")
    parser.add_argument("--save", nargs="?", type=pathlib.Path, const=RESULTS, metavar="FOLDER", help="write results")
    options = parser.parse_args()
    if options.save == RESULTS and (options.divide > 1 or len(options.only) < len(rivals.OPERATIONS)):
        parser.error("--save keeps whole runs: it takes neither --only nor --divide")
    keep_memory()
    few, many = (3, 5) if options.quick else (7, 21)
    cases, packages = [], {}
    for part in options.only:
        operations = rivals.OPERATIONS[part](options.divide)
        packages |= versions(operations)
        for operation in operations:
            print(f"--- {operation.name}", flush=True)
            found = measured(operation, few if operation.slow else many)
            print(*map(told, found), sep="\n", flush=True)
            cases += [{"part": part, **case} for case in found]
    if options.save:
        isa, here = native.isa(), environment()
        content = {"environment": here | {"versions": here["versions"] | packages}, "cases": {isa: cases}}
        print(save(f"peers_{isa}", content, options.save))
    if options.save == RESULTS:
        subprocess.run([sys.executable, pathlib.Path(__file__).with_name("tables.py")], check=True)


if __name__ == "__main__":
    main()
