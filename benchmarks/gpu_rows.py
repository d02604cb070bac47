"""The rows of benchmarks/gpu.py: what is measured on a GPU, against what, and with which target, in the order of use.

Quantisers are measured against copying as many bytes as they must move: each byte of the input once a required read
(the amax of a tensor is one), each byte of the result once. Each call takes several inputs in turn, more than the cache
holds.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_trace import kernel_times
from timing import alternate

import jaxlowprec as jlp

CACHE = 200 << 20  # bytes: several times any GPU's last cache
SHAPES = ((8192, 8192), (16384, 4096))
FLOAT8_GEMMS = ((8192, 8192, 8192), (4096, 24576, 1536), (4096, 7168, 16384))  # M, N, K
CUBE = (8192, 8192, 8192)
FEW_ROWS = (1, 2, 4, 8, 16)
PARAMETERS = {"layers": 20, "width": 2048, "heads": 16, "context": 1024}  # of the block stack: 1.0e9
TOKENS, TOP, EXPERTS, EXPERT = 8192, 8, (8, 64), (4096, 1536)  # of a layer with experts: K and N of a weight
GROUPS = ("training", "few-rows", "gemms", "grouped", "memory")

# The least ratio of speeds by the device's name. An H200's memory is 1.4 times as fast with the same multiprocessors: a
# quantiser may spend fewer instructions on an element there before it falls behind a copy.
EVERYWHERE = {
    "rows": 0.9,
    "both": 0.85,
    "NVFP4, both": 0.75,
    "NVFP4, both, RHT": 0.68,
    "NVFP4, both, RHT, stochastic": 0.53,
    "hadamard": 0.9,
    "AdamW": 0.75,
    "AdamW, optax": 1.5,
    "few rows": 2.5,
    "16 rows": 2.3,
    "FP8 block GEMM": 1.5,
    "FP8 block GEMM, a large result": 1.25,
    "NVFP4 GEMM": 0.945,
    "MXFP8 GEMM": 0.93,
    "MXFP4 GEMM": 1.45,
    "FP8 block step": 1.25,
    "MXFP8 step": 0.93,
    "NVFP4 step": 0.89,
}
TARGETS = {"H100": EVERYWHERE, "H200": EVERYWHERE | {"NVFP4, both, RHT": 0.62, "NVFP4, both, RHT, stochastic": 0.48}}


def targets(device: str) -> dict[str, float]:
    """Those of the device, by its name; a device that is not listed has the H100's."""
    return next((found for name, found in TARGETS.items() if name in device), EVERYWHERE)


