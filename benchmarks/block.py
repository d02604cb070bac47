"""A Llama block: what its backward pass keeps, the memory of its training step, and its time, by recipe.

    python benchmarks/block.py [--save] [--width 1024] [--batch 8] [--time 256] [--rounds 15] [--recipes nvfp4 mxfp8]

The block is that of `llama_block`, with attention rematerialised on every side. Sides are Flax's layers in bfloat16,
this library's layers in their place, and its layers of blocks with each `saved=`. What is kept is counted in the traced
program, for arrays that have an axis of tokens; the unit is an array [tokens, width] in bfloat16. Memory is what XLA
says of the compiled step, without parameters and their gradients. For times all sides run in turn.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import jax
import jax.numpy as jnp
import timing
from flax import nnx
from llama_block import HEAD, Attention, Side, Size, attention_by, compiled, pulled_back, step, under

import jaxlowprec as jlp
from jaxlowprec.wiring import native

RECIPES = {
    "nvfp4": jlp.NVFP4BlockScaling(),
    "mxfp8": jlp.MXFP8BlockScaling(),
    "fp8_block": jlp.Float8BlockScaling(),
}
SAVED = ("quantized", "8bit", "recompute")
TARGETS = {"quantized": 13.0, "8bit": 10.5, "recompute": 6.5}
"""At most so many units are kept under NVFP4."""
KINDS = ("high precision", "8 bits", "4 bits")


def rematerialised() -> Attention:
    """Attention of which the backward pass keeps q, k and v."""
    return jax.checkpoint(attention_by("xla"))


def sides(recipes: list[str]) -> dict[str, Side]:
    """By name."""
    found = {"Flax": Side()}
    for name in recipes:
        found[f"{name}, separate layers"] = Side(RECIPES[name])
        found |= {f"{name}, {saved}": Side(RECIPES[name], saved) for saved in SAVED}
    return found


def temporary(size: Size, side: Side) -> tuple[int, int]:
    """Bytes of temporary memory of a block's step, and what each further block adds."""
    one, three = (
        compiled(size, side, rematerialised(), blocks).memory_analysis().temp_size_in_bytes for blocks in (1, 3)
    )
    return one, (three - one) // 2


def kept(size: Size, side: Side) -> dict[str, float]:
    """What the backward pass keeps in units, by the size of its elements."""
    size = Size(size.width, 2, size.width + 256)  # no axis of tokens has the size of another axis
    lines = {size.time, size.batch * size.time}
    of_tokens = {axis // block for axis in lines for block in (1, 2, 16, 32, 128)}
    with under(side.recipe):
        graph, parameters = nnx.split(nnx.eval_shape(lambda: side.model(size, rematerialised())), nnx.Param)
        x = jax.ShapeDtypeStruct((size.batch, size.time, size.width), jnp.bfloat16)
        pullback = jax.eval_shape(lambda p, x: pulled_back(graph, p, x)[1], parameters, x)
    found = dict.fromkeys(KINDS, 0.0)
    unit = size.batch * size.time * size.width * 2
    for leaf in jax.tree.leaves(pullback):
        if of_tokens & set(leaf.shape):
            found[_kind(leaf.dtype)] += math.prod(leaf.shape) * leaf.dtype.itemsize / unit
    return found


def _kind(dtype: Any) -> str:
    """Of an array of the backward pass; scales count with their codes, which are 4 bits if they are E4M3."""
    if dtype.itemsize > 1:
        return "high precision"
    return "4 bits" if dtype in (jnp.uint8, jnp.dtype("float4_e2m1fn")) else "8 bits"


def main() -> None:
    """Counts, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"rounds": 15, "time": 256, "batch": 8, "width": 1024}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recipes", choices=RECIPES, nargs="*", default=["nvfp4", "mxfp8"])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    size = Size(max(HEAD, options.width), options.batch, options.time)
    each = sides(options.recipes)
    steps = {name: step(size, side, rematerialised()) for name, side in each.items()}
    seconds = timing.alternate(steps, options.rounds)
    cases: list[dict[str, Any]] = []
    for name, side in each.items():
        one, further = temporary(size, side)
        case = {
            "side": name,
            "saved": side.saved,
            "kept": kept(size, side),
            "target": TARGETS.get(side.saved or "") if name.startswith("nvfp4") else None,
            "bytes": {"a block": one, "each further block": further},
            "seconds": seconds[name],
            "speed": {k: seconds["Flax"][k] / seconds[name][k] for k in ("median", "min")},
        }
        cases.append(case)
        limit = "" if case["target"] is None else f" (at most {case['target']})"
        memory = (
            f"{part} {b / 2**20:4.0f} MiB ({b / cases[0]['bytes'][part]:.2f})" for part, b in case["bytes"].items()
        )
        print(
            f"{name:24} {sum(case['kept'].values()):5.1f} units kept{limit:15} {', '.join(memory)}, "
            f"{1e3 * seconds[name]['median']:7.1f} ms, {case['speed']['median']:.2f}x",
            flush=True,
        )
    if options.save:
        content = {"width": size.width, "hidden": size.hidden, "batch": size.batch, "time": size.time, "cases": cases}
        print(timing.save(f"block_{native.isa()}", content))


if __name__ == "__main__":
    timing.keep_memory()
    main()
