"""Time to trace and to lower the gradient of an unrolled model: layers that are equal share one trace.

    python benchmarks/tracing.py [--blocks 24] [--recipe nvfp4] [--rounds 5]

A block is four linears with a residual: QKV, attention's output, up and down; each layer has a name of its own. The
other side is the same model whose kernels all have different shapes, so that no trace can be shared.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

import jaxlowprec as jlp

RECIPES = {
    "bf16": None,
    "nvfp4": jlp.NVFP4BlockScaling(),
    "mxfp8": jlp.MXFP8BlockScaling(),
    "int4_qat": jlp.Int4QAT(32),
}
WIDTH, TOKENS = 256, 64


def block(x: jax.Array, kernels: dict[str, jax.Array], name: str) -> jax.Array:
    """x [T, WIDTH] through both halves of a block."""
    qkv = jlp.linear(x, kernels["qkv"], name=f"{name}/qkv")
    x += jlp.linear(qkv[:, :WIDTH], kernels["out"], name=f"{name}/out")
    return x + jlp.linear(
        jax.nn.gelu(jlp.linear(x, kernels["up"], name=f"{name}/up")), kernels["down"], name=f"{name}/down"
    )


def kernels_of(blocks: int, equal: bool) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """Shapes of all blocks' kernels [K, N], float32."""

    def shapes(extra):
        hidden, inner = 3 * WIDTH + 32 * extra, 4 * WIDTH + 32 * extra
        wanted = {"qkv": (WIDTH, hidden), "out": (WIDTH, WIDTH), "up": (WIDTH, inner), "down": (inner, WIDTH)}
        return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in wanted.items()}

    return [shapes(0 if equal else i) for i in range(blocks)]


def seconds(kernels: list, recipe: jlp.Recipe | None) -> tuple[float, float]:
    """To trace the gradient, and to lower it."""

    def loss(kernels, x):
        with jlp.autocast(recipe, enabled=recipe is not None):
            for i, of_block in enumerate(kernels):
                x = block(x, of_block, f"block {i}")
        return x.astype(jnp.float32).sum()

    jax.clear_caches()
    begun = time.perf_counter()
    traced = jax.jit(jax.grad(loss)).trace(kernels, jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16))
    ended = time.perf_counter()
    traced.lower()
    return ended - begun, time.perf_counter() - ended


def main() -> None:
    """Measures both sides in turn and prints medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--recipe", choices=RECIPES, default="nvfp4")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sides = {"equal": kernels_of(options.blocks, True), "different": kernels_of(options.blocks, False)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(options.rounds):
        for name, kernels in sides.items():
            found[name].append(seconds(kernels, RECIPES[options.recipe]))
    for name, pairs in found.items():
        trace, lower = (statistics.median(values) for values in zip(*pairs, strict=True))
        print(
            f"{options.blocks} blocks under {options.recipe}, kernels {name:9}: "
            f"trace {trace:6.2f} s, lower {lower:6.2f} s"
        )


if __name__ == "__main__":
    main()
