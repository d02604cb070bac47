"""Dispatch and combine: by sorting, without capacity, each addition in its order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes

TOKENS, EXPERTS, K, WIDTH = 24, 6, 2, 16


# Op by op they compile dozens of programs.
dispatch = jax.jit(jlp.moe.dispatch, static_argnums=1)
scatter = jax.jit(jlp.moe.scatter_to_experts)
combine = jax.jit(jlp.moe.combine)


def random_experts(seed=0, experts=EXPERTS):
    scores = np.random.default_rng(seed).random((TOKENS, experts))
    return np.argsort(-scores, axis=-1)[:, :K].astype(np.int32)


ROUTINGS = {
    "random": random_experts(),
    "some experts empty": random_experts(1, experts=3) * 2,
    "two take all": np.tile(np.asarray([[4, 1]], np.int32), (TOKENS, 1)),
    "an expert with one token": np.asarray([[0, 3]] + [[1, 2]] * (TOKENS - 1), np.int32),
    "one token": np.asarray([[5, 0]], np.int32),
    "no token": np.zeros((0, K), np.int32),
}
each_routing = pytest.mark.parametrize("experts", ROUTINGS.values(), ids=ROUTINGS)


def numbers(*shape, seed=0, dtype=jnp.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@each_routing
class TestDispatch:
    def test_sorts_stably_and_counts(self, experts):
        where = dispatch(experts, EXPERTS)
        flat = np.asarray(experts).ravel()
        np.testing.assert_array_equal(where.order, np.argsort(flat, kind="stable"))
        np.testing.assert_array_equal(where.group_sizes, np.bincount(flat, minlength=EXPERTS))
        np.testing.assert_array_equal(np.asarray(where.order)[where.places].ravel(), np.arange(flat.size))
        assert {leaf.dtype for leaf in jax.tree.leaves(where)} == {jnp.dtype("int32")}

    def test_rows_are_those_of_the_experts_tokens_in_their_order(self, experts):
        x = numbers(experts.shape[0], WIDTH)
        where = jax.device_get(dispatch(experts, EXPERTS))
        rows = np.split(np.asarray(scatter(x, where)), np.cumsum(where.group_sizes)[:-1])
        for expert, found in enumerate(rows):
            np.testing.assert_array_equal(found, x[np.nonzero(experts == expert)[0]])

    def test_combine_adds_up_in_the_order_of_the_choice(self, experts):
        rows, weights = numbers(experts.size, WIDTH, dtype=jnp.bfloat16), numbers(*experts.shape, seed=1)
        where = jax.device_get(dispatch(experts, EXPERTS))
        expected = np.zeros((experts.shape[0], WIDTH), np.float32)
        wide = rows.astype(np.float32)
        for i in range(K):
            expected = expected + wide[where.places[:, i]] * weights[:, i : i + 1]
        actual = combine(rows, weights, where)
        assert actual.dtype == jnp.float32
        np.testing.assert_array_equal(actual, expected)

    def test_gradients_are_those_of_plain_indexing(self, experts):
        x, weights = numbers(experts.shape[0], WIDTH), numbers(*experts.shape, seed=1)
        where = dispatch(experts, EXPERTS)

        def ours(x, weights):
            rows = scatter(x, where)
            return jnp.sum(jnp.sin(jlp.moe.combine(jnp.cos(rows), weights, where)))

        def plain(x, weights):
            rows = jnp.cos(jnp.asarray(x)[where.order // K])
            return jnp.sum(jnp.sin(jnp.sum(rows[where.places] * weights[..., None], axis=1)))

        actual, expected = (jax.jit(jax.grad(f, argnums=(0, 1)))(x, weights) for f in (ours, plain))
        for a, e in zip(actual, expected, strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)

    @pytest.mark.sampled(7)
    def test_under_vmap_is_that_of_each(self, experts):
        stacked = np.stack([experts, experts[::-1]])
        x, weights = numbers(*stacked.shape[:2], WIDTH), numbers(*stacked.shape, seed=1)

        def there_and_back(experts, x, weights):
            where = dispatch(experts, EXPERTS)
            return jlp.moe.combine(scatter(x, where), weights, where)

        together = jax.device_get(jax.jit(jax.vmap(there_and_back))(stacked, x, weights))
        for i in range(2):
            assert_same_bytes(together[i], jax.jit(there_and_back)(stacked[i], x[i], weights[i]))


def test_what_is_no_expert_comes_last_and_is_counted_nowhere():
    where = dispatch(jnp.asarray([[-1, 0], [7, 1]], jnp.int32), 2)
    assert where.order.tolist() == [1, 3, 0, 2] and where.group_sizes.tolist() == [1, 1]


def test_a_gradient_in_bfloat16_is_added_up_in_float32():
    where = dispatch(jnp.asarray([[0, 1, 2]], jnp.int32), 3)
    gradient = jnp.asarray([[1.0], [2.0**-9], [2.0**-9]], jnp.bfloat16)  # in bfloat16 each addition would be lost
    pull = jax.jit(lambda x, dy: jax.vjp(lambda x: scatter(x, where), x)[1](dy))
    (dx,) = pull(jnp.ones((1, 1), jnp.bfloat16), gradient)
    assert dx.dtype == jnp.bfloat16 and dx[0, 0] == jnp.asarray(1 + 2.0**-8, jnp.float32).astype(jnp.bfloat16)
    assert float(jnp.asarray(1.0, jnp.bfloat16) + gradient[1, 0] + gradient[2, 0]) == 1


@pytest.mark.parametrize(
    ("experts", "error"), [(jnp.zeros(4, jnp.int32), ValueError), (jnp.zeros((4, 2), jnp.int16), TypeError)]
)
def test_experts_that_are_no_int32_rows_are_named(experts, error):
    with pytest.raises(error, match=r"needs int32 \[tokens, k\]"):
        jlp.moe.dispatch(experts, 3)
