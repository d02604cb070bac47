"""What makes an operand of a GEMM, and its quantisation both ways: ours against plain JAX followed by `quantize_both`.

    python benchmarks/producers.py [--save] [--rounds 15] [--isa avx2] [--only swiglu]

Ours gives the amaxes of its result in the same pass, so that NVFP4 is quantised without a pass over it for them. To
MXFP8 it quantises without storing the result. With --isa avx2 XLA, too, compiles for AVX2.

The parts of ours are measured beside it: the producer alone, and the quantisation of an array in memory. Their sum is
what two passes take.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from timing import Cases, alternate, keep_memory, save

import jaxlowprec as jlp
from jaxlowprec.ops.activations.api import activated, activation_gradients
from jaxlowprec.ops.activations.quantized import quantized_activation, quantized_activation_gradients
from jaxlowprec.ops.amax import Amaxes
from jaxlowprec.ops.norms.api import NormSpec, normed
from jaxlowprec.ops.norms.quantized import quantized_norm
from jaxlowprec.wiring import native

SHAPES = [(4096, 4096), (2048, 3584)]
EPSILON = 1e-6


class Producer(NamedTuple):
    """One of the two sides.

    Attributes:
        plain: arrays -> results in bfloat16, as a user writes it.
        ours: (wanted amaxes, arrays) -> results, and the amaxes of each.
        operands: how many arrays [R, C] it takes.
        quantized: (format, arrays) -> the results quantised both ways, without being stored.
        gamma: whether one of [C] comes after them.
    """

    plain: Callable[..., list[jax.Array]]
    ours: Callable[..., tuple[list[jax.Array], list[list[jax.Array]]]]
    operands: int
    quantized: Callable[..., Any]
    gamma: bool = False

    def arrays(self, rows: int, columns: int) -> list[jax.Array]:
        """Normal numbers."""
        keys = jax.random.split(jax.random.key(0), self.operands + 1)
        shapes = [(rows, columns)] * self.operands + [(columns,)] * self.gamma
        return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=False)]


def _plain_norm(x: jax.Array, gamma: jax.Array) -> list[jax.Array]:
    wide = x.astype(jnp.float32)
    variance = jnp.square(wide).mean(-1, keepdims=True)
    return [(wide * jax.lax.rsqrt(variance + EPSILON)).astype(x.dtype) * gamma]


_SPEC = NormSpec("rms", EPSILON, residual=False, beta=False)


def _norm(amaxes: Amaxes | None, x: jax.Array, gamma: jax.Array) -> tuple[list[jax.Array], list[list[jax.Array]]]:
    found = normed(dataclasses.replace(_SPEC, amaxes=amaxes), x, gamma.astype(jnp.float32))
    return [found.y], [found.amaxes]


def _quantized_norm(fmt: Any, x: jax.Array, gamma: jax.Array) -> Any:
    return quantized_norm(_SPEC, fmt, x, gamma.astype(jnp.float32))[:2]


def _plain_swiglu(gate: jax.Array, up: jax.Array) -> list[jax.Array]:
    return [jax.nn.silu(gate) * up]


def _swiglu(amaxes: Amaxes | None, gate: jax.Array, up: jax.Array) -> tuple[list[jax.Array], list[list[jax.Array]]]:
    y, found = activated("swiglu", (gate, up), amaxes)
    return [y], [found]


def _quantized_swiglu(fmt: Any, gate: jax.Array, up: jax.Array) -> Any:
    return quantized_activation("swiglu", fmt, (gate, up))


def _plain_backward(dy: jax.Array, gate: jax.Array, up: jax.Array) -> list[jax.Array]:
    return list(jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, gate, up)[1](dy))


def _backward(amaxes: Amaxes | None, dy: jax.Array, *operands: jax.Array) -> Any:
    return activation_gradients("swiglu", dy, operands, amaxes)


def _quantized_backward(fmt: Any, dy: jax.Array, *operands: jax.Array) -> Any:
    return quantized_activation_gradients("swiglu", fmt, dy, operands)


PRODUCERS = {
    "rms_norm": Producer(_plain_norm, _norm, 1, _quantized_norm, gamma=True),
    "swiglu": Producer(_plain_swiglu, _swiglu, 2, _quantized_swiglu),
    "swiglu backward": Producer(_plain_backward, _backward, 3, _quantized_backward),
}

FORMATS = {  # the format, its rotation columnwise, and the target: the least ratio of speeds
    "NVFP4": (jlp.NVFP4(), jlp.Hadamard(), 1.6),
    "MXFP8": (jlp.MXFP8(), None, 2.0),
}


def sides(producer: Producer, fmt: Any, rotation: jlp.Hadamard | None) -> tuple[Callable, Callable]:
    """Ours and theirs, jitted: arrays -> the results, quantised both ways."""
    wanted = Amaxes(True, rotation) if fmt.has_tensor_scale else None
    columnwise = rotation or False

    def ours(*arrays: jax.Array) -> Any:
        if fmt.scaled_by_blocks_alone:
            return producer.quantized(fmt, *arrays)
        results, amaxes = producer.ours(wanted, *arrays)
        given = [tuple(found) if found else None for found in amaxes]
        pairs = zip(results, given, strict=True)
        return [jlp.quantize_both(y, fmt, hadamard_columnwise=columnwise, amax=found) for y, found in pairs]

    def theirs(*arrays: jax.Array) -> Any:
        return [jlp.quantize_both(y, fmt, hadamard_columnwise=columnwise) for y in producer.plain(*arrays)]

    return jax.jit(ours), jax.jit(theirs)


def parts(producer: Producer, fmt: Any, rotation: jlp.Hadamard | None, arrays: list[jax.Array]) -> dict[str, Any]:
    """Seconds of ours, of the producer alone, and of quantising its results by amaxes that are known."""
    wanted = Amaxes(True, rotation) if fmt.has_tensor_scale else None
    alone = jax.jit(lambda *arrays: producer.ours(wanted, *arrays))
    results, amaxes = alone(*arrays)
    given = [tuple(found) if found else None for found in amaxes]

    @jax.jit
    def quantization(results: Any, given: Any) -> Any:
        pairs = zip(results, given, strict=True)
        return [jlp.quantize_both(y, fmt, hadamard_columnwise=rotation or False, amax=found) for y, found in pairs]

    ours, _ = sides(producer, fmt, rotation)
    calls = {"ours": lambda: ours(*arrays), "producer": lambda: alone(*arrays)}
    return alternate({**calls, "quantisation": lambda: quantization(results, given)}, rounds=9)


def hold_xla_to(isa: str) -> None:
    """Starts the program again so that XLA compiles for that instruction set."""
    flags = os.environ.get("XLA_FLAGS", "")
    if isa == "avx2" and "xla_cpu_max_isa" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_max_isa=AVX2".strip()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--isa", choices=native.available_isas(), default=native.available_isas()[0])
    parser.add_argument("--only", choices=PRODUCERS)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    hold_xla_to(options.isa)
    keep_memory()
    native.use_isa(options.isa)
    cases = Cases()
    for name, producer in PRODUCERS.items():
        for rows, columns in SHAPES if options.only in (None, name) else []:
            arrays = producer.arrays(rows, columns)
            for of, (fmt, rotation, target) in FORMATS.items():
                ours, theirs = (lambda f=f, a=arrays: f(*a) for f in sides(producer, fmt, rotation))
                case = f"{name} to {of}, {rows}x{columns}"
                cases.add(case, "plain JAX and quantize_both", target, ours, theirs, options.rounds)
                seconds = parts(producer, fmt, rotation, arrays)
                print("   ", ", ".join(f"{part} {1e3 * s['median']:.2f} ms" for part, s in seconds.items()))
                cases.found[-1]["parts"] = seconds
    if options.save:
        print(save(f"producers_{options.isa}", {"cases": cases.found}))


if __name__ == "__main__":
    main()
