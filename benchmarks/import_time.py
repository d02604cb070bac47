"""Processor seconds that `import jaxlowprec` takes after `import jax`, and the modules that it loads.

    python benchmarks/import_time.py [--rounds 10]

Each round is a process of its own. The first line is of modules compiled before; where Python must not write bytecode,
as in many containers (PYTHONDONTWRITEBYTECODE), each process compiles them again.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

PROGRAM = """
import sys, time
import jax
modules, begun = len(sys.modules), time.process_time()
import jaxlowprec
print(time.process_time() - begun, len(sys.modules) - modules)
"""


def measured(bytecode: str, write: bool) -> tuple[float, int]:
    """Seconds and modules of one process, whose bytecode is in that folder."""
    variables = {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": "" if write else "1"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    seconds, modules = done.stdout.split()
    return float(seconds), int(modules)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as filled, tempfile.TemporaryDirectory() as empty:
        measured(filled, write=True)
        for title, folder in (("compiled before", filled), ("not compiled", empty)):
            found = [measured(folder, write=False) for _ in range(rounds)]
            seconds = [second for second, _ in found]
            print(
                f"{title:16} {min(seconds):.3f} s at least, {statistics.median(seconds):.3f} s in the middle; "
                f"{found[0][1]} modules"
            )


if __name__ == "__main__":
    main()
