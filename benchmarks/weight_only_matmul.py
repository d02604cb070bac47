"""Weight-only products against XLA's own and against reading the codes from memory: ratios of one run.

python benchmarks/weight_only_matmul.py            # the best instruction set of this machine; about a minute
python benchmarks/weight_only_matmul.py --quick    # fewer rounds

A row of activations goes through many weights in turn, as in decoding: together they are larger than the caches.
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

SIZE, ROWS, BATCHES = 4096, 1024, (2, 4, 8, 16, 32, 64)
WEIGHTS = 16  # 128 MiB of 4-bit codes
FORMATS = (  # format, least speed against XLA's matvec and against reading
    (jlp.Int4(128), 6, 0.6),
    (jlp.Int4(128, symmetric=False), None, None),
    (jlp.Int4(32), None, None),
    (jlp.Int4(128, scale_dtype="float16"), None, None),
    (jlp.NVFP4(), None, None),
    (jlp.MXFP4(), None, None),
)


def weight(seed: int, size: int = SIZE) -> jax.Array:
    """Keeps the size of what it multiplies."""
    return jax.random.normal(jax.random.key(seed), (size, size), jnp.float32) / size**0.5


def repeated(product, x, weights):
    """A jitted call of x through all weights, the time of one being that of the call divided by their number."""
    chain = jax.jit(lambda x, weights: [x := product(x, w) for w in weights][-1])
    return lambda: chain(x, weights)


class PerProduct(Cases):
    """Times of one product of a chain."""

    def add(self, name, against, target, ours, theirs, rounds):
        """As `Cases.add`, ours and theirs being a chain of WEIGHTS products."""
        super().add(name, against, target, ours, theirs, rounds)
        for side in ("ours", "theirs"):
            self.found[-1][side] = {k: seconds / WEIGHTS for k, seconds in self.found[-1][side].items()}


def decoding(cases: Cases, copies: Copies, rounds: int) -> None:
    """One row."""
    full = [weight(i) for i in range(2)] * (WEIGHTS // 2)
    x = jax.random.normal(jax.random.key(9), (1, SIZE), jnp.bfloat16)
    matvec = repeated(lambda x, w: jnp.einsum("mk,nk->mn", x, w), x.astype(jnp.float32), full)
    for fmt, against_xla, against_reading in FORMATS:
        dtype = "float16" if fmt.element == "int4" and fmt.scale_dtype == "float16" else "bfloat16"
        quantized = [jlp.quantize(weight(i).astype(dtype), fmt) for i in range(WEIGHTS)]
        ours = repeated(
            lambda x, q: jlp.scaled_matmul(x, q, preferred_element_type=x.dtype), x.astype(dtype), quantized
        )
        name = f"scaled_matmul 1x{SIZE}x{SIZE}, {dtype} by {fmt}"
        cases.add(name, "XLA's float32 matvec", against_xla, ours, matvec, rounds)
        codes = np.concatenate([np.asarray(q.data).ravel() for q in quantized])
        reading = copies.read_and_write(codes, np.empty(1, np.uint8), 1)
        cases.add(name, "reading the codes from memory", against_reading, ours, reading, rounds)


def prefill(cases: Cases, rounds: int) -> None:
    """Many rows."""
    a, w = jax.random.normal(jax.random.key(0), (ROWS, SIZE), jnp.bfloat16), weight(1)
    against, dot = fastest_dot(a, w.astype(jnp.bfloat16), rounds)
    plain = jax.jit(lambda a, w: jnp.einsum("mk,nk->mn", a, w))
    multiply = jax.jit(jlp.scaled_matmul)
    for fmt in (jlp.Int4(128), jlp.NVFP4(), jlp.MXFP4(), jlp.MXFP8()):
        q = jlp.quantize(w.astype(jnp.bfloat16), fmt)
        name = f"scaled_matmul {ROWS}x{SIZE}x{SIZE}, bfloat16 by {fmt}"
        cases.add(name, against, None, lambda q=q: multiply(a, q), dot, rounds)
    x = a.astype(jnp.float32)
    cases.add(name, "XLA's float32 dot", None, lambda: multiply(a, q), lambda: plain(x, w), rounds)


def batches(cases: Cases, rounds: int) -> None:
    """The rows of a few sequences that are decoded together."""
    w = weight(1).astype(jnp.bfloat16)
    q = jlp.quantize(w, jlp.Int4(128))
    multiply = jax.jit(jlp.scaled_matmul)
    for rows in BATCHES:
        a = jax.random.normal(jax.random.key(0), (rows, SIZE), jnp.bfloat16)
        against, dot = fastest_dot(a, w, rounds)
        name = f"scaled_matmul {rows}x{SIZE}x{SIZE}, bfloat16 by {q.format}"
        cases.add(name, against, None, lambda a=a: multiply(a, q), dot, rounds)


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("decoding", "batches", "prefill"))
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    keep_memory()
    few, many = (3, 5) if options.quick else (5, 15)
    one, isa = PerProduct(), native.isa()
    whole = Cases()
    if options.only in (None, "decoding"):
        decoding(one, Copies(environment()["cores"]), many)
    if options.only in (None, "batches"):
        batches(whole, many)
    if options.only in (None, "prefill"):
        prefill(whole, few)
    if options.save:
        print(save(f"weight_only_matmul_{isa}", {"cases": {isa: one.found + whole.found}}))


if __name__ == "__main__":
    main()
