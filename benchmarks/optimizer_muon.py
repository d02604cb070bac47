"""optax's Muon under this library's wrappers against itself in float32, and what of a step is not its products.

    python benchmarks/optimizer_muon.py [--save] [--rounds 5] [--size 2048]

In turn, each side makes one step of one square matrix, in place. The third side is the second without the products that
orthogonalise: momentum, codes, weights. An operation of its own, as `jlp.optim.adamw` has one, could save part of that.
Time is that of the processor on one core, which counts work, also where others share the core.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optimizer import Side
from timing import alternate, keep_memory, save

import jaxlowprec as jlp

RATE, MOMENTUM = 1e-3, 0.95


def wrapped(inner: Any, **options: Any) -> Any:
    """Momentum in 8 bits, weights in 24."""
    return jlp.optim.master_weights(jlp.optim.quantized_state(inner, **options), bits=24)


LIKE_MUONS = {"trace": jlp.optim.FixedCode("nearest")}
SIDES = {
    "float32": (optax.contrib.muon(RATE, beta=MOMENTUM), jnp.float32),
    "8 bits, weights of 24 bits": (wrapped(optax.contrib.muon(RATE, beta=MOMENTUM)), jnp.bfloat16),
    "the same without products": (wrapped(optax.sgd(RATE, MOMENTUM, nesterov=True), rules=LIKE_MUONS), jnp.bfloat16),
}


def side_of(tx: Any, dtype: Any, size: int) -> Side:
    """Steps of a transformation."""
    gradient = jax.random.normal(jax.random.key(0), (size, size), dtype)
    params = gradient * 1

    def step(g: jax.Array, state: Any) -> Any:
        params, inner = state
        return jlp.optim.apply_gradients(tx, g, inner, params)

    return Side(step, gradient, (params, tx.init(params)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=2048)
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    keep_memory()
    sides = {name: side_of(*side, options.size) for name, side in SIDES.items()}
    seconds = alternate(sides, options.rounds, clock=time.process_time)
    found = {}
    for name, times in seconds.items():
        found[name] = {k: 1e9 * s / options.size**2 for k, s in times.items()}
        print(f"{name:28} {found[name]['median']:7.2f} ns for each parameter, least {found[name]['min']:.2f}")
    if options.save:
        save("optimizer_muon", {"size": options.size, "ns": found})


if __name__ == "__main__":
    main()
