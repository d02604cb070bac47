"""What a transformer's feed-forward layer sends between eight H100s in a training step, from the program XLA compiles.

    PYTHONPATH=. python benchmarks/traffic.py --save

It takes no GPU: JAX's plugin for CUDA compiles for a description of one (pip install --no-deps jax-cuda13-plugin
jax-cuda13-pjrt, of jaxlib's version), and the library has to be built with CUDA. Nothing runs: the bytes are exact, and
there is no time in the results.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from timing import save

import jaxlowprec as jlp
from jaxlowprec import traffic
from tests.cuda_without_gpu.described_gpu import described

BATCH, TIME, WIDTH, HIDDEN = 8, 4096, 4096, 14336  # of Llama 3 8B
RECIPES: dict[str, Callable[..., jlp.Recipe] | None] = {
    "bfloat16": None,
    "FP8 current": jlp.Float8CurrentScaling,
    "FP8 block": jlp.Float8BlockScaling,
    "MXFP8": jlp.MXFP8BlockScaling,
    "NVFP4": jlp.NVFP4BlockScaling,
}
SUMS = ("float32", "bfloat16", "quantized")  # of the recipes that quantise


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where things lie on the mesh axes a, b and c.

    Attributes:
        sizes: of the mesh.
        x, hidden: activations [batch, time, features] outside of and within the layer.
        up, down: the kernels.
    """

    sizes: tuple[int, ...]
    x: P
    hidden: P
    up: P
    down: P


PLACEMENTS = {
    "data": Placement((8,), P("a"), P("a"), P(), P()),
    "FSDP": Placement((8,), P("a"), P("a"), P("a"), P("a")),
    "tensor": Placement((8,), P(), P(None, None, "a"), P(None, "a"), P("a")),
    "tensor, sequence": Placement((8,), P(None, "a"), P(None, None, "a"), P(None, "a"), P("a")),
    "data 2, FSDP 2, tensor 2": Placement((2, 2, 2), P(("a", "b")), P(("a", "b"), None, "c"), P("b", "c"), P("c", "b")),
}


def layer(recipe, mesh: Mesh, place: Placement):
    """The gradients of y = gelu(x @ up) @ down, for a given gradient of y, and what to compile them with."""

    def at(value, spec):
        return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec))

    def forward(x, up, down):
        hidden = jax.nn.gelu(at(jlp.linear(x, up, recipe=recipe), place.hidden))
        return at(jlp.linear(hidden, down, recipe=recipe), place.x)

    def step(x, up, down, dy):
        y, pullback = jax.vjp(forward, x, up, down)
        return y, *(at(g, spec) for g, spec in zip(pullback(dy), (place.x, place.up, place.down), strict=True))

    def shape(dims, dtype, spec):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))

    tokens = shape((BATCH, TIME, WIDTH), jnp.bfloat16, place.x)
    up = shape((WIDTH, HIDDEN), jnp.float32, place.up)
    down = shape((HIDDEN, WIDTH), jnp.float32, place.down)
    return step, (tokens, up, down, tokens)


def sent(recipe, place: Placement, devices) -> dict[str, float]:
    """Bytes that each device sends: gathered operands, and sums."""
    count = len(place.sizes)
    mesh = Mesh(np.array(devices).reshape(place.sizes), tuple("abc"[:count]), axis_types=(AxisType.Auto,) * count)
    step, operands = layer(recipe, mesh, place)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(step).trace(*operands).lower(lowering_platforms=("cuda",)).compile()
    found = {"operands": 0.0, "sums": 0.0}
    for c in traffic.collectives(compiled):
        found["sums" if c.kind in ("all-reduce", "reduce-scatter") else "operands"] += c.wire_bytes
    return found


def sent_under(make: Callable[..., jlp.Recipe] | None, place: Placement, devices) -> Iterator[tuple[str, dict]]:
    """What is sent, for each kind of sum. Operands are those of float32 sums: quantised sums travel by the same kinds
    of collectives."""
    if make is None:
        yield "bfloat16", sent(None, place, devices)
        return
    operands = None
    for kind in SUMS:
        found = sent(make(sums=kind), place, devices)
        operands = found["operands"] if operands is None else operands
        yield kind, {"operands": operands, "sums": found["sums"] + found["operands"] - operands}


def main() -> None:
    """Compiles and prints; writes benchmarks/results with --save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    results = []
    with described("H100", 8) as devices:
        for (placement, place), (recipe, make) in itertools.product(PLACEMENTS.items(), RECIPES.items()):
            for kind, found in sent_under(make, place, devices):
                results.append({"placement": placement, "recipe": recipe, "kind_of_sums": kind, **found})
                mebibytes = ", ".join(f"{what} {n / 2**20:.1f} MiB" for what, n in found.items())
                print(f"{placement:26} {recipe:12} {kind:10} {mebibytes}", flush=True)
    if options.save:
        shape = {"batch": BATCH, "time": TIME, "width": WIDTH, "hidden": HIDDEN}
        print(save("traffic", {"compiled_for": "H100", "devices": 8, "layer": shape, "results": results}))


if __name__ == "__main__":
    main()
