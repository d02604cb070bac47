"""The kernels of all formats against the jitted reference, against memory and against XLA's GEMM: ratios of one run.

python benchmarks/formats.py            # every format, the best instruction set of this machine; several minutes
python benchmarks/formats.py --quick    # fewer rounds
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from baselines import Copies, fastest_dot
from timing import Cases, environment, keep_memory, save

import jaxlowprec as jlp
from jaxlowprec.wiring import native

ROWS, COLUMNS = 4096, 4096
QUANTIZED = (
    jlp.MXFP8(),
    jlp.MXFP8(block=(32, 32)),
    jlp.MXFP4(),
    jlp.Float8Block(),
    jlp.Float8Block(block=(128, 128)),
    jlp.Float8Block(power_of_two=False),
    jlp.Float8Tensor(),
    jlp.Float8Tensor("e5m2"),
)
MULTIPLIED = (  # a, b, least speed
    (jlp.MXFP4(), jlp.MXFP4(), 1.5),
    (jlp.MXFP8(), jlp.MXFP8(), 0.95),
    (jlp.Float8Block(), jlp.Float8Block(block=(128, 128)), 0.95),
    (jlp.Float8Block(), jlp.Float8Block(), 0.95),
    (jlp.Float8Tensor(), jlp.Float8Tensor(), None),
    (jlp.MXFP8(), jlp.MXFP4(), None),
    (jlp.Float8Block(power_of_two=False), jlp.MXFP4(), None),
)


def quantizers(cases: Cases, copies: Copies, few: int, many: int) -> None:
    """Each format rowwise, columnwise and both ways."""
    x = jax.random.normal(jax.random.key(0), (ROWS, COLUMNS), jnp.bfloat16)
    host = np.asarray(x).view(np.uint16)
    for fmt in QUANTIZED:
        ways = {
            "rowwise": lambda x, i, fmt=fmt: jlp.quantize(x, fmt, implementation=i),
            "columnwise": lambda x, i, fmt=fmt: jlp.quantize(x, fmt, axis=-2, implementation=i),
            "both": lambda x, i, fmt=fmt: jlp.quantize_both(x, fmt, implementation=i),
        }
        for way, function in ways.items():
            ours, theirs = (jax.jit(lambda x, f=function, i=i: f(x, i)) for i in (None, "reference"))
            nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(ours(x)))
            out = np.empty(min(nbytes, host.nbytes), np.uint8)
            times = 2 if fmt.scaling == "tensor" else 1
            scales = ", float32 scales" if fmt.scaling == "float32" and not fmt.power_of_two else ""
            name = f"quantize {fmt}{scales}, {way}"

            def call(f):
                return lambda: f(x)

            cases.add(name, "jitted reference", 15, call(ours), call(theirs), few)
            reading = f"reading {'twice' if times == 2 else 'once'} and writing"
            cases.add(name, reading, 0.5, call(ours), copies.read_and_write(host, out, times), many)
        key = jax.random.key(1)
        stochastic = jax.jit(lambda x, fmt=fmt, key=key: jlp.quantize(x, fmt, rounding="stochastic", key=key))
        nearest = jax.jit(lambda x, fmt=fmt: jlp.quantize(x, fmt))
        cases.add(f"quantize {fmt}, rowwise, stochastic", "nearest", None, call(stochastic), call(nearest), many)


def products(cases: Cases, few: int) -> None:
    """The GEMMs, operands quantised before."""
    a = jax.random.normal(jax.random.key(0), (1024, COLUMNS), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(2), (4096, COLUMNS), jnp.bfloat16)
    against, dot = fastest_dot(a, w, few)
    multiply = jax.jit(jlp.scaled_matmul)
    for a_format, b_format, target in MULTIPLIED:
        qa, qb = jlp.quantize(a, a_format), jlp.quantize(w, b_format)
        name = f"scaled_matmul 1024x4096x4096, {a_format} by {b_format}"
        cases.add(name, against, target, lambda qa=qa, qb=qb: multiply(qa, qb), dot, few)


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("quantizers", "products"))
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    keep_memory()
    few, many = (3, 7) if options.quick else (5, 21)
    cases, isa = Cases(), native.isa()
    if options.only != "products":
        quantizers(cases, Copies(environment()["cores"]), few, many)
    if options.only != "quantizers":
        products(cases, few)
    if options.save:
        print(save(f"formats_{isa}", {"shape": [ROWS, COLUMNS], "cases": {isa: cases.found}}))


if __name__ == "__main__":
    main()
