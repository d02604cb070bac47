"""Eight bits by rows against XLA's GEMMs, torch's and memory, on every instruction set here: ratios of one run.

python benchmarks/rows.py            # a few minutes
python benchmarks/rows.py --quick    # fewer rounds
"""

from __future__ import annotations

import argparse
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
from baselines import Copies, fastest_dot
from timing import Cases, environment, keep_memory, save

import jaxlowprec as jlp
from jaxlowprec.wiring import native

M, N, K = 1024, 4096, 4096
FORMATS = (jlp.Int8Rows(), jlp.Float8Rows())
WEIGHTS = (jlp.Int4(128), jlp.MXFP4())


def targets(isa: str) -> dict[str, float | None]:
    """The least speeds of products: against XLA's bf16 dot and int8 dot, and of 4-bit weights against its bf16 dot."""
    if isa == "avx2":
        return {"bf16": 1.9, "int8": 1.05, "Int4": 2.7, "MXFP4": 2.4}
    wide = isa in ("avx512", "avx512_bf16")
    return {"bf16": 1.7 if wide else None, "int8": 1.0 if wide else None, "Int4": 1.6 if wide else None, "MXFP4": None}


def products(cases: Cases, few: int, isa: str) -> None:
    """The GEMMs, operands quantised before."""
    a = jax.random.normal(jax.random.key(0), (M, K), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (N, K), jnp.bfloat16)
    against, dot = fastest_dot(a, w, few)
    multiply, least = jax.jit(jlp.scaled_matmul), targets(isa)
    integers = jlp.quantize(a, FORMATS[0]), jlp.quantize(w, FORMATS[0])

    def ours(qa, qb):
        return lambda: multiply(qa, qb)

    name = f"scaled_matmul {M}x{N}x{K}"
    cases.add(f"{name}, Int8Rows", against, least["bf16"], ours(*integers), dot, few)
    int8 = jax.jit(lambda a, b: jnp.einsum("mk,nk->mn", a, b, preferred_element_type=jnp.int32))
    theirs = [q.data for q in integers]
    cases.add(f"{name}, Int8Rows", "XLA's int8 dot", least["int8"], ours(*integers), lambda: int8(*theirs), few)
    if importlib.util.find_spec("torch"):
        import torch

        x, y = (torch.from_numpy(np.asarray(q.data).copy()) for q in integers)
        target = 1.0 if isa.startswith("avx512") else None
        cases.add(f"{name}, Int8Rows", "torch._int_mm", target, ours(*integers), lambda: torch._int_mm(x, y.t()), few)
    floats = jlp.quantize(a, FORMATS[1]), jlp.quantize(w, FORMATS[1])
    cases.add(f"{name}, Float8Rows", against, None, ours(*floats), dot, few)
    for fmt in WEIGHTS:
        q = jlp.quantize(w, fmt)
        cases.add(f"{name}, Int8Rows by {fmt}", against, least[type(fmt).__name__], ours(integers[0], q), dot, few)
        cases.add(f"{name}, bfloat16 by {fmt}", against, None, ours(a, q), dot, few)


def quantizers(cases: Cases, copies: Copies, many: int) -> None:
    """Each format rowwise, columnwise and both ways."""
    x = jax.random.normal(jax.random.key(0), (N, K), jnp.bfloat16)
    host = np.asarray(x).view(np.uint16)
    for fmt in FORMATS:
        ways = {
            "rowwise": (lambda x, fmt=fmt: jlp.quantize(x, fmt), 0.9),
            "columnwise": (lambda x, fmt=fmt: jlp.quantize(x, fmt, axis=-2), None),
            "both": (lambda x, fmt=fmt: jlp.quantize_both(x, fmt), 0.6),
        }
        for way, (function, target) in ways.items():
            ours = jax.jit(function)
            out = np.empty(sum(leaf.nbytes for leaf in jax.tree.leaves(ours(x))), np.uint8)
            moving = copies.read_and_write(host, out, 1)
            name = f"quantize {N}x{K}, {fmt}, {way}"
            cases.add(name, "reading and writing", target, lambda ours=ours: ours(x), moving, many)


def main() -> None:
    """Measures on every instruction set of this machine and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    keep_memory()
    few, many = (3, 7) if options.quick else (7, 21)
    copies, found = Copies(environment()["cores"]), {}
    for isa in native.available_isas():
        if isa == "portable":
            continue
        native.use_isa(isa)
        print(f"--- {isa}")
        cases = Cases()
        products(cases, few, isa)
        quantizers(cases, copies, many)
        found[isa] = cases.found
    if options.save:
        print(save(f"rows_{native.available_isas()[0]}", {"shape": [M, N, K], "cases": found}))


if __name__ == "__main__":
    main()