class Bench:
    """What the rows share: sizes divided for trials, and the device's own copy, measured when first needed."""

    def __init__(self, rounds: int = 11, divide: int = 1):
        self.rounds, self.divide = rounds, divide
        self.notes: dict[str, Any] = {}  # for the file's environment

    @functools.cached_property
    def copy(self) -> Copy:
        found = Copy(self.rounds, (512 << 20) // self.divide)
        self.notes["copy_bytes_per_second"] = found.bandwidth
        return found

    @functools.cached_property
    def attention(self) -> str:
        from llama_block import fastest_attention

        self.notes["attention"] = fastest_attention()
        return self.notes["attention"]


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement: ours against theirs.

    Attributes:
        group: one of GROUPS.
        case, against: the row's name.
        target: the least ratio of speeds, ours to theirs.
        sides: makes the inputs; gives what makes our call and what makes theirs.
    """

    group: str
    case: str
    against: str
    target: float | None
    sides: Callable[[Bench], tuple[Callable[[], Callable], Callable[[], Callable]]]

    @property
    def name(self) -> tuple[str, str]:
        return self.case, self.against

    def matches(self, pattern: str) -> bool:
        """Whether a group's name, or a pattern such as '*few rows*' for the row's name, means this row."""
        names = (self.group, self.case, f"{self.case} against {self.against}")
        return any(fnmatch.fnmatchcase(name, pattern) for name in names)


# --- sides


def rotating(function: Callable, inputs: list) -> Callable:
    """A call that runs a function on every one of the inputs, as one program: launches wait for nothing."""
    whole = jax.jit(lambda inputs: [function(*args) for args in inputs])
    return lambda: whole(inputs)


@functools.partial(jax.jit, static_argnums=1)
def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)


def normal(shape: tuple[int, ...], seed: int) -> jax.Array:
    """Random bfloat16."""
    return _normal(jax.random.key(seed), tuple(shape))


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
        kernels = sum(k["launches"] * k["seconds"] for k in kernel_times(calls[self.fastest]))
        self.bandwidth = nbytes * 2 / (kernels or seconds[self.fastest]["median"])
        print(f"device copy: {self.bandwidth / 1e9:,.0f} GB/s read and written, by {self.fastest}", flush=True)

    def of(self, nbytes: int, count: int, way: str | None = None) -> Callable:
        """A call that reads and writes `nbytes` together, `count` times over."""
        size = math.ceil(nbytes / 8 / 4096) * 4096  # XLA copies sizes that are not round in narrower pieces
        words = [(jnp.arange(size, dtype=jnp.uint32) * jnp.uint32(i + 1),) for i in range(count)]
        return rotating(self.ways[way or self.fastest], words)


def moved(function: Callable, x: jax.Array, reads: int) -> int:
    """Bytes that have to be read and written."""
    return reads * x.nbytes + sum(
        math.prod(o.shape) * o.dtype.itemsize for o in jax.tree.leaves(jax.eval_shape(function, x))
    )


# --- memory


def memory_rows(target: dict[str, float]) -> Iterator[Row]:
    """Quantisers and the Hadamard transform against a copy of as many bytes."""
    key = jax.random.key(7)
    ways: list[tuple[str, str, int, Callable]] = []  # name, target, reads of the input, function
    rotated = functools.partial(jlp.quantize_both, fmt=jlp.NVFP4(), hadamard_columnwise=True)
    stochastic = functools.partial(rotated, rounding="stochastic", key=key)
    formats = ((jlp.NVFP4(), 2), (jlp.Float8Block(), 1), (jlp.MXFP8(), 1), (jlp.Float8Tensor(), 2), (jlp.MXFP4(), 1))
    for fmt, reads in formats:
        both = "NVFP4, both" if fmt == jlp.NVFP4() else "both"
        ways.append((f"quantize {fmt}, rowwise", "rows", reads, functools.partial(jlp.quantize, fmt=fmt)))
        ways.append((f"quantize {fmt}, both", both, reads, functools.partial(jlp.quantize_both, fmt=fmt)))
    ways[2:2] = [
        ("quantize NVFP4, both, RHT columnwise", "NVFP4, both, RHT", 2, rotated),
        ("quantize NVFP4, both, RHT columnwise, stochastic", "NVFP4, both, RHT, stochastic", 2, stochastic),
    ]
    int4, size_128 = jlp.Int4(), functools.partial(jlp.hadamard_transform, size=128, signs=None)
    ways += [
        ("quantize Int4, rowwise", "rows", 1, functools.partial(jlp.quantize, fmt=int4)),
        ("fake_quantize Int4", "rows", 1, functools.partial(jlp.fake_quantize, fmt=int4)),
        ("hadamard_transform, size 16", "hadamard", 1, jlp.hadamard_transform),
        ("hadamard_transform, size 128", "hadamard", 1, size_128),
    ]

    def sides(bench, shape, reads, function):
        shape = tuple(s // bench.divide for s in shape)
        inputs = [(normal(shape, i),) for i in range(sets(2 * math.prod(shape)))]
        nbytes = moved(function, inputs[0][0], reads)
        return lambda: rotating(function, inputs), lambda: bench.copy.of(nbytes, len(inputs))

    for shape in SHAPES:
        for name, kind, reads, function in ways:
            made = functools.partial(function, implementation="ffi")
            build = functools.partial(sides, shape=shape, reads=reads, function=made)
            case = f"{name}, {shape[0]}x{shape[1]}"
            yield Row("memory", case, "a copy of as many bytes", target[kind], build)
    count = 2 * math.prod(SHAPES[0])
    yield same("memory", "a copy of 256 MiB", lambda bench: bench.copy.of(2 * count // bench.divide**2, 8))


def optimizer_rows(target: dict[str, float]) -> Iterator[Row]:
    """AdamW in one pass, in place, against a copy of as many bytes and against XLA's step of float32."""
    import optimizer

    def sides(bench, case, against):
        shape = tuple(s // bench.divide for s in SHAPES[0])
        side = optimizer.ours(shape, *optimizer.CASES[case])
        nbytes = side.gradient.nbytes + 2 * sum(x.nbytes for x in jax.tree.leaves(side.state))
        theirs = {"copy": lambda: bench.copy.of(nbytes, 1), "optax": lambda: optimizer.theirs(shape)}
        return lambda: side, theirs[against]

    for case in optimizer.CASES:
        name = f"AdamW, {case}, {SHAPES[0][0]}x{SHAPES[0][1]}"
        made = functools.partial(sides, case=case)
        yield Row("memory", name, "a copy of as many bytes", target["AdamW"], functools.partial(made, against="copy"))
        if case.startswith("8 bits stochastic, weights"):
            reached = target["AdamW, optax"]
            beside = name.replace("AdamW", "AdamW beside optax's")
            yield Row("memory", beside, "optax.adamw of float32", reached, functools.partial(made, against="optax"))


# --- GEMMs


def operands(bench: Bench, sizes: tuple, formats: tuple) -> tuple[list, list]:
    """Pairs of bfloat16, and the same quantised; format None leaves one in bfloat16."""
    m, n, k = (min(s, max(128, s // bench.divide)) for s in sizes)
    pairs = [(normal((m, k), i), normal((n, k), 100 + i)) for i in range(sets(n * k // 2))]
    quantise = jax.jit(jlp.quantize, static_argnums=1)
    return pairs, [tuple(quantise(x, f) if f else x for x, f in zip(p, formats, strict=True)) for p in pairs]


def bf16_matmul(pairs: list, rounds: int) -> Callable:
    """`jnp.matmul` of bf16, with the weight's layout that is faster."""
    turned = [(a, jnp.copy(w.T)) for a, w in pairs]
    calls = {"nk": rotating(lambda a, w: jnp.matmul(a, w.T), pairs), "kn": rotating(jnp.matmul, turned)}
    seconds = alternate(calls, rounds)
    return calls[min(seconds, key=lambda name: seconds[name]["median"])]


def _matmul(a: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.matmul(a, w.T)


def same(group: str, case: str, call: Callable[[Bench], Callable]) -> Row:
    """A call against itself: how far a ratio is from 1 by chance."""
    return Row(group, case, "itself", None, lambda bench: (lambda: call(bench), lambda: call(bench)))


def gemm(group: str, name: str, target: float | None, sizes: tuple, formats: tuple) -> Row:
    """A GEMM of operands that are quantised before, against bf16's of the same sizes."""

    def sides(bench):
        pairs, quantised = operands(bench, sizes, formats)
        ours = functools.partial(jlp.scaled_matmul, implementation="ffi")
        return lambda: rotating(ours, quantised), lambda: bf16_matmul(pairs, 3)

    return Row(group, f"{name} {'x'.join(map(str, sizes))}", "bf16 jnp.matmul", target, sides)


def few_rows(target: dict[str, float]) -> Iterator[Row]:
    """The GEMMs of inference."""
    for rows in FEW_ROWS:
        sizes = (rows, *CUBE[1:])
        for name, formats in (
            ("weight-only Int4", (None, jlp.Int4())),
            ("weight-only NVFP4", (None, jlp.NVFP4())),
            ("scaled_matmul NVFP4", (jlp.NVFP4(), jlp.NVFP4())),
        ):
            yield gemm("few-rows", f"{name}, few rows", target["16 rows" if rows == 16 else "few rows"], sizes, formats)
    whole = (None, None)
    yield same(
        "few-rows", "jnp.matmul, few rows", lambda bench: rotating(_matmul, operands(bench, (1, *CUBE[1:]), whole)[0])
    )


def gemms(target: dict[str, float]) -> Iterator[Row]:
    """Large ones."""
    block = (jlp.Float8Block(), jlp.Float8Block(block=(128, 128)))
    for sizes in FLOAT8_GEMMS:
        is_large = sizes[0] * sizes[1] > 8 * sizes[2] ** 2  # the result, whose bytes take a sixth of the time
        large = ", a large result" if is_large else ""
        yield gemm("gemms", "scaled_matmul FP8 block", target[f"FP8 block GEMM{large}"], sizes, block)
    yield gemm("gemms", "scaled_matmul NVFP4", target["NVFP4 GEMM"], CUBE, (jlp.NVFP4(), jlp.NVFP4((16, 16))))
    yield gemm("gemms", "scaled_matmul MXFP8", target["MXFP8 GEMM"], CUBE, (jlp.MXFP8(), jlp.MXFP8()))
    yield gemm("gemms", "scaled_matmul MXFP4", target["MXFP4 GEMM"], CUBE, (jlp.MXFP4(), jlp.MXFP4()))
    yield gemm("gemms", "scaled_matmul FP8 tensor", None, CUBE, (jlp.Float8Tensor(), jlp.Float8Tensor()))


# --- rows in groups


def grouped(target: dict[str, float]) -> Iterator[Row]:
    """Products of tokens by their experts' weights, quantisation included; no row has a target yet."""
    recipes = {
        "FP8 block": jlp.Float8BlockScaling(),
        "MXFP8": jlp.MXFP8BlockScaling(),
        "NVFP4": jlp.NVFP4BlockScaling(disable_stochastic_rounding=True),
    }

    def sides(bench, experts, recipe, gradient, dense):
        depth, features = (max(128, size // bench.divide) for size in EXPERT)
        rows = max(128, TOKENS // bench.divide) * TOP
        x, dy = normal((rows, depth), 0), normal((rows, features), 1)
        w = normal((experts, depth, features), 2)
        sizes = jnp.asarray(np.random.default_rng(0).multinomial(rows, np.full(experts, 1 / experts)), jnp.int32)

        def of(product, w):
            if not gradient:
                return rotating(lambda x, w: product(x, w), [(x, w)])
            return rotating(lambda x, w, dy: jax.vjp(lambda w: product(x, w), w)[1](dy), [(x, w, dy)])

        def ours(x, w):
            return jlp.grouped_matmul(x, w, sizes, recipe=recipe)

        def theirs(x, w):
            return jnp.matmul(x, w) if dense else jax.lax.ragged_dot(x, w, sizes)

        return lambda: of(ours, w), lambda: of(theirs, w[0] if dense else w)

    for experts, (name, recipe), gradient, dense in itertools.product(
        EXPERTS, recipes.items(), (False, True), (False, True)
    ):
        case = f"{'wgrad' if gradient else 'fprop'} of {experts} experts, {TOKENS} tokens, top-{TOP}, {name}"
        against = "one dense bf16 jnp.matmul of all rows" if dense else "bf16 jax.lax.ragged_dot"
        how = {"experts": experts, "recipe": recipe, "gradient": gradient, "dense": dense}
        yield Row("grouped", case, against, None, functools.partial(sides, **how))


# --- training


def llama_blocks(target: dict[str, float]) -> Iterator[Row]:
    """A training step of a Llama block, quantisation included."""
    from llama_block import Side, Size, attention_by, step

    def sides(bench, recipe):
        size, attention = Size().divided(bench.divide), attention_by(bench.attention)
        return lambda: step(size, Side(recipe, "quantized"), attention), lambda: step(size, Side(), attention)

    size = Size()
    for name, recipe in (
        ("FP8 block", jlp.Float8BlockScaling()),
        ("MXFP8", jlp.MXFP8BlockScaling()),
        ("NVFP4", jlp.NVFP4BlockScaling()),
    ):
        case = f"a training step of a Llama block, {size.width} wide, {size.batch * size.time} tokens, {name}"
        reached = target[f"{name} step"]
        yield Row("training", case, "plain Flax, bfloat16", reached, functools.partial(sides, recipe=recipe))


def block_stacks(target: dict[str, float]) -> Iterator[Row]:
    """A training step of a stack of blocks, AdamW included, against the same in plain Flax."""
    from flax import nnx
    from train_step import RECIPES, SIZES, Batches, Stepper, read_text

    def sides(bench, recipe):
        sizes = PARAMETERS if bench.divide == 1 else {"layers": 2, "width": 128, "heads": 4, "context": 64}
        config = dataclasses.replace(SIZES["demo"], **sizes, high_precision_last=0)
        batches = Batches(read_text(None), 8, config.context, 0)

        def ours():
            with jlp.autocast(recipe):
                stepper = Stepper(config, jlp.nnx.Linear, batches)

            def call():
                with jlp.autocast(recipe):
                    return stepper()

            return call

        return ours, lambda: Stepper(config, nnx.Linear, batches)

    for name in ("FP8 block", "NVFP4"):
        case = f"a training step of 1.0e9 parameters, {name}"
        yield Row("training", case, "plain Flax, bfloat16", None, functools.partial(sides, recipe=RECIPES[name]))


def rows(device: str) -> list[Row]:
    """All, the most wanted first."""
    target = targets(device)
    makers = (llama_blocks, few_rows, block_stacks, gemms, grouped, memory_rows, optimizer_rows)
    return [row for make in makers for row in make(target)]
