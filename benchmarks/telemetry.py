"""What telemetry costs: a training step that is not measured, one that is, and one between, of the same program.

    python benchmarks/telemetry.py [--recipe nvfp4] [--rounds 15] [--tokens 2048] [--width 512] [--blocks 2]

The sides are the gradient of a model of `blocks` pairs of products without telemetry; with it, on a step that is not
recorded; and on a step that is. All run in turn; the ratios are those of medians.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import timing

import jaxlowprec as jlp

RECIPES = {
    "nvfp4": jlp.NVFP4BlockScaling(),
    "mxfp8": jlp.MXFP8BlockScaling(),
    "fp8_block": jlp.Float8BlockScaling(),
    "int4_qat": jlp.Int4QAT(32),
}


def loss(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    """Of x [tokens, width], through an up and a down projection a block."""
    for i, weights in enumerate(params):
        hidden = jax.nn.gelu(jlp.linear(x, weights["up"], name=f"{i}/up"))
        x += jlp.linear(hidden, weights["down"], name=f"{i}/down")
    return jnp.square(x.astype(jnp.float32)).mean()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"rounds": 15, "tokens": 2048, "width": 512, "blocks": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recipe", choices=RECIPES, default="nvfp4")
    options = parser.parse_args()
    width = options.width
    keys = jax.random.split(jax.random.key(0), 2 * options.blocks).reshape(options.blocks, 2)
    params = [
        {
            "up": jax.random.normal(up, (width, 4 * width)) / width**0.5,
            "down": jax.random.normal(down, (4 * width, width)) / width**0.5 / 8,
        }
        for up, down in keys
    ]
    x = jax.random.normal(jax.random.key(1), (options.tokens, width), jnp.bfloat16)

    def with_telemetry(params: Any, x: jax.Array, step: jax.Array) -> Any:
        return jlp.telemetry.value_and_grad(loss, on=step % 100 == 0)(params, x)

    with jlp.autocast(RECIPES[options.recipe]):
        compiled = {}
        for name, function, args in (
            ("without", jax.value_and_grad(loss), (params, x)),
            ("with", with_telemetry, (params, x, jnp.int32(0))),
        ):
            begun = time.process_time()
            compiled[name] = jax.jit(function).lower(*args).compile()
            print(f"{name:8} telemetry: {time.process_time() - begun:5.1f} s CPU to trace and compile")
    sides = {
        "without": lambda: compiled["without"](params, x),
        "not recorded": lambda: compiled["with"](params, x, jnp.int32(1)),
        "recorded": lambda: compiled["with"](params, x, jnp.int32(100)),
    }
    found = timing.alternate(sides, options.rounds)
    for name, seconds in found.items():
        ratio = seconds["median"] / found["without"]["median"]
        print(f"{name:12} {1e3 * seconds['median']:8.1f} ms, {ratio:.3f} of the step without telemetry")


if __name__ == "__main__":
    timing.keep_memory()
    main()
