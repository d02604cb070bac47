"""The CPU kernels against the jitted reference, against memory and against XLA's own GEMM: ratios of one run.

python benchmarks/cpu_kernels.py            # all cases, every instruction set of this machine; a few minutes
python benchmarks/cpu_kernels.py --quick    # fewer rounds
"""

from __future__ import annotations

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from baselines import Copies, fastest_dot
from timing import Cases, environment, keep_memory, save

import jaxlowprec as jlp
from jaxlowprec.wiring import native

ROWS, COLUMNS = 4096, 4096


def cases(copies: Copies, quick: bool) -> list[dict]:
    """Each case: name, the target ratio (speed of ours against theirs), and the measured seconds."""
    x = jax.random.normal(jax.random.key(0), (ROWS, COLUMNS), jnp.bfloat16)
    key, fmt = jax.random.key(1), jlp.NVFP4()
    host = np.asarray(x).view(np.uint16)
    packed, same = np.empty(x.size * 9 // 16, np.uint8), np.empty_like(host)
    few, many = (3, 11) if quick else (7, 41)
    found = Cases()

    def case(name, against, target, ours, theirs, rounds=many):
        found.add(name, against, None if native.isa() == "portable" else target, ours, theirs, rounds)  # it has none

    def quantize(implementation=None, fmt=fmt, **options):
        f = jax.jit(lambda x: jlp.quantize(x, fmt, implementation=implementation, **options))
        return lambda: f(x)

    def both(implementation=None, fmt=fmt, rotated=True):
        f = jax.jit(lambda x: jlp.quantize_both(x, fmt, hadamard_columnwise=rotated, implementation=implementation))
        return lambda: f(x)

    wide = native.isa().startswith("avx512")
    case("quantize rowwise, nearest", "jitted reference", 20 if wide else 10, quantize(), quantize("reference"), few)
    case(
        "quantize rowwise, nearest",
        "reading twice and writing",
        0.55,
        quantize(),
        copies.read_and_write(host, packed, 2),
    )
    case("quantize_both, RHT columnwise", "jitted reference", 20, both(), both("reference"), few)
    case("quantize rowwise, stochastic", "nearest", 0.75, quantize(rounding="stochastic", key=key), quantize())
    rotated = {"axis": -2, "hadamard": True}
    eden = quantize(rounding="eden", key=key, **rotated)
    case("quantize columnwise, rotated, eden", "nearest", 0.59, eden, quantize(**rotated))
    for rule, target in (("four_over_six", 0.625), ("search", 0.455)):
        chosen = jlp.NVFP4(scale_rule=rule)
        case(f'quantize rowwise, scale_rule="{rule}"', '"six"', target, quantize(fmt=chosen), quantize())
        ours, theirs = both(fmt=chosen, rotated=False), both(rotated=False)
        case(f'quantize_both, scale_rule="{rule}"', '"six"', target, ours, theirs)
    rows = quantize(fmt=jlp.NVFP4(row_scaled=True))
    case("quantize rowwise, an amax for each row", "for the tensor", 1, rows, quantize())
    transform = jax.jit(jlp.hadamard_transform)
    case("hadamard_transform", "copying the same bytes", 0.5, lambda: transform(x), copies.copy(host, same))
    for size in (64, 256):
        small = x[:size, :size]
        ours, theirs = (jax.jit(lambda x, i=i: jlp.quantize(x, fmt, implementation=i)) for i in (None, "reference"))
        case(
            f"quantize {size}x{size}, one jitted call",
            "jitted reference",
            5,
            functools.partial(ours, small),
            functools.partial(theirs, small),
        )

    a, w = x[:1024], jax.random.normal(jax.random.key(2), (4096, COLUMNS), jnp.bfloat16)
    qa = jlp.quantize(a, fmt)
    against, dot = fastest_dot(a, w, few)
    multiply = jax.jit(jlp.scaled_matmul)
    for blocks, target in (((16, 16), 1.45), ((1, 16), 1.25)):
        qw = jlp.quantize(w, jlp.NVFP4(blocks))
        case(
            f"scaled_matmul 1024x4096x4096, 1x16 by {blocks[0]}x16",
            against,
            target if wide else 0.8,
            lambda qw=qw: multiply(qa, qw),
            dot,
            few,
        )
    return found.found


def saved_by_linear() -> float:
    """Bytes that `linear` keeps of its input for the backward pass, over those of the bf16 input."""
    tokens, width = 4096, 1024
    w = jnp.zeros((width, width))

    def kept(tokens):
        x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
        pullback = jax.eval_shape(lambda x, w: jax.vjp(lambda x, w: jlp.linear(x, w), x, w)[1], x, w)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))

    with jlp.autocast(jlp.NVFP4BlockScaling()):
        return (kept(2 * tokens) - kept(tokens)) / (tokens * width * 2)


def main() -> None:
    """Measures on every instruction set of this machine and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    keep_memory()
    copies = Copies(environment()["cores"])
    results = {}
    for isa in native.available_isas():
        native.use_isa(isa)
        print(f"--- {isa}")
        results[isa] = cases(copies, options.quick)
    share = saved_by_linear()
    print(f"bytes kept by linear for its backward, over the bf16 input's: {share:.3f} (at most 0.35)")
    if options.save:
        name = f"cpu_kernels_{native.available_isas()[0]}"
        print(save(name, {"shape": [ROWS, COLUMNS], "cases": results, "saved_by_linear": share}))


if __name__ == "__main__":
    main()
