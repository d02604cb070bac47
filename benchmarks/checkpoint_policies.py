"""What `jax.checkpoint` keeps and computes again in a stack of Llama blocks, by policy, counted in compiled programs.

    PYTHONPATH=. python benchmarks/checkpoint_policies.py --save

Nothing runs, so there is no time in the results, and the counts do not depend on the machine.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from timing import save

import jaxlowprec as jlp

WIDTH, HIDDEN, HEAD, TIME = 4096, 14336, 128, 4096  # of Llama 3 8B, whose keys and values are fewer
LAYERS = 2
RECIPES = {
    "NVFP4": jlp.NVFP4BlockScaling(),
    "MXFP8": jlp.MXFP8BlockScaling(),
    "FP8 block": jlp.Float8BlockScaling(),
}
COUNTED = "NVFP4"  # the recipe whose programs are compiled; the others quantise and multiply as often
POLICIES: dict[str, Callable[..., Any] | None] = {
    "no jax.checkpoint": None,
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "save_quantized": jlp.checkpoint_policies.save_quantized,
    "save_products": jlp.checkpoint_policies.save_products,
    "save_quantized_and_products": jlp.checkpoint_policies.save_quantized_and_products,
}

attention = jax.checkpoint(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True))


def norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """RMSNorm over the last axis."""
    variance = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return (x * jax.lax.rsqrt(variance + 1e-6)).astype(x.dtype) * gain.astype(x.dtype)


def block(parameters: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A Llama block: [batch, time, width] to the same. Attention is always computed again."""
    batch, time, width = x.shape
    projected = jlp.linear(norm(x, parameters["norm1"]), parameters["qkv"])
    q, k, v = jnp.split(projected.reshape(batch, time, 3 * width // HEAD, HEAD), 3, axis=2)
    x = x + jlp.linear(attention(q, k, v).reshape(x.shape), parameters["out"])
    normed = norm(x, parameters["norm2"])
    gate, up = (jlp.linear(normed, parameters[name]) for name in ("gate", "up"))
    return x + jlp.linear(jax.nn.silu(gate) * up, parameters["down"])


def shapes(batch: int, layers: tuple[int, ...] = ()) -> tuple[dict[str, Any], Any]:
    """A block's parameters, float32, with `layers` in front, and its input, bfloat16."""
    sizes = {"norm1": (WIDTH,), "norm2": (WIDTH,), "qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)}
    sizes |= {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    parameters = {name: jax.ShapeDtypeStruct((*layers, *size), jnp.float32) for name, size in sizes.items()}
    return parameters, jax.ShapeDtypeStruct((batch, TIME, WIDTH), jnp.bfloat16)


def checkpointed(policy: Callable[..., Any] | None) -> Callable[..., jax.Array]:
    """The block under a policy; None: as it is."""
    return block if policy is None else jax.checkpoint(block, policy=policy)


def kernel_calls(policy: Callable[..., Any] | None, recipe: jlp.Recipe) -> collections.Counter[str]:
    """The library's kernels that a training step of a scan over layers calls: one layer forward, one backward."""
    layer = checkpointed(policy)

    def step(parameters, x, dy):
        y, pullback = jax.vjp(lambda p, x: jax.lax.scan(lambda x, p: (layer(p, x), None), x, p)[0], parameters, x)
        return y, *pullback(dy)

    parameters, x = shapes(1, (LAYERS,))
    with jlp.autocast(recipe):
        text = jax.jit(step).lower(parameters, x, x).compile().as_text()
    return collections.Counter(re.findall(r'custom_call_target="jaxlowprec_(\w+)"', text))


def kept_bytes(policy: Callable[..., Any] | None, recipe: jlp.Recipe, batch: int) -> int:
    """Bytes that a block keeps for its backward pass, without its parameters."""
    parameters, x = shapes(batch)
    masters = collections.Counter((p.shape, p.dtype) for p in parameters.values())
    with jlp.autocast(recipe):
        leaves = jax.tree.leaves(jax.eval_shape(lambda p, x: jax.vjp(checkpointed(policy), p, x)[1], parameters, x))
    others = (leaf for leaf in leaves if (leaf.shape, leaf.dtype) not in masters)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in others)


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a block keeps.

    Attributes:
        tokens: bytes per token, relative to an activation of the block's width in bfloat16.
        weights: bytes per parameter.
    """

    tokens: float
    weights: float


def kept(policy: Callable[..., Any] | None, recipe: jlp.Recipe) -> Kept:
    """What grows with the tokens, and what does not."""
    one, two = (kept_bytes(policy, recipe, batch) for batch in (1, 2))
    count = sum(math.prod(p.shape) for p in shapes(1)[0].values())
    return Kept(round((two - one) / (2 * TIME * WIDTH), 2), round((2 * one - two) / count, 2))


def again(calls: collections.Counter[str], without: collections.Counter[str]) -> dict[str, int]:
    """Quantisations and GEMMs per layer that the backward pass repeats."""
    return {
        "quantizations": calls["quantize"] - without["quantize"],
        "gemms": calls["scaled_matmul"] - without["scaled_matmul"],
    }


def main() -> None:
    """Counts and prints; writes benchmarks/results with --save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    without = kernel_calls(None, RECIPES[COUNTED])
    results = []
    for name, policy in POLICIES.items():
        repeated = again(kernel_calls(policy, RECIPES[COUNTED]), without)
        found = {recipe: dataclasses.asdict(kept(policy, value)) for recipe, value in RECIPES.items()}
        results.append({"policy": name, "again": repeated, "kept": found})
        print(f"{name:34} again: {repeated}  kept: {found}", flush=True)
    if options.save:
        sizes = {"width": WIDTH, "hidden": HIDDEN, "time": TIME, "linears": 5}
        print(save("checkpoint_policies", {"block": sizes, "counted": COUNTED, "results": results}))


if __name__ == "__main__":
    main()
