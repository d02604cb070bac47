"""Grouped products against one dense product of the same work and format: ratios of one run.

python benchmarks/grouped_matmul.py            # the best instruction set of this machine; about two minutes
python benchmarks/grouped_matmul.py --quick    # fewer rounds
PYTHONPATH=. python benchmarks/grouped_matmul.py --launches  # on an H100, which need not be there: see traffic.py

The operands are quantised before. A dense product of T rows reads one weight, the grouped one a weight for each group.
"""

from __future__ import annotations

import argparse
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from timing import Cases, keep_memory, save

import jaxlowprec as jlp
from jaxlowprec.ops.grouped_matmul.api import multiply_groups, multiply_within_groups, quantize_groups
from jaxlowprec.ops.grouped_matmul.weight_only import grouped_weight_only
from jaxlowprec.wiring import native

DEPTH, FEATURES = 2048, 2048
SHAPES = ((32, 64), (16, 256))  # groups, rows in each
FORMATS = (  # of the rows, of the weights
    (jlp.NVFP4(), jlp.NVFP4((16, 16))),
    (jlp.MXFP8(), jlp.MXFP8()),
    (jlp.MXFP4(), jlp.MXFP4()),
    (jlp.Float8Block(), jlp.Float8Block(block=(128, 128))),
    (jlp.Float8Tensor(), jlp.Float8Tensor()),
)


def uneven(groups: int, rows: int) -> jax.Array:
    """Sizes as a router makes them, with that mean."""
    drawn = np.random.default_rng(0).multinomial(
        groups * rows, np.random.default_rng(1).dirichlet(np.full(groups, 4.0))
    )
    return jnp.asarray(drawn, jnp.int32)


