"""Int4 on this machine: fake quantisation, packing and unpacking, against the jitted reference and against memory.

python benchmarks/int4.py            # a minute or two
python benchmarks/int4.py --quick    # fewer rounds
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from baselines import Copies
from timing import Cases, environment, keep_memory, save

import jaxlowprec as jlp
from jaxlowprec.wiring import native

ROWS, COLUMNS = 4096, 4096
CASES = (  # format, dtype of the weight, axis
    (jlp.Int4(), "bfloat16", -1),
    (jlp.Int4(), "bfloat16", -2),
    (jlp.Int4(32), "bfloat16", -1),
    (jlp.Int4(32), "bfloat16", -2),
    (jlp.Int4(symmetric=False), "bfloat16", -1),
    (jlp.Int4(), "float32", -1),
    (jlp.Int4(), "float32", -2),
    (jlp.Int4(scale_dtype="float16"), "float16", -1),
)


def size_of(tree) -> int:
    """Bytes of its arrays."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def measure(cases: Cases, copies: Copies, fmt: jlp.Int4, dtype: str, axis: int, few: int, many: int) -> None:
    """One format: to decoded values, to codes, and back."""
    x = 0.02 * jax.random.normal(jax.random.key(0), (ROWS, COLUMNS), jnp.dtype(dtype))
    fake, reference = (
        jax.jit(lambda x, i=i: jlp.fake_quantize(x, fmt, axis=axis, implementation=i)) for i in (None, "reference")
    )
    pack, unpack = jax.jit(lambda x: jlp.quantize(x, fmt, axis=axis)), jax.jit(lambda q: q.dequantize())
    q = pack(x)
    kind = f"{fmt} of {dtype}, axis {axis}"

    def add(name, call, argument, least):
        read, written = size_of(argument), size_of(call(argument))
        memory, out = np.zeros(max(read, written), np.uint8), np.empty(written, np.uint8)
        copy = copies.read_and_write(memory[:read], out, 1)
        cases.add(f"{name} {kind}", "reading once and writing", least, lambda: call(argument), copy, many)

    cases.add(f"fake_quantize {kind}", "jitted reference", 15, lambda: fake(x), lambda: reference(x), few)
    add("fake_quantize", fake, x, 0.5)
    add("quantize", pack, x, 0.5)
    add("dequantize", unpack, q, 0.5)


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    keep_memory()
    few, many = (3, 7) if options.quick else (5, 21)
    cases, isa, copies = Cases(), native.isa(), Copies(environment()["cores"])
    for fmt, dtype, axis in CASES:
        measure(cases, copies, fmt, dtype, axis, few, many)
    if options.save:
        print(save(f"int4_{isa}", {"shape": [ROWS, COLUMNS], "cases": {isa: cases.found}}))


if __name__ == "__main__":
    main()
