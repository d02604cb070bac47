"""What telemetry costs: a training step that is not measured, one that is, and one between, of the same program.

    python benchmarks/telemetry.py [--save] [--recipes nvfp4 mxfp8] [--widths 512 1024] [--rounds 101] [--blocks 2]

The sides are the gradient of a model of `blocks` pairs of products without telemetry; with it, on a step that is not
recorded; and on a step that is. All run in turn; the ratios are those of medians.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import timing

import jaxlowprec as jlp
from jaxlowprec.wiring import native

RECIPES = {
    "nvfp4": jlp.NVFP4BlockScaling(),
    "mxfp8": jlp.MXFP8BlockScaling(),
    "fp8_block": jlp.Float8BlockScaling(),
    "int4_qat": jlp.Int4QAT(32),
}

TARGETS = {"not recorded": 1.01, "recorded": 1.3}
"""At most so many steps without telemetry."""


def loss(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    """Of x [tokens, width], through one up and one down projection per block."""
    for i, weights in enumerate(params):
        hidden = jax.nn.gelu(jlp.linear(x, weights["up"], name=f"{i}/up"))
        x += jlp.linear(hidden, weights["down"], name=f"{i}/down")
    return jnp.square(x.astype(jnp.float32)).mean()


def measured(recipe: str, width: int, blocks: int, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of each side."""
    keys = jax.random.split(jax.random.key(0), 2 * blocks).reshape(blocks, 2)
    params = [
        {
            "up": jax.random.normal(up, (width, 4 * width)) / width**0.5,
            "down": jax.random.normal(down, (4 * width, width)) / width**0.5 / 8,
        }
        for up, down in keys
    ]
    x = jax.random.normal(jax.random.key(1), (tokens, width), jnp.bfloat16)

    def with_telemetry(params: Any, x: jax.Array, step: jax.Array) -> Any:
        return jlp.telemetry.value_and_grad(loss, on=step % 100 == 0)(params, x)

    with jlp.autocast(RECIPES[recipe]):
        without = jax.jit(jax.value_and_grad(loss)).lower(params, x).compile()
        having = jax.jit(with_telemetry).lower(params, x, jnp.int32(0)).compile()
    sides = {
        "without": lambda: without(params, x),
        "not recorded": lambda: having(params, x, jnp.int32(1)),
        "recorded": lambda: having(params, x, jnp.int32(100)),
    }
    return timing.alternate(sides, rounds)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"rounds": 101, "tokens": 2048, "blocks": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--recipes", choices=RECIPES, nargs="+", default=["nvfp4", "mxfp8"])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    cases = []
    for recipe in options.recipes:
        for width in options.widths:
            seconds = measured(recipe, width, options.blocks, options.tokens, options.rounds)
            ratio = {side: {k: seconds[side][k] / seconds["without"][k] for k in ("median", "min")} for side in TARGETS}
            case = {"recipe": recipe, "tokens": options.tokens, "width": width, "blocks": options.blocks}
            cases.append(case | {"seconds": seconds, "ratio": ratio, "targets": TARGETS})
            shown = ", ".join(f"{side} {ratio[side]['median']:.3f} (at most {TARGETS[side]})" for side in TARGETS)
            print(f"{recipe:10} {width:5} {1e3 * seconds['without']['median']:8.1f} ms: {shown}", flush=True)
    if options.save:
        print(timing.save(f"telemetry_{native.isa()}", {"cases": cases}))


if __name__ == "__main__":
    timing.keep_memory()
    main()