def normal(seed: int, *shape: int) -> jax.Array:
    """bfloat16."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def forward(cases: Cases, groups: int, rows: int, rounds: int) -> None:
    """Rows by the weight of their group."""
    tokens = groups * rows
    x, w = normal(0, tokens, DEPTH), normal(1, groups, DEPTH, FEATURES)
    even = jnp.full(groups, rows, jnp.int32)
    grouped = jax.jit(lambda a, b: multiply_groups(a, b, None, jnp.bfloat16))
    dense = jax.jit(jlp.scaled_matmul)
    for x_format, w_format in FORMATS:
        b = jlp.quantize(w, w_format, axis=-2).mT
        one = jlp.quantize(w[0], w_format, axis=-2).mT
        a = jlp.quantize(x, x_format)
        for name, sizes in (("even", even), ("uneven", uneven(groups, rows))):
            rowwise, _ = quantize_groups(x, sizes, x_format, rowwise=True, columnwise=False)
            case = f"{groups} groups, {rows} rows each ({name}), {DEPTH}x{FEATURES}, {x_format} by {w_format}"
            target = 0.9 if name == "even" else None
            cases.add(
                case,
                "one dense product",
                target,
                functools.partial(grouped, rowwise, b),
                functools.partial(dense, a, one),
                rounds,
            )
    int4 = jlp.Int4(128)
    b, one = jlp.quantize(w, int4, axis=-2).mT, jlp.quantize(w[0], int4, axis=-2).mT
    weight_only = jax.jit(lambda x, q: grouped_weight_only(x, q, even, None, jnp.bfloat16))
    case = f"{groups} groups, {rows} rows each (even), {DEPTH}x{FEATURES}, bfloat16 by {int4}"
    cases.add(
        case, "one dense product", 0.9, functools.partial(weight_only, x, b), functools.partial(dense, x, one), rounds
    )


def wgrad(cases: Cases, groups: int, rows: int, rounds: int) -> None:
    """Contracted over the rows of each group: as many results as groups, where the dense product has one."""
    tokens = groups * rows
    x, dy, sizes = normal(0, tokens, DEPTH), normal(2, tokens, FEATURES), jnp.full(groups, rows, jnp.int32)
    grouped = jax.jit(lambda a, b: multiply_within_groups(a, b, jnp.float32))
    dense = jax.jit(lambda a, b: jlp.scaled_matmul(a, b, preferred_element_type=jnp.float32))
    for fmt in (jlp.NVFP4(), jlp.MXFP8()):
        ours = [quantize_groups(v, sizes, fmt, rowwise=False, columnwise=True)[1] for v in (x, dy)]
        theirs = [jlp.quantize(v, fmt, axis=-2).mT for v in (x, dy)]
        case = f"{groups} groups, {rows} rows each, wgrad {DEPTH}x{FEATURES}, {fmt}"
        cases.add(
            case,
            "one dense product",
            None,
            functools.partial(grouped, *ours),
            functools.partial(dense, *theirs),
            rounds,
        )


TOKENS, EXPERTS, TOP = 8192, (8, 64), 8
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while"}  # launch nothing
OF_A_CALL = 3  # on an H100: both operands decoded, or their scales laid out, and cuBLASLt's kernel


def launches() -> None:
    """A table of what the products of a mixture of experts launch: kernels and copies."""
    from tests.cuda_without_gpu.described_gpu import compiled, described

    shape = jax.ShapeDtypeStruct
    rows = TOKENS * TOP

    def launched(text: str, computation: str) -> int:
        (found,) = re.findall(rf"^{computation} .*?\n(.*?)^}}", text, re.MULTILINE | re.DOTALL)
        kinds = re.findall(r"^\s*(?:ROOT )?%\S+ = .*? ([a-z][\w-]*)\(", found, re.MULTILINE)
        return sum(kind not in FREE for kind in kinds)

    def row(groups: int, x_format: jlp.Format, w_format: jlp.Format, wgrad: bool, devices) -> str:
        sizes = shape((groups,), jnp.int32)

        def quantised(features: int):
            x = shape((rows, features), jnp.bfloat16)
            both = functools.partial(quantize_groups, fmt=x_format, rowwise=not wgrad, columnwise=wgrad)
            return jax.eval_shape(both, x, sizes)[wgrad]

        w = shape((groups, DEPTH, FEATURES), jnp.bfloat16)
        b = quantised(FEATURES) if wgrad else jax.eval_shape(lambda w: jlp.quantize(w, w_format, axis=-2).mT, w)
        product = functools.partial(multiply_within_groups, out_dtype=jnp.float32)
        if not wgrad:
            product = functools.partial(multiply_groups, bias=None, out_dtype=jnp.bfloat16)
        text = compiled(product, quantised(DEPTH), b, devices=devices).text
        (steps,) = (int(n) for n in re.findall(r'known_trip_count":\{"n":"(\d+)"', text))
        (loop,) = re.findall(r"body=%([\w.-]+)", text)
        assert text.count('custom_call_target="jaxlowprec_scaled_matmul"') == 1  # in the loop
        inside, outside = launched(text, "%" + re.escape(loop)) - 1, launched(text, "ENTRY")
        total = outside + steps * (inside + OF_A_CALL)
        name = "wgrad" if wgrad else "fprop"
        return f"| {x_format} | {name} | {groups} | {steps} | {inside} | {outside} | {total} |"

    print("| format | product | experts | steps | XLA's, a step | XLA's, besides | all |\n|" + " --- |" * 7)
    with described("H100") as devices:
        for x_format, w_format in (FORMATS[3], FORMATS[1], FORMATS[0]):
            for wgrad in (False, True):
                for groups in EXPERTS:
                    print(row(groups, x_format, w_format, wgrad, devices))


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    parser.add_argument(
        "--launches", action="store_true", help="count them instead: no GPU is needed, nothing is timed"
    )
    options = parser.parse_args()
    if options.launches:
        launches()
        return
    keep_memory()
    rounds, isa = 3 if options.quick else 9, native.isa()
    cases = Cases()
    for groups, rows in SHAPES:
        forward(cases, groups, rows, rounds)
        wgrad(cases, groups, rows, rounds)
    if options.save:
        print(save(f"grouped_matmul_{isa}", {"cases": {isa: cases.found}}))


if __name__ == "__main__":
    main()
