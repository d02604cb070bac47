"""What quantize_matmuls costs: tracing, the length of the lowered program, and a step, beside the same model by hand.

    python benchmarks/quantize_matmuls.py [--blocks 24] [--recipe nvfp4] [--rounds 25] [--width 256] [--tokens 512]

The sides are the plain function; the same with this library's `linear`, its layers named; and the plain function
transformed. A block is an up and a down projection with a residual, so there are two products per block.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import timing

import jaxlowprec as jlp

RECIPES = {"nvfp4": jlp.NVFP4BlockScaling(), "mxfp8": jlp.MXFP8BlockScaling(), "int4_qat": jlp.Int4QAT(32)}


def model(product: Callable[..., Any]) -> Callable[..., Any]:
    """The loss of parameters and x [T, width]; product(x, weight, name) multiplies."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for name, weights in params.items():
            hidden = jax.nn.gelu(product(x, weights["up"], f"{name}/up"))
            x += product(hidden, weights["down"], f"{name}/down")
        return jnp.square(x.astype(jnp.float32)).mean()

    return loss


def sides(recipe: jlp.Recipe) -> dict[str, Callable[..., Any]]:
    """The gradients of the three losses."""
    plain = model(lambda x, weight, name: x @ weight.astype(x.dtype))
    ours = model(lambda x, weight, name: jlp.linear(x, weight, recipe=recipe, name=name))
    losses = {"plain": plain, "by hand": ours, "quantize_matmuls": jlp.quantize_matmuls(plain, recipe)}
    return {name: jax.grad(loss) for name, loss in losses.items()}


def main() -> None:
    """Measures all sides in turn and prints medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"blocks": 24, "rounds": 25, "width": 256, "tokens": 512}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recipe", choices=RECIPES, default="nvfp4")
    options = parser.parse_args()
    keys = jax.random.split(jax.random.key(0), 2 * options.blocks).reshape(options.blocks, 2)
    width = options.width
    params = {
        f"block_{i}": {
            "up": jax.random.normal(up, (width, 4 * width)) / width**0.5,
            "down": jax.random.normal(down, (4 * width, width)) / width**0.5 / 8,
        }
        for i, (up, down) in enumerate(keys)
    }
    x = jax.random.normal(jax.random.key(1), (options.tokens, width), jnp.bfloat16)
    functions = sides(RECIPES[options.recipe])
    traced: dict[str, list[float]] = {name: [] for name in functions}
    lowered = {name: jax.jit(function).lower(params, x) for name, function in functions.items()}
    lines = {name: len(program.as_text().splitlines()) for name, program in lowered.items()}
    compiled = {name: program.compile() for name, program in lowered.items()}
    for _ in range(options.rounds):
        for name, function in functions.items():
            begun = time.process_time()
            jax.jit(lambda *args, function=function: function(*args)).trace(params, x)
            traced[name].append(time.process_time() - begun)
    steps = timing.alternate(
        {name: lambda p=program: p(params, x) for name, program in compiled.items()}, options.rounds
    )
    for name in functions:
        trace = statistics.median(traced[name])
        more = (trace - statistics.median(traced["plain"])) / (2 * options.blocks)
        print(
            f"{name:16}  trace {trace:5.2f} s CPU ({1e3 * more:4.1f} ms per product more than plain), "
            f"{lines[name]} lines, step {1e3 * steps[name]['median']:7.1f} ms"
        )
    programs = [lowered[name].as_text() for name in ("by hand", "quantize_matmuls")]
    print(f"programs by hand and by quantize_matmuls: {'the same text' if programs[0] == programs[1] else 'DIFFERENT'}")
    results = [jax.tree.leaves(compiled[name](params, x)) for name in ("by hand", "quantize_matmuls")]
    same = all((a == b).all() for a, b in zip(*results, strict=True))
    print(f"gradients by hand and by quantize_matmuls: {'the same bits' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
