"""What a user could take instead of this library, beside it: ratios of one run.

    python benchmarks/peers.py                       # the best instruction set of this machine; about ten minutes
    python benchmarks/peers.py --only decoding       # one part
    python benchmarks/peers.py --save                # benchmarks/results/peers_<instruction set>.json, page and charts
    python benchmarks/peers.py --against "jax.nn.scaled_matmul, MXFP8" --save    # this peer, in a file of its own

All sides of an operation get the same inputs and run in turn. `pip install -e '.[peers]'` installs the others. One that
is not installed, or fails, is a result that says so. Before it is measured, every side's result is compared with the
numbers without rounding. A peer that needs another version of JAX than the rest is measured --against it, in an
environment of its own.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys

import jax
import rivals
from rivals.sides import beside, measured, told, versions
from timing import RESULTS, environment, keep_memory, save

from jaxlowprec.wiring import native


def main() -> None:
    """Measures, prints, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=rivals.OPERATIONS, nargs="+", default=list(rivals.OPERATIONS))
    parser.add_argument("--against", nargs="+", metavar="PEER", help="these peers only; saved as peers_..._jax_VERSION")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--rounds", type=int, help="so many, for each operation")
    parser.add_argument("--divide", type=int, default=1, help="lengths by this")
    parser.add_argument("--save", nargs="?", type=pathlib.Path, const=RESULTS, metavar="FOLDER", help="write results")
    options = parser.parse_args()
    parts = options.against is None and len(options.only) < len(rivals.OPERATIONS)
    if options.save == RESULTS and (options.divide > 1 or parts):
        parser.error("--save keeps whole runs: it takes no --divide, and --only with --against only")
    keep_memory()
    few, many = (options.rounds, options.rounds) if options.rounds else (3, 5) if options.quick else (7, 21)
    cases, packages = [], {}
    for part in options.only:
        operations = rivals.OPERATIONS[part](options.divide)
        if options.against:
            operations = beside(operations, options.against)
        packages |= versions(operations)
        for operation in operations:
            print(f"--- {operation.name}", flush=True)
            found = measured(operation, few if operation.slow else many)
            print(*map(told, found), sep="\n", flush=True)
            cases += [{"part": part, **case} for case in found]
    if not cases:
        parser.error(f"--against {', '.join(options.against)}: no operation has such a peer")
    if options.save:
        isa, here = native.isa(), environment()
        name = f"peers_{isa}" + (f"_jax_{jax.__version__}" if options.against else "")
        content = {"environment": here | {"versions": here["versions"] | packages}, "cases": {isa: cases}}
        print(save(name, content, options.save))
    if options.save == RESULTS:
        subprocess.run([sys.executable, pathlib.Path(__file__).with_name("tables.py")], check=True)


if __name__ == "__main__":
    main()
