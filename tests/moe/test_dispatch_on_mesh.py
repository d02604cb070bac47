"""Dispatch within shard_map, where each device sorts by its own experts."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.sharding.meshes import mesh_of

TOKENS, EXPERTS, K, WIDTH = 24, 6, 2, 16


def test_tokens_get_the_gradients_of_their_own_rows():
    """A row of one device and the same row of another are of different tokens."""
    rng = np.random.default_rng(0)
    x, weights = (jnp.asarray(rng.standard_normal((n, WIDTH)), jnp.float32) for n in (TOKENS, 2 * TOKENS * K))
    experts = jnp.asarray(np.argsort(rng.random((TOKENS, EXPERTS)), axis=-1)[:, :K], jnp.int32)

    def rows(x, shift):
        return jlp.moe.scatter_to_experts(x, jlp.moe.dispatch((experts + shift[0]) % EXPERTS, EXPERTS))

    def gradient(rows, shifts, weights):
        return jax.jit(jax.grad(lambda x: jnp.sum(rows(x, jnp.asarray(shifts, jnp.int32)) * weights)))(x)

    both = jax.shard_map(rows, mesh=mesh_of((2,)), in_specs=(P(), P("a")), out_specs=P("a"))
    alone = [gradient(rows, [shift], part) for shift, part in zip((0, 2), jnp.split(weights, 2), strict=True)]
    np.testing.assert_allclose(gradient(both, [0, 2], weights), sum(alone), rtol=1e-6, atol=1e-6)
