"""Generation of one sequence by `jaxlowprec.decoder`: tokens per second, and the share of the read bandwidth.

    python benchmarks/generation.py [--layers 8] [--llama-cpp] [--save]
    python benchmarks/generation.py --one-core --llama-cpp      # where other programs run

The model has TinyLlama's widths and random weights in 4 bits, the head included. A step of generation reads all of them
once. Measured in turn: steps under each format; the products of a step alone, in its order; and reading the codes and
scales from memory. `--llama-cpp` adds llama.cpp's Q4_0 at the same shapes, by the package xllamacpp.

`--one-core` pins everything to one core and counts its time in this process instead of the time that passes: threads of
llama.cpp wait for each other busily, so on a machine with other work two of them measure the scheduler.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

if "--one-core" in sys.argv:  # before JAX counts the cores
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])

import jax
import jax.numpy as jnp
import numpy as np
from baselines import Copies
from flax import nnx
from llama_cpp import LlamaCpp, write_gguf
from timing import environment, keep_memory, save

import jaxlowprec as jlp
from jaxlowprec.decoder import Decoder, DecoderConfig, Generator

SHAPE = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
FORMATS = {"INT4": jlp.Int4(128), "NVFP4": jlp.NVFP4()}
PLACES, PROMPT, TOKENS, TARGET = 256, 16, 16, 0.8
Side = Callable[[], float]


def quantized_decoder(config: DecoderConfig, fmt: Any) -> Decoder:
    """A decoder of random numbers in bfloat16, whose kernels are quantised; kernels of one shape have the same ones."""
    decoder = nnx.eval_shape(lambda: Decoder(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    made: dict[tuple[int, ...], Any] = {}

    def filled(path: Any, leaf: Any) -> Any:
        if path[-1].key != "kernel":
            return leaf.replace(jnp.full(leaf.shape, 1, leaf.dtype) if len(leaf.shape) == 1 else random(leaf.shape))
        if leaf.shape not in made:
            made[leaf.shape] = jax.block_until_ready(jlp.quantize(random(leaf.shape), fmt, axis=-2))
        return leaf.replace(jax.tree.map(jnp.copy, made[leaf.shape]))  # memory of its own

    def random(shape: tuple[int, ...]) -> jax.Array:
        return (jax.random.normal(jax.random.key(len(made)), shape) * shape[0] ** -0.5).astype(jnp.bfloat16)

    state = nnx.state(decoder)
    nnx.update(
        decoder, jax.tree_util.tree_map_with_path(filled, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    )
    return decoder


def kernels(decoder: Decoder) -> list[list[jlp.QuantizedArray]]:
    """The quantised kernels in the order of a step; those of one list have one input."""
    found = []
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        found += [[attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj]]
        found += [[mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]
    return [[linear.kernel.get_value() for linear in group] for group in [*found, [decoder.lm_head]]]


def products(decoder: Decoder) -> Any:
    """A call of the products of one step and nothing else, each with an input that depends on the one before."""

    @jax.jit
    def chain(groups: Any, inputs: dict[int, jax.Array]) -> jax.Array:
        carried = jnp.zeros((), jnp.bfloat16)
        for group in groups:
            x = inputs[group[0].shape[0]] + carried
            carried = sum(jlp.scaled_matmul(x, q.mT, preferred_element_type=jnp.bfloat16)[0, 0] for q in group) * 0
        return carried

    groups = kernels(decoder)
    inputs = {group[0].shape[0]: jnp.ones((1, group[0].shape[0]), jnp.bfloat16) for group in groups}
    return lambda: chain(groups, inputs)


def steps(generator: Generator, begin: int = PROMPT) -> Any:
    """A call of TOKENS steps from this place on, as `Generator` makes them. The cache is used again."""
    keys, span = jax.vmap(jax.random.key)(jnp.zeros(1, jnp.uint32)), generator.span(begin + TOKENS)
    held = {"cache": generator.prefill([[1] * PROMPT])[1]}

    def call() -> jax.Array:
        cache = dataclasses.replace(held["cache"], lengths=jnp.full(1, begin, jnp.int32))
        tokens = jnp.ones(1, jnp.int32)
        for _ in range(TOKENS):
            cache, tokens, _ = generator._step(
                generator.arrays, cache, tokens, keys, jnp.float32(1), greedy=True, span=span
            )
        held["cache"] = cache
        return tokens

    return call


def timed(call: Callable[[], Any], clock: Callable[[], float], times: int = 1) -> Side:
    """A side whose call does something that many times: the seconds of one."""

    def side() -> float:
        started = clock()
        jax.block_until_ready(call())
        return (clock() - started) / times

    return side


def llama_cpp(config: DecoderConfig, folder: pathlib.Path, one_core: bool) -> tuple[Side, str]:
    """llama.cpp's seconds for a token, and its system's description."""
    write_gguf(folder / "model.gguf", config)
    rival = LlamaCpp(folder / "model.gguf", environment()["cores"], PLACES)

    def in_cpu_time() -> float:
        spent = []
        for count in (1, 1 + TOKENS):
            started = time.process_time()
            rival.generate(PROMPT, count)
            spent.append(time.process_time() - started)
        return (spent[1] - spent[0]) / TOKENS

    return in_cpu_time if one_core else lambda: rival.generate(PROMPT, TOKENS) / TOKENS, rival.system


def alternated(sides: dict[str, Side], rounds: int) -> dict[str, dict[str, float]]:
    """Median and least seconds of each side, measured in turn after one call that does not count."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(1 + rounds):
        for name, side in sides.items():
            seconds = side()
            found[name] += [seconds] if number else []
    return {name: {"median": statistics.median(s), "min": min(s)} for name, s in found.items()}


