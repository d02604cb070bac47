"""Time and memory of the quantisers from 1 M to 64 M elements: both grow with the elements and with nothing else.

    python benchmarks/scaling.py

Memory is what the process held at most during a call beyond what it held before, less the results' own bytes: the
copies that an operation makes. Linux only: it reads and resets the high-water mark in /proc.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from timing import alternate, keep_memory, save

import jaxlowprec as jlp

COLUMNS = 4096
MILLIONS = (1, 4, 16, 64)
OPERATIONS = {
    "quantize rowwise": lambda x: jlp.quantize(x, jlp.NVFP4()),
    "quantize_both, RHT columnwise": lambda x: jlp.quantize_both(x, jlp.NVFP4(), hadamard_columnwise=True),
    "quantize rowwise, stochastic": lambda x: jlp.quantize(
        x, jlp.NVFP4(), rounding="stochastic", key=np.array([1, 2], np.uint32)
    ),
    "hadamard_transform": jlp.hadamard_transform,
}


def _status(field: str) -> int:
    """Bytes, from /proc/self/status."""
    line = next(li for li in pathlib.Path("/proc/self/status").read_text().splitlines() if li.startswith(field))
    return int(line.split()[1]) * 1024


def extra_bytes(call) -> int:
    """What a call holds at most beyond its results."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier results left behind is not in use
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _status("VmRSS")
    out = jax.block_until_ready(call())
    return _status("VmHWM") - before - sum(leaf.nbytes for leaf in jax.tree.leaves(out))


def main() -> None:
    """Measures and prints; writes benchmarks/results with --save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    keep_memory()
    inputs = {m: jax.random.normal(jax.random.key(m), (m * 2**20 // COLUMNS, COLUMNS), jnp.bfloat16) for m in MILLIONS}
    found = []
    for name, operation in OPERATIONS.items():
        compiled = {m: jax.jit(operation).lower(x).compile() for m, x in inputs.items()}
        calls = {str(m): functools.partial(compiled[m], inputs[m]) for m in MILLIONS}
        seconds = alternate(calls, 9)
        for m in MILLIONS:
            found.append(
                {
                    "operation": name,
                    "elements": m * 2**20,
                    **seconds[str(m)],
                    "nanoseconds_per_element": 1e9 * seconds[str(m)]["min"] / (m * 2**20),
                    "bytes_beyond_inputs_and_results": extra_bytes(calls[str(m)]),
                    "xla_temporary_bytes": compiled[m].memory_analysis().temp_size_in_bytes,
                }
            )
            last = found[-1]
            print(
                f"{name:32} {m:3} M elements  {1e3 * last['min']:8.2f} ms  "
                f"{last['nanoseconds_per_element']:.3f} ns each  "
                f"{last['bytes_beyond_inputs_and_results'] / 2**20:6.2f} MiB beyond in- and output",
                flush=True,
            )
    if options.save:
        print(save("scaling", {"columns": COLUMNS, "cases": found}))


if __name__ == "__main__":
    main()
