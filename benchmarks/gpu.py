"""The GPU's kernels against its memory and XLA's own bf16: every row a ratio of one run, both sides in turn.

python benchmarks/gpu.py                       # prints
python benchmarks/gpu.py --save [FILE]         # also writes benchmarks/results/gpu.json, or another file, case by case
python benchmarks/gpu.py --show FILE           # the table of a file
python benchmarks/gpu.py --divide 32           # tiny sizes, on any device: shows that the program works

Quantisers are measured against copying as many bytes as they must move: each byte of the input once a required read
(the amax of a tensor is one), each byte of the result once. Each call takes several inputs in turn, more than the cache
holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from timing import RESULTS, Cases, alternate, environment

import jaxlowprec as jlp

CACHE = 200 << 20  # bytes: several times any GPU's last cache
SHAPES = ((8192, 8192), (16384, 4096))
FLOAT8_GEMMS = ((8192, 8192, 8192), (4096, 24576, 1536), (4096, 7168, 16384))  # M, N, K
PARAMETERS = {"layers": 20, "width": 2048, "heads": 16, "context": 1024}  # of the block stack: 1.0e9


class Saved(Cases):
    """Written after every case: a run that is cut off leaves what it has measured."""

    def __init__(self, path: pathlib.Path | None, rounds: int):
        super().__init__()
        self.path, self.rounds, self.environment = path, rounds, gpu_environment()

    def measure(self, name: str, against: str, target: float | None, ours: Callable, theirs: Callable) -> None:
        """One row; what fails is one too."""
        try:
            self.add(name, against, target, ours, theirs, self.rounds)
        except Exception as error:  # the other cases are worth having
            self.found.append({"case": name, "against": against, "target": target, "error": str(error)[:500]})
            print(f"{name:66} FAILED: {str(error)[:200]}", flush=True)
        self.write()

    def write(self) -> None:
        """The file as it would be at the end."""
        if self.path:
            self.path.write_text(json.dumps({"environment": self.environment, "cases": self.found}, indent=1) + "\n")


def gpu_environment() -> dict[str, Any]:
    """What a figure has to be read with."""
    device = jax.devices()[0]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        driver = None
    cuda = getattr(device.client, "platform_version", "")
    return environment() | {"device": device.device_kind, "driver": driver, "cuda": " ".join(cuda.split())}


# --- sides


def rotating(function: Callable, inputs: list) -> Callable:
    """A call that runs a function on every one of the inputs, as one program: launches wait for nothing."""
    whole = jax.jit(lambda inputs: [function(*args) for args in inputs])
    return lambda: whole(inputs)


def normal(shape: tuple[int, ...], seed: int) -> jax.Array:
    """Random bfloat16."""
    return jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))(jax.random.key(seed))


def sets(nbytes: int) -> int:
    """How many inputs of a size are more than the cache holds; small ones, of trials, never are."""
    return min(8, max(2, math.ceil(CACHE / nbytes)))


class Copy:
    """The faster of the two ways in which XLA moves memory."""

    def __init__(self, rounds: int, nbytes: int):
        self.ways = {"memcpy": lambda x: jnp.copy(x), "kernel": lambda x: x ^ jnp.uint32(1)}
        calls = {name: self.of(nbytes, 2, name) for name in self.ways}
        seconds = alternate(calls, rounds)
        self.fastest = min(seconds, key=lambda name: seconds[name]["median"])
        self.bandwidth = nbytes * 2 / seconds[self.fastest]["median"]
        print(f"device copy: {self.bandwidth / 1e9:,.0f} GB/s read and written, by {self.fastest}", flush=True)

    def of(self, nbytes: int, count: int, way: str | None = None) -> Callable:
        """A call that reads and writes `nbytes` together, `count` times over."""
        words = [(jnp.arange(nbytes // 8, dtype=jnp.uint32) * jnp.uint32(i + 1),) for i in range(count)]
        return rotating(self.ways[way or self.fastest], words)


# --- cases


def moved(function: Callable, x: jax.Array, reads: int) -> int:
    """Bytes that have to be read and written."""
    return reads * x.nbytes + sum(
        math.prod(o.shape) * o.dtype.itemsize for o in jax.tree.leaves(jax.eval_shape(function, x))
    )


def memory_bound(cases: Saved, copy: Copy, shapes: list) -> None:
    """Quantisers and the Hadamard transform against a copy of as many bytes."""
    key = jax.random.key(7)
    ways: list[tuple[str, float | None, int, Callable]] = []  # name, target, reads of the input, function
    for fmt, reads in ((jlp.NVFP4(), 2), (jlp.Float8Block(), 1), (jlp.MXFP8(), 1)):
        ways.append((f"quantize {fmt}, rowwise", 0.85, reads, functools.partial(jlp.quantize, fmt=fmt)))
        ways.append((f"quantize {fmt}, both", 0.85, reads, functools.partial(jlp.quantize_both, fmt=fmt)))
    rotated = functools.partial(jlp.quantize_both, fmt=jlp.NVFP4(), hadamard_columnwise=True)
    ways.append(("quantize NVFP4, both, RHT columnwise", 0.75, 2, rotated))
    stochastic = functools.partial(rotated, rounding="stochastic", key=key)
    ways.append(("quantize NVFP4, both, RHT columnwise, stochastic", 0.55, 2, stochastic))
    ways.append(("hadamard_transform, size 16", 0.9, 1, jlp.hadamard_transform))
    ways.append(
        ("hadamard_transform, size 128", 0.9, 1, functools.partial(jlp.hadamard_transform, size=128, signs=None))
    )
    ways.append(("quantize Int4, rowwise", None, 1, functools.partial(jlp.quantize, fmt=jlp.Int4())))
    ways.append(("fake_quantize Int4", None, 1, functools.partial(jlp.fake_quantize, fmt=jlp.Int4())))
    for shape in shapes:
        inputs = [(normal(shape, i),) for i in range(sets(2 * math.prod(shape)))]
        for name, target, reads, function in ways:
            call = functools.partial(function, implementation="ffi")
            nbytes = moved(call, inputs[0][0], reads)
            theirs = copy.of(nbytes, len(inputs))
            row = f"{name}, {shape[0]}x{shape[1]}"
            cases.measure(row, "a copy of as many bytes", target, rotating(call, inputs), theirs)


def bf16_matmul(pairs: list, rounds: int) -> Callable:
    """`jnp.matmul` of bf16, with the weight's layout that is faster."""
    turned = [(a, jnp.copy(w.T)) for a, w in pairs]
    calls = {"nk": rotating(lambda a, w: jnp.matmul(a, w.T), pairs), "kn": rotating(jnp.matmul, turned)}
    seconds = alternate(calls, rounds)
    return calls[min(seconds, key=lambda name: seconds[name]["median"])]