def main() -> None:
    """Measures, prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--one-core", action="store_true", help="time of one core, not the time that passes")
    parser.add_argument("--llama-cpp", action="store_true")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    keep_memory()
    config = DecoderConfig.of(SHAPE | {"num_hidden_layers": options.layers})
    clock = time.process_time if options.one_core else time.perf_counter
    copies, sides, read, system = Copies(environment()["cores"]), {}, {}, ""
    for name, fmt in FORMATS.items():
        decoder = quantized_decoder(config, fmt)
        leaves = [leaf for group in kernels(decoder) for q in group for leaf in jax.tree.leaves(q)]
        codes = np.concatenate([np.asarray(leaf).view(np.uint8).ravel() for leaf in leaves if leaf.ndim])
        read[name] = codes.nbytes
        sides[f"{name} step"] = timed(steps(Generator(decoder, PLACES)), clock, TOKENS)
        sides[f"{name} products"] = timed(products(decoder), clock)
        sides[f"{name} reading"] = timed(copies.read_and_write(codes, np.empty(1, np.uint8), 1), clock)
    with tempfile.TemporaryDirectory() as folder:
        if options.llama_cpp:
            sides["llama.cpp"], system = llama_cpp(config, pathlib.Path(folder), options.one_core)
        seconds = alternated(sides, options.rounds)
    cases = []
    for name in FORMATS:
        step, alone, reading = (seconds[f"{name} {side}"]["median"] for side in ("step", "products", "reading"))
        case = {"format": name, "MiB": read[name] / 2**20, "tokens_per_second": 1 / step, "target": TARGET}
        case |= {
            "products_of_bandwidth": reading / alone,
            "step_of_bandwidth": reading / step,
            "products": alone / step,
        }
        if options.llama_cpp:
            case["of_llama_cpp"] = seconds["llama.cpp"]["median"] / step
        cases.append(case)
        print({key: value if isinstance(value, str) else round(value, 3) for key, value in case.items()})
    print({name: {k: round(1e3 * s, 3) for k, s in found.items()} for name, found in seconds.items()})
    if options.save:
        what = {"layers": options.layers, "clock": clock.__name__, "llama_cpp": system}
        print(save("generation", what | {"cases": cases, "seconds": seconds}))


if __name__ == "__main__":
    main()
