"""What XLA makes of products, quantisers and training steps for TPUs that are not there.

    PYTHONPATH=. python benchmarks/described_tpu.py --tpu 7x --save

Needs the extra tpu-check. Nothing runs on a TPU: cycles are libtpu's own estimates, for ratios only. They leave copies
out, and a loop whose turns XLA does not tell counts once. For Pallas kernels it has none: the instruction bundles that
a call executes are added, without waiting for memory; equal kernels of a program are compiled, and counted, once.
Compilation is measured in seconds of the processor, of all threads. Rows of other commits stay in the file, to compare
with; an older one is measured in its own checkout, with this file and tests/tpu_without_tpu copied into it.
"""

from __future__ import annotations

import argparse
import collections
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import sources
from flax import nnx
from recorded import RESULTS, load
from timing import save

import jaxlowprec as jlp
from tests.cuda_without_gpu.test_described_block import Fused
from tests.tpu_without_tpu.described_tpu import TPUS, compiled, devices_of

NAME = "described_tpu"
SEVERAL = 10  # kernels of which libtpu takes many minutes to write the instructions
CHUNK = 128  # rows of a tile that our kernels take in a turn of their loop
Case = tuple[Callable, tuple[Any, ...]]


def cases() -> dict[str, Callable[[], Case]]:
    """Functions and the shapes of their arguments, by name."""

    def array(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    def product(fmt) -> Case:
        if fmt is None:
            return lambda a, b: a @ b.mT, (array(2048, 2048),) * 2
        a, b = (jax.eval_shape(lambda x, f=f: jlp.quantize(x, f), array(2048, 2048)) for f in fmt)
        return lambda a, b: jlp.scaled_matmul(a, b), (a, b)

    def quantiser(fmt, quantize=jlp.quantize_both, **options) -> Case:
        def call(x, seed):
            key = {"key": jax.random.key(seed)} if "rounding" in options else {}
            return quantize(x, fmt, **options, **key)

        return call, (array(4096, 4096), array(dtype="uint32"))

    def step(recipe, n: int = 1024) -> Case:
        def gradients(x, w, dy):
            y, pullback = jax.vjp(lambda x, w: jlp.linear(x, w, recipe=recipe), x, w)
            return y, pullback(dy)

        return gradients, (array(n, n), array(n, n, dtype="float32"), array(n, n))

    def block(recipe) -> Case:
        """A step of a Llama block of 1024 features."""

        def gradients(parameters, x, dy):
            with jlp.autocast(recipe, enabled=recipe is not None):
                y, pullback = jax.vjp(lambda p, x: nnx.merge(graph, p)(x), parameters, x)
                return y, pullback(dy)

        made = nnx.eval_shape(lambda: Fused(nnx.Rngs(0), "quantized", 1024, 2816))
        graph, parameters = nnx.split(made, nnx.Param)
        return gradients, (parameters, *[array(2, 1024, 1024)] * 2)

    blocks = jlp.Float8Block(), jlp.Float8Block(block=(128, 128))
    formats = {name: (fmt, fmt) for name, fmt in (("NVFP4", jlp.NVFP4()), ("MXFP8", jlp.MXFP8()))}
    formats |= {"Float8Block": blocks, "Float8Tensor": (jlp.Float8Tensor(),) * 2}
    rows = {name: f for name, (f, _) in formats.items()} | {"MXFP4": jlp.MXFP4()}
    rows |= {"Int4": jlp.Int4(), "Int4 asymmetric": jlp.Int4(32, symmetric=False)}
    rows |= {"NVFP4 16x16": jlp.NVFP4(block=(16, 16)), "Float8Block 128x128": blocks[1]}
    rotated = {"hadamard_columnwise": True}
    recipes = {
        "bfloat16": None,
        "Float8CurrentScaling": jlp.Float8CurrentScaling(),
        "MXFP8BlockScaling": jlp.MXFP8BlockScaling(),
        "Float8BlockScaling": jlp.Float8BlockScaling(),
        "NVFP4BlockScaling": jlp.NVFP4BlockScaling(),
    }
    return {
        "scaled_matmul bfloat16": lambda: product(None),
        **{f"scaled_matmul {name}": lambda f=f: product(f) for name, f in formats.items()},
        "quantize_both copy": lambda: (lambda x: x * 2, (array(4096, 4096),)),
        **{f"quantize {name}": lambda f=f: quantiser(f, jlp.quantize) for name, f in rows.items()},
        **{f"quantize_both {name}": lambda f=f: quantiser(f) for name, f in rows.items() if "Int4" not in name},
        "quantize_both NVFP4, RHT": lambda: quantiser(jlp.NVFP4(), **rotated),
        "quantize_both NVFP4, RHT, stochastic": lambda: quantiser(jlp.NVFP4(), **rotated, rounding="stochastic"),
        **{f"linear {name}": lambda r=r: step(r) for name, r in recipes.items()},
        **{f"linear 4096 {name}": lambda r=r: step(r, 4096) for name, r in recipes.items()},
        **{f"block {name}": lambda r=r: block(r) for name, r in recipes.items()},
    }


def kernel_bundles(name: str, tpu: str) -> int:
    """The bundles that the calls of our kernels in a case execute, one a cycle.

    libtpu writes them in a process of its own, since writing takes longer than compiling. Those within the grid's loop
    run once a tile, those of its inner loop once a chunk of rows.
    """
    total = 0
    with tempfile.TemporaryDirectory() as folder:
        written = {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"}
        command = [sys.executable, __file__, "--tpu", tpu, "--compile", name]
        subprocess.run(command, check=True, env=os.environ | written)
        for file in pathlib.Path(folder).glob("*jaxlowprec_*-final_bundles.txt"):
            text = file.read_text()
            shapes = re.search(r"window shape is \w+\[([\d,]+)\], while the full shape is \w+\[([\d,]+)\]", text)
            if shapes is None:  # an analysis of the schedule
                continue
            window, full = ([int(n) for n in shape.split(",")] for shape in shapes.groups())
            tiles = math.prod(-(-n // w) for n, w in zip(full, window, strict=True))
            for depth in re.findall(r"^\s*0x[0-9a-f]+\s+(?:\w+)?\s*:\s*(>*) \{", text, re.MULTILINE):
                turns = window[-2] // CHUNK if len(depth) > 1 else 1
                total += tiles * turns if depth else 1
    return total


def measured(name: str, tpu: str) -> dict[str, Any]:
    """What became of a case, and what that took."""
    function, args = cases()[name]()
    devices = devices_of(tpu)
    started = time.process_time()
    program = compiled(function, *args, devices=devices)
    seconds = time.process_time() - started
    kernels = sum("/pallas_call" in i.origin for i in program.of_kind("custom-call"))
    cycles = program.cycles + (kernel_bundles(name, tpu) if 0 < kernels < SEVERAL else 0)
    operands = collections.Counter(" x ".join(types) for types in program.products())
    return {
        "compile_cpu_seconds": round(seconds, 1),
        "cycles": cycles if kernels < SEVERAL else None,
        "kernels": kernels,
        "temporary_megabytes": round(program.temporary_bytes / 1e6, 1),
        "loops": len(program.loops),
        "gathers": len(program.gathers),
        "dropped_casts": len(program.dropped_casts),
        "products": dict(operands),
    }


def main() -> None:
    """Prints, and adds to the file in benchmarks/results with --save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tpu", action="append", choices=TPUS, help="default: all")
    parser.add_argument("--only", default="", help="cases whose name begins so")
    parser.add_argument("--save", action="store_true", help="add to benchmarks/results")
    parser.add_argument("--compile", help="compile this case, and no more")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if options.compile:
        function, args = cases()[options.compile]()
        compiled(function, *args, devices=devices_of(options.tpu[0]))
        return
    commit = sources.commit()
    for tpu in options.tpu or TPUS:
        for name in cases():
            if name.startswith(options.only):
                found = measured(name, tpu)
                print(f"{commit} {tpu:3} {name:32}", *(f"{k} {v}" for k, v in found.items()), sep="  ", flush=True)
                if options.save:
                    rows = load(NAME)["rows"] if (RESULTS / f"{NAME}.json").exists() else {}
                    rows.setdefault(name, {}).setdefault(tpu, {})[commit] = found
                    save(NAME, {"rows": rows})


if __name__ == "__main__":
    main()
