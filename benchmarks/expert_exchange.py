"""A training step of a layer of 64 experts on eight virtual devices: rows by all-to-all against tokens on all devices.

    python benchmarks/expert_exchange.py

Both have the same tokens and experts. With `exchange="sum"` each device has all tokens, computes the rows of its own
experts in buffers for all rows, and results are added up. With "all_to_all" it has an eighth of the tokens and sends
rows. Choices are those of an untrained router: uneven, but no expert takes all.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from timing import Cases, keep_memory, save

import jaxlowprec as jlp

DEVICES, EXPERTS, TOP_K, WIDTH, HIDDEN = 8, 64, 8, 512, 256
TOKENS = 4096  # of all devices
RECIPES = {"bfloat16": None, "MXFP8": jlp.MXFP8BlockScaling(), "NVFP4": jlp.NVFP4BlockScaling()}
TARGET = 2.0


def compiled(mesh: Mesh, recipe: Any, exchange: Any, x: jax.Array) -> Any:
    """The step, and its arguments."""
    options: Any = {"expert_axis": "experts", "exchange": exchange, "top_k": TOP_K, "dtype": jnp.bfloat16}
    graph, parameters = nnx.split(jlp.nnx.MoE(EXPERTS, WIDTH, HIDDEN, **options, rngs=nnx.Rngs(0)))
    places = jax.tree.map(lambda p: P("experts") if p.ndim == 3 else P(), parameters)
    tokens = P("experts") if exchange == "all_to_all" else P()

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        y, _ = nnx.merge(graph, parameters)(x)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    def step(parameters: Any, x: jax.Array) -> Any:
        return jax.grad(loss, argnums=(0, 1))(parameters, x)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(places, tokens), out_specs=(places, tokens))
    with jlp.autocast(recipe, enabled=recipe is not None):
        function = jax.jit(mapped).lower(parameters, x).compile()
    given = jax.device_put((parameters, x), function.input_shardings[0])
    return lambda: function(*given)


def main() -> None:
    """Measures and prints; writes benchmarks/results with --save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    keep_memory()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh = Mesh(np.array(jax.devices()), ("experts",), axis_types=(AxisType.Auto,))
    x = jax.random.normal(jax.random.key(0), (TOKENS, WIDTH), jnp.bfloat16)
    cases = Cases()
    for name, recipe in RECIPES.items():
        ours, theirs = (compiled(mesh, recipe, exchange, x) for exchange in ("all_to_all", "sum"))
        cases.add(f"{name}, a training step of {EXPERTS} experts", "tokens on all devices", TARGET, ours, theirs, 9)
    if options.save:
        sizes = {"tokens": TOKENS, "top_k": TOP_K, "experts": EXPERTS, "width": WIDTH, "hidden": HIDDEN}
        print(save("expert_exchange", sizes | {"devices": DEVICES, "cases": cases.found}))


if __name__ == "__main__":
    main()
