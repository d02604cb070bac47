"""Instructions of the GPU kernels that quantise, and of the product of few rows, an element: in the machine code.

    scripts/compile_cuda.sh; python benchmarks/instructions.py build/cuda/cuda/*.o --save

Nothing runs on a GPU: it says what a kernel has to issue, not how long that takes.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess

from recorded import ROOT
from timing import save

_ROW = re.compile(r"\| `(?P<kernel>[^`]+)`, (?P<architecture>\w+) \| (?P<count>[\d.]+) \|")


def counted(files: list[pathlib.Path]) -> dict[str, dict[str, float]]:
    """For each kernel, its instructions per element by architecture."""
    command = [ROOT / "scripts" / "check_machine_code.sh", "--count", *files]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, dict[str, float]] = {}
    for row in _ROW.finditer(text):
        found.setdefault(row["kernel"], {})[row["architecture"]] = float(row["count"])
    return found


def main() -> None:
    """Prints, and writes benchmarks/results with --save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=pathlib.Path, help="libraries or wheels with code for GPUs")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    kernels = {name: counts for name, counts in counted(options.files).items() if "F16" not in name.replace("BF16", "")}
    for name, counts in kernels.items():
        print(f"{name:50}", ", ".join(f"{architecture} {count}" for architecture, count in counts.items()))
    if options.save:
        print(save("instructions", {"kernels": kernels}))


if __name__ == "__main__":
    main()
