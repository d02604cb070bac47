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
from jaxlowprec.moe.exchange import AllToAll
from tests.cuda_without_gpu.described_gpu import compiled, described

EXPERTS, K, TOKENS, WIDTH = 64, 8, 512, 256


@pytest.mark.parametrize("factor", [2.0, 100.0], ids=["usual buffers or large ones", "large buffers"])
@pytest.mark.parametrize("recipe", [None, jlp.MXFP8BlockScaling()], ids=["bf16", "mxfp8"])
def test_only_the_rows_that_there_are_travel(recipe, factor):
    with described("H100", 8) as devices:
        mesh = Mesh(np.array(devices), ("a",), axis_types=(AxisType.Auto,))

        def local(x, kernels, weights, experts):
            where = jlp.moe.dispatch(experts, EXPERTS)
            rows = AllToAll(where, "a", factor).run(
                lambda rows, sizes: jlp.grouped_matmul(rows, kernels, sizes, recipe=recipe),
                jlp.moe.scatter_to_experts(x, where),
                layers=[],
            )
            return jlp.moe.combine(rows, weights, where)

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
        found = traffic.collectives(compiled(step, *given, devices=devices).text)
    large = [c for c in found if c.nbytes > TOKENS]
    assert {c.kind for c in large} == {"ragged-all-to-all"}
    # To the experts and back, forward and backward; the exception sends rows to the experts once more, to recompute.
    assert len(large) == (4 if factor > 8 else 4 + 5)
    assert all(c.wire_bytes == TOKENS * K * WIDTH * 2 for c in large)