def gemm(cases: Saved, name: str, target: float | None, sizes: tuple, formats: tuple, choices: int = 0) -> None:
    """A GEMM of operands that are quantised before, against bf16's of the same sizes; format None leaves one in bf16.

    And against itself, by the best of as many `choices` of cuBLASLt's algorithm.
    """
    m, n, k = sizes
    count = sets(n * k // 2)
    pairs = [(normal((m, k), i), normal((n, k), 100 + i)) for i in range(count)]
    quantised = [
        tuple(jax.jit(jlp.quantize, static_argnums=1)(x, f) if f else x for x, f in zip(p, formats, strict=True))
        for p in pairs
    ]
    ours = rotating(functools.partial(jlp.scaled_matmul, implementation="ffi"), quantised)
    theirs = bf16_matmul(pairs, 3)
    cases.measure(f"{name} {m}x{n}x{k}", "bf16 jnp.matmul", target, ours, theirs)
    if choices:
        first, best = first_and_fastest_suggestion(quantised, choices)
        cases.measure(f"{name} {m}x{n}x{k}", f"the best of cuBLASLt's {choices} suggestions", 0.97, first, best)


def suggestion(quantised: list, index: int) -> Callable:
    """The GEMM by one of the algorithms that cuBLASLt suggests, in a program of its own: a graph keeps what it has."""
    call = rotating(functools.partial(jlp.scaled_matmul, implementation="ffi"), quantised)

    def run():
        os.environ["JAXLOWPREC_GEMM_ALGORITHM"] = str(index)
        try:
            return jax.block_until_ready(call())
        finally:
            del os.environ["JAXLOWPREC_GEMM_ALGORITHM"]

    return run


def first_and_fastest_suggestion(quantised: list, most: int) -> tuple[Callable, Callable]:
    """The one that is taken, and the fastest; there may be fewer than `most`."""
    calls: dict[str, Callable] = {}
    for index in range(most):
        calls[str(index)] = suggestion(quantised, index)
        try:
            calls[str(index)]()
        except jax.errors.JaxRuntimeError as error:
            if not index:
                raise
            print(f"cuBLASLt has {index} suggestions: {str(error)[:100]}", flush=True)
            del calls[str(index)]
            break
    seconds = alternate(calls, 3)
    return calls["0"], calls[min(seconds, key=lambda name: seconds[name]["median"])]


def gemms(cases: Saved, divide: int) -> None:
    """Large ones, and those of inference."""

    def sized(sizes):
        return tuple(max(128, s // divide) for s in sizes)

    float8 = (jlp.Float8Block(), jlp.Float8Block(block=(128, 128)))
    for sizes in FLOAT8_GEMMS:
        gemm(cases, "scaled_matmul FP8 block", 1.5, sized(sizes), float8, choices=8)
    cube = sized((8192,) * 3)
    gemm(cases, "scaled_matmul NVFP4", 0.9, cube, (jlp.NVFP4(), jlp.NVFP4((16, 16))))
    gemm(cases, "scaled_matmul MXFP8", None, cube, (jlp.MXFP8(), jlp.MXFP8()))
    gemm(cases, "scaled_matmul FP8 tensor", None, cube, (jlp.Float8Tensor(), jlp.Float8Tensor()))
    for rows in (1, 2, 4, 8, 16):
        gemm(cases, "scaled_matmul NVFP4, few rows", 2.5, (rows, *cube[1:]), (jlp.NVFP4(), jlp.NVFP4()))
        for fmt in (jlp.Int4(), jlp.NVFP4()):
            gemm(cases, f"weight-only {type(fmt).__name__}, few rows", 2.5, (rows, *cube[1:]), (None, fmt))


def training_step(cases: Saved, divide: int) -> None:
    """A training step of a stack of blocks, AdamW included, against the same in plain Flax."""
    from flax import nnx
    from train_step import RECIPES, SIZES, Batches, Stepper, read_text

    sizes = PARAMETERS if divide == 1 else {"layers": 2, "width": 128, "heads": 4, "context": 64}
    config = dataclasses.replace(SIZES["demo"], **sizes, high_precision_last=0)
    batches = Batches(read_text(None), 8, config.context, 0)
    plain = Stepper(config, nnx.Linear, batches)
    count = sum(leaf.size for leaf in jax.tree.leaves(plain.parameters))
    for name, target in (("FP8 block", 1.2), ("NVFP4", None)):
        with jlp.autocast(RECIPES[name]):
            stepper = Stepper(config, jlp.nnx.Linear, batches)

        def ours(recipe=RECIPES[name], stepper=stepper):
            with jlp.autocast(recipe):
                return stepper()

        row = f"a training step of {count / 1e9:.2f}e9 parameters, {name}"
        cases.measure(row, "plain Flax, bfloat16", target, ours, plain)
        del stepper, ours


# --- the table


def show(path: pathlib.Path) -> None:
    """Prints what a file holds."""
    result = json.loads(path.read_text())
    e = result["environment"]
    print(f"{e['device']}, driver {e['driver']}, {e['cuda']}, jax {e['versions']['jax']}, commit {e['commit']}")
    for c in result["cases"]:
        if "error" in c:
            print(f"{c['case']:66} FAILED: {c['error'][:100]}")
            continue
        ratio, target = c["ratio"]["median"], c["target"]
        verdict = "" if target is None else f"target {target}: {'met' if ratio >= target else 'MISSED'}"
        print(f"{c['case']:66} {c['against']:28} {ratio:6.2f}x  {verdict}")


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--divide", type=int, default=1, help="sizes by this much smaller")
    parser.add_argument("--only", choices=("memory", "gemms", "training"))
    parser.add_argument("--save", nargs="?", type=pathlib.Path, const=RESULTS / "gpu.json")
    parser.add_argument("--show", type=pathlib.Path)
    options = parser.parse_args()
    if options.show:
        show(options.show)
        return
    if options.divide == 1 and jax.devices()[0].platform != "gpu":
        raise SystemExit("no GPU here (--divide 32 runs small sizes on any device)")
    cases = Saved(options.save, options.rounds)
    if options.only in (None, "memory"):
        shapes = [tuple(s // options.divide for s in shape) for shape in SHAPES]
        copy = Copy(options.rounds, (512 << 20) // options.divide)
        cases.environment["copy_bytes_per_second"] = copy.bandwidth
        memory_bound(cases, copy, shapes)
    if options.only in (None, "gemms"):
        gemms(cases, options.divide)
    if options.only in (None, "training"):
        training_step(cases, options.divide)


if __name__ == "__main__":
    main()
