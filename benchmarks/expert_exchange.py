"""A training step of a layer of 64 experts on eight virtual devices: rows by all-to-all against tokens on all devices.

    python benchmarks/expert_exchange.py

All have the same tokens and experts. With `kind="sum"` each device has all tokens, computes the rows of its own
experts in buffers for all rows, and results are added up. With "all_to_all" it has an eighth of the tokens and sends
rows; "deduplicated" sends a token once to each device that has experts of it. Choices are those of an untrained router:
uneven, but no expert takes all.

Bytes are those of dispatch and combine, forward and backward: the bytes of a row in each collective of the compiled
program, times the rows that the router sends to other devices.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from timing import Cases, keep_memory, save

import jaxlowprec as jlp
from jaxlowprec import traffic

DEVICES, EXPERTS, TOP_K, WIDTH, HIDDEN = 8, 64, 8, 512, 256
TOKENS = 4096  # of all devices
RECIPES = {"bfloat16": None, "MXFP8": jlp.MXFP8BlockScaling(), "NVFP4": jlp.NVFP4BlockScaling()}
ROUTERS = {
    "top-8 of all": jlp.moe.RouterConfig(),
    "top-8 of 4 of 8 groups": jlp.moe.RouterConfig(scoring="sigmoid", groups=8, groups_per_token=4),
}
EXCHANGES = ("all_to_all", "deduplicated")
WIRES = ("rows", "codes", "codes_both_ways")
TARGET, TARGET_OF_BYTES = 2.0, 0.35
ITEM_SIZES = {"f32": 4, "s32": 4, "u8": 1}
WIDE = 4096  # of the tokens whose bytes are counted


def compiled(
    mesh: Mesh, recipe: Any, x: jax.Array, routing: Any = ROUTERS["top-8 of all"], **exchange: Any
) -> tuple[Any, Any]:
    """The compiled step, which returns the experts that tokens choose beside the gradients, and its arguments."""
    options: Any = {"routing": routing, "exchange": jlp.moe.Exchange("experts", **exchange)}
    options |= {"top_k": TOP_K, "dtype": jnp.bfloat16}
    graph, parameters = nnx.split(jlp.nnx.MoE(EXPERTS, x.shape[1], HIDDEN, **options, rngs=nnx.Rngs(0)))
    places = jax.tree.map(lambda p: P("experts") if p.ndim == 3 else P(), parameters)
    tokens = P() if exchange["kind"] == "sum" else P("experts")

    def loss(parameters: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, aux = nnx.merge(graph, parameters)(x)
        return jnp.sum(y.astype(jnp.float32) ** 2), aux.tape

    def step(parameters: Any, x: jax.Array) -> Any:
        return jax.grad(loss, argnums=(0, 1), has_aux=True)(parameters, x)

    specs: Any = {"in_specs": (places, tokens), "out_specs": ((places, tokens), tokens)}
    with jlp.autocast(recipe, enabled=recipe is not None):
        function = jax.jit(jax.shard_map(step, mesh=mesh, **specs)).lower(parameters, x).compile()
    given = jax.device_put((parameters, x), function.input_shardings[0])
    return function, given


def bytes_of(mesh: Mesh, exchange: str, wire: str, router: str, x: jax.Array) -> float:
    """What all devices send others of rows and what goes with them, in bytes, in a step under MXFP8."""
    options: Any = {"kind": exchange, "wire": wire, "buffer_factor": 1e9}  # so that there is one size of buffers
    function, given = compiled(mesh, RECIPES["MXFP8"], x, ROUTERS[router], **options)
    homes = np.asarray(function(*given)[1]).reshape(DEVICES, -1, TOP_K) // (EXPERTS // DEVICES)
    there = np.arange(DEVICES)[:, None, None] != homes
    if exchange == "deduplicated":
        there &= np.array([[[home not in row[:i] for i, home in enumerate(row)] for row in of] for of in homes])
    # Buffers have room for each row that a device could send another.
    room = DEVICES * (TOKENS // DEVICES) * (1 if exchange == "deduplicated" else min(TOP_K, EXPERTS // DEVICES))
    of_row = 0
    for collective in traffic.collectives(function):
        width, rest = divmod(collective.elements, room)
        for dtype, _ in collective.results[:1] if width and not rest else ():
            # XLA widens bfloat16 on CPUs.
            of_row += width * (2 if width == x.shape[1] and dtype == "f32" else ITEM_SIZES[dtype])
    return float(of_row * there.sum())


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
        steps = {}
        for exchange in ("sum", *EXCHANGES):
            function, given = compiled(mesh, recipe, x, kind=exchange)
            steps[exchange] = functools.partial(function, *given)
        theirs = steps.pop("sum")
        for exchange, ours in steps.items():
            cases.add(f"{name}, {exchange}", "tokens on all devices", TARGET, ours, theirs, 9)
    wide = jax.random.normal(jax.random.key(0), (TOKENS, WIDE), jnp.bfloat16)
    found = []
    for router in ROUTERS:
        of_rows = None  # the bytes of the first pair, bfloat16 rows by all-to-all
        for exchange, wire in itertools.product(EXCHANGES, WIRES):
            nbytes = bytes_of(mesh, exchange, wire, router, wide)
            of_rows = of_rows or nbytes
            entry = {"router": router, "exchange": exchange, "wire": wire}
            found.append(entry | {"bytes": nbytes, "of_rows": nbytes / of_rows})
            print(f"{router:24} {exchange:14} {wire:16} {nbytes / of_rows:.3f} of the bytes of bfloat16 rows")
    if options.save:
        sizes = {"tokens": TOKENS, "top_k": TOP_K, "experts": EXPERTS, "width": WIDTH, "hidden": HIDDEN}
        bytes_sent = {"width": WIDE, "target": TARGET_OF_BYTES, "found": found}
        print(save("expert_exchange", sizes | {"devices": DEVICES, "cases": cases.found, "bytes": bytes_sent}))


if __name__ == "__main__":
    main()
