"""What eight described H100s send for experts by all-to-all: ragged collectives, which CPUs lack. Skipped as
test_described_gpu.py is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec import traffic
from jaxlowprec.layers.shared_input import Layer
from jaxlowprec.moe.deduplicated import DeduplicatedAllToAll
from jaxlowprec.moe.exchange import AllToAll
from jaxlowprec.moe.router import Routing
from tests.cuda_without_gpu.described_gpu import compiled, described

EXPERTS, K, TOKENS, WIDTH = 64, 8, 512, 256


def products(kernels, recipe):
    return lambda rows, sizes: jlp.grouped_matmul(rows, kernels, sizes, recipe=recipe)


def collectives(local, mesh, devices):
    """Those of a step of what each device does."""
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("a"),) * 4, out_specs=P("a"))

    def step(x, kernels, weights, experts):
        y, pullback = jax.vjp(lambda *learned: mapped(*learned, experts), x, kernels, weights)
        return y, *pullback(y)

    split = NamedSharding(mesh, P("a"))
    shapes = (
        ((8 * TOKENS, WIDTH), jnp.bfloat16),
        ((EXPERTS, WIDTH, WIDTH), jnp.float32),
        ((8 * TOKENS, K), jnp.float32),
        ((8 * TOKENS, K), jnp.int32),
    )
    given = [jax.ShapeDtypeStruct(dims, dtype, sharding=split) for dims, dtype in shapes]
    return traffic.collectives(compiled(step, *given, devices=devices).text)


@pytest.mark.parametrize("factor", [2.0, 100.0], ids=["usual buffers or large ones", "large buffers"])
@pytest.mark.parametrize("recipe", [None, jlp.MXFP8BlockScaling()], ids=["bf16", "mxfp8"])
def test_only_the_rows_that_there_are_travel(recipe, factor):
    with described("H100", 8) as devices:
        mesh = Mesh(np.array(devices), ("a",), axis_types=(AxisType.Auto,))

        def local(x, kernels, weights, experts):
            groups = AllToAll(jlp.moe.dispatch(experts, EXPERTS), weights, "a", factor)
            return groups.run(products(kernels, recipe), x, layers=[])[0]

        found = collectives(local, mesh, devices)
    large = [c for c in found if c.nbytes > TOKENS]
    assert {c.kind for c in large} == {"ragged-all-to-all"}
    # To the experts and back, forward and backward; the exception sends rows to the experts once more, to recompute.
    assert len(large) == (4 if factor > 8 else 4 + 5)
    assert all(c.wire_bytes == TOKENS * K * WIDTH * 2 for c in large)


@pytest.mark.parametrize("exchange", ["all_to_all", "deduplicated"])
@pytest.mark.parametrize("wire", ["codes", "codes_both_ways"])
def test_codes_travel(wire, exchange):
    """As bytes: those that XLA would widen or add up are not there."""
    recipe = jlp.MXFP8BlockScaling()
    with described("H100", 8) as devices:
        mesh = Mesh(np.array(devices), ("a",), axis_types=(AxisType.Auto,))

        def local(x, kernels, weights, experts):
            layers = [Layer(kernels, None, None, recipe, None, name, None, None) for name in ("up_proj", "down_proj")]
            how = {"axis": "a", "factor": 100.0, "wire": wire}
            if exchange == "deduplicated":
                sizes = jnp.zeros(EXPERTS, jnp.int32).at[experts.reshape(-1)].add(1)
                losses = (jnp.zeros((), jnp.float32),) * 3
                groups = DeduplicatedAllToAll(Routing(experts, weights, sizes, *losses), **how)
            else:
                groups = AllToAll(jlp.moe.dispatch(experts, EXPERTS), weights, **how)
            return groups.run(products(kernels, recipe), x, layers)[0]

        found = collectives(local, mesh, devices)
    large = [c for c in found if c.nbytes > TOKENS * WIDTH]
    assert {c.kind for c in large} == {"ragged-all-to-all"}
    row = WIDTH + WIDTH // 32
    sizes = sorted(c.wire_bytes // (TOKENS * K) for c in large)
    assert sizes == ([row] * 4 if wire == "codes_both_ways" else [row, row, 2 * WIDTH, 2 * WIDTH])
