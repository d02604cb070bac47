"""AdamW and Lion in one pass against those of optax, jitted, in float32: time for each parameter, and temporary memory.

    python benchmarks/optimizer.py [--save] [--rounds 9] [--rows 4096] [--cores 1] [--isa avx2]

In turn, both sides make one step of one matrix, in place: parameter and state are donated. Time is that of the
processor, of all threads: it counts work, also where others share the cores. With --cores 2 it is the time that passes.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from timing import alternate, keep_memory, save

from jaxlowprec.ops.optimizer_states import REMAINDERS, Coded
from jaxlowprec.ops.optimizer_update import Rule, optimizer_update
from jaxlowprec.wiring import native

COLUMNS = 4096
SCALARS: dict[Rule, np.ndarray] = {
    "adamw": np.array([0.9, 0.1, 0.999, 0.001, 0.1, 0.001, 1e-8, 0.1, -1e-3], np.float32),
    "lion": np.array([0.9, 0.1, 0.99, 0.01, 0.1, -1e-3], np.float32),
}
WORDS = np.arange(4, dtype=np.uint32).reshape(2, 2)
TARGET = 1.0  # of optax's time, with stochastic rounding
CASES: dict[str, tuple[Rule, Any, Any, int | None]] = {  # rule, states' rounding, the parameter's dtype and its bits
    "8 bits stochastic, weights of 32 bits": ("adamw", "stochastic", jnp.bfloat16, 32),
    "8 bits stochastic, weights of 24 bits": ("adamw", "stochastic", jnp.bfloat16, 24),
    "8 bits stochastic, weights of 16 bits": ("adamw", "stochastic", jnp.bfloat16, 16),
    "8 bits nearest, weights of 32 bits": ("adamw", "nearest", jnp.bfloat16, 32),
    "8 bits stochastic, float32 weights": ("adamw", "stochastic", jnp.float32, None),
    "float32 states, float32 weights": ("adamw", None, jnp.float32, None),
    "Lion, 8 bits stochastic, weights of 32 bits": ("lion", "stochastic", jnp.bfloat16, 32),
    "Lion, 8 bits nearest, weights of 32 bits": ("lion", "nearest", jnp.bfloat16, 32),
}


class Side:
    """Steps of one side, each from the last one's results. `compiled`: for its memory."""

    def __init__(self, step: Callable[..., Any], gradient: jax.Array, state: Any):
        self.compiled = jax.jit(step, donate_argnums=1).lower(gradient, state).compile()
        self.gradient, self.state = gradient, state

    def __call__(self) -> Any:
        self.state = self.compiled(self.gradient, self.state)
        return self.state

    def temporaries(self) -> float:
        """Bytes for each parameter."""
        return self.compiled.memory_analysis().temp_size_in_bytes / self.gradient.size


def ours(shape: tuple[int, int], rule: Rule, rounding: Any, dtype: Any, bits: int | None) -> Side:
    """The operation."""
    gradient = jax.random.normal(jax.random.key(0), shape, dtype) * 1e-2
    zero: Any = jnp.zeros(shape, jnp.float32)
    blocks = (shape[0], -(-shape[1] // 32))
    moments = [
        zero + 0 if rounding is None else Coded(jnp.zeros(shape, jnp.uint8), jnp.zeros(blocks, jnp.uint8))
        for _ in range(2 if rule == "adamw" else 1)
    ]
    codes = (rounding, rounding if rule == "adamw" else None)
    rest = jnp.zeros(shape, REMAINDERS[bits]) if bits in REMAINDERS else None
    words = WORDS if bits == 16 or rounding == "stochastic" else None

    def step(g: jax.Array, state: Any) -> Any:
        return tuple(optimizer_update(g, *state, SCALARS[rule], words, rule=rule, codes=codes, bits=bits))

    return Side(step, gradient, (gradient * 1, rest, *moments, *[None] * (2 - len(moments))))


def theirs(shape: tuple[int, int], rule: Rule) -> Side:
    """optax's, of float32."""
    tx = getattr(optax, rule)(1e-3)
    gradient = jax.random.normal(jax.random.key(0), shape) * 1e-2

    def step(g: jax.Array, state: Any) -> Any:
        params, inner = state
        updates, inner = tx.update(g, inner, params)
        return optax.apply_updates(params, updates), inner

    params = gradient * 1
    return Side(step, gradient, (params, tx.init(params)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--isa")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    keep_memory()
    if options.isa:
        native.use_isa(options.isa)
    clock = time.process_time if options.cores == 1 else time.perf_counter
    shape, found = (options.rows, COLUMNS), []
    others = {rule: theirs(shape, rule) for rule in SCALARS}
    for name, case in CASES.items():
        side, other = ours(shape, *case), others[case[0]]
        seconds = alternate({"ours": side, "theirs": other}, options.rounds, clock=clock)
        each = {who: {k: 1e9 * s / side.gradient.size for k, s in times.items()} for who, times in seconds.items()}
        ratio = {k: each["ours"][k] / each["theirs"][k] for k in ("median", "min")}
        memory = {"ours": side.temporaries(), "theirs": other.temporaries()}
        found.append({"case": name, "ns": each, "ratio": ratio, "target": TARGET, "temporary_bytes": memory})
        print(
            f"{name:44} {each['ours']['min']:6.2f} ns, optax {each['theirs']['min']:6.2f} ns: {ratio['min']:5.2f} of "
            f"its time (median {ratio['median']:.2f}); temporaries {memory['ours']:.3f} and {memory['theirs']:.3f} B",
            flush=True,
        )
    if options.save:
        name = "_".join(filter(None, ["optimizer", str(options.cores), options.isa]))
        save(name, {"isa": native.isa(), "shape": shape, "cases": found})


if __name__ == "__main__":
    main()
