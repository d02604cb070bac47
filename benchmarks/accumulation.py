"""The gradient of microbatches: `accumulate_gradients` against one step at a time, and against a scan.

    python benchmarks/accumulation.py [--save] [--recipes nvfp4 mxfp8] [--microbatches 8] [--tokens 1024] [--width 1024]

The model is a Llama block of `llama_block`, by layers of blocks, of vectors that a table has for tokens; the optimizer
is SGD. "steps" calls a compiled `jax.value_and_grad` for each part and adds its gradients up in another program, in
place; "scan" does both in a `jax.lax.scan`. Memory is what XLA says of the compiled programs, without the parameters,
which are updated in place, but with the sums that wait while a step runs. All sides run in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import timing
from block import RECIPES, rematerialised
from flax import nnx
from llama_block import KEEP_BARRIERS, Side, Size, under

import jaxlowprec as jlp
from jaxlowprec.wiring import native

TIME, VOCABULARY = 256, 256
TARGETS = {"speed": 1.1, "gradient trees": 1.0}
"""Against "steps": at least so many times as fast, and so many trees of float32 gradients less."""


def scanned(loss: Callable[..., Any], parts: int) -> Callable[[Any, Any], Any]:
    """The mean of the parts' losses and gradients, each computed before it is added."""

    def run(params: Any, batch: Any) -> Any:
        def part(carry: Any, x: Any) -> Any:
            return jax.tree.map(jnp.add, carry, jax.value_and_grad(loss)(params, x)), None

        sums = jax.lax.scan(part, zeros(params), split(batch, parts))[0]
        return jax.tree.map(lambda total: total / parts, sums)

    return run


def update(params: Any, gradients: Any) -> Any:
    """A step of SGD."""
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients)


def training(way: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A step of training by a way to find the loss and the gradients."""

    def run(params: Any, batch: Any) -> Any:
        value, gradients = way(params, batch)
        return update(params, gradients), value

    return run


def split(batch: jax.Array, parts: int) -> jax.Array:
    """[B, ...] -> [parts, B / parts, ...]."""
    return batch.reshape(parts, batch.shape[0] // parts, *batch.shape[1:])


def zeros(params: Any) -> Any:
    """The sums of the loss and the gradients."""
    return jnp.float32(0), jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)


def held(program: jax.stages.Compiled) -> int:
    """Bytes of a program, without its arguments and what takes their place."""
    memory = program.memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes


def measured(recipe: str, parts: int, tokens: int, width: int, rounds: int) -> dict[str, Any]:
    """Seconds and bytes of all sides."""
    size = Size(width, parts * tokens // TIME, TIME)
    side = Side(RECIPES[recipe], "quantized")
    with under(side.recipe):
        graph, params = nnx.split(side.model(size, rematerialised()), nnx.Param)
        table = jax.random.normal(jax.random.key(0), (VOCABULARY, size.width), jnp.bfloat16)
        x = jax.random.randint(jax.random.key(1), (size.batch, size.time), 0, VOCABULARY)

        def loss(params: Any, tokens: jax.Array) -> jax.Array:
            return jnp.square(nnx.merge(graph, params)(table[tokens]).astype(jnp.float32)).mean()

        ways = {"ours": jlp.accumulate_gradients(loss, microbatches=parts), "scan": scanned(loss, parts)}
        programs = {
            name: jax.jit(training(way), donate_argnums=0).lower(params, x).compile(KEEP_BARRIERS)
            for name, way in ways.items()
        }
        step = jax.jit(jax.value_and_grad(loss)).lower(params, split(x, parts)[0]).compile(KEEP_BARRIERS)
    add = jax.jit(lambda sums, found: jax.tree.map(jnp.add, sums, found), donate_argnums=0)
    last = jax.jit(lambda params, sums: (update(params, jax.tree.map(lambda g: g / parts, sums[1])), sums[0] / parts))

    def steps(params: Any, x: jax.Array) -> Any:
        sums = zeros(params)
        for part in split(x, parts):
            sums = add(sums, step(params, part))
        return last(params, sums)

    def call(way: Callable[[Any, Any], Any]) -> Callable[[], Any]:
        """A call that goes on with the parameters of its previous one: a program takes its own."""
        latest = jax.tree.map(jnp.copy, params)

        def run() -> Any:
            nonlocal latest
            latest, value = way(latest, x)
            return value

        return run

    gradients = sum(4 * leaf.size for leaf in jax.tree.leaves(params))
    memory = {name: held(program) for name, program in programs.items()} | {"steps": held(step) + gradients}
    seconds = timing.alternate({name: call(way) for name, way in (programs | {"steps": steps}).items()}, rounds)
    speed = {name: seconds[name]["median"] / seconds["ours"]["median"] for name in ("steps", "scan")}
    less = {name: (memory[name] - memory["ours"]) / gradients for name in speed}
    return {"seconds": seconds, "speed": speed, "bytes": memory, "gradient trees less": less}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"rounds": 9, "microbatches": 8, "tokens": 1024, "width": 1024}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recipes", choices=RECIPES, nargs="+", default=["nvfp4", "mxfp8"])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    sizes = {"microbatches": options.microbatches, "tokens": options.tokens, "width": options.width}
    cases = []
    for recipe in options.recipes:
        case = measured(recipe, *sizes.values(), options.rounds)
        cases.append({"recipe": recipe, "targets": TARGETS} | case)
        for other in ("steps", "scan"):
            print(
                f"{recipe:10} against {other:5} {case['speed'][other]:.2f}x, {case['bytes']['ours'] / 2**20:.0f} and "
                f"{case['bytes'][other] / 2**20:.0f} MiB: {case['gradient trees less'][other]:.2f} gradient trees less",
                flush=True,
            )
    if options.save:
        print(timing.save(f"accumulation_{native.isa()}", sizes | {"cases": cases}))


if __name__ == "__main__":
    timing.keep_memory()
    main()
