"""Master weights: bfloat16 parameters and remainders that are float32 to the bit, or near it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxlowprec as jlp
from jaxlowprec.ops.optimizer_states import join_weight
from jaxlowprec.optim.masters import split
from tests.helpers import assert_same_bytes, assert_same_numbers
from tests.numpy_oracle import optimizer_states as oracle

WORDS = np.array([1, 2], np.uint32)


def patterns(count):
    """Bits of float32 at random; ties, the largest finite, infinities and NaN among them."""
    bits = np.random.default_rng(0).integers(0, 2**32, count, dtype=np.uint32)
    edges = [0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x00008000, 0x3F808000, 0xBF818000, 0x7FFFFFFF, 0xFFFFFFFF]
    bits[: len(edges)] = edges
    return bits.view(np.float32)


def stepper(tx):
    def step(gradients, state, params):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step)


class TestSplit:
    def test_every_pattern_comes_back_from_32_bits(self):
        x = patterns(1 << 20)
        p, rest = jax.jit(lambda x: split(x, 32))(x)
        assert_same_numbers(jax.jit(join_weight)(p, rest), x)
        upper, expected = oracle.split(x, 32)
        assert_same_bytes((p, rest), (upper.view(jnp.bfloat16), expected))

    def test_24_bits_are_nearest(self):
        x = patterns(1 << 18)
        p, rest = jax.jit(lambda x: split(x, 24))(x)
        upper, expected = oracle.split(x, 24)
        assert_same_bytes((p, rest), (upper.view(jnp.bfloat16), expected))
        back, normal = np.asarray(jax.jit(join_weight)(p, rest)), (np.abs(x) >= 2.0**-126) & (np.abs(x) < 3.4e38)
        error = np.abs(back[normal].astype(np.float64) / x[normal] - 1).max()
        assert 2.0**-17 < error <= 2.0**-16

    def test_16_bits_are_those_of_the_specification(self):
        x = patterns(1 << 12).reshape(64, 64)
        p, rest = jax.jit(lambda x: split(x, 16, WORDS))(x)
        upper, _ = oracle.split(x, 16, oracle.half_words(x.shape, WORDS))
        assert rest is None
        assert_same_bytes(p, upper.view(jnp.bfloat16))

    def test_16_bits_have_no_bias(self):
        x = np.full((256, 256), 1 + 0.3 * 2.0**-7, np.float32)
        p, _ = split(jnp.asarray(x), 16, WORDS)
        up = np.mean(np.asarray(p).astype(np.float32) > 1)
        assert abs(up - 0.3) < 4 * np.sqrt(0.3 * 0.7 / x.size)
        keys = np.stack([np.zeros(1 << 16, np.uint32), np.arange(1 << 16, dtype=np.uint32)], 1)
        one, _ = jax.vmap(split, (None, None, 0))(jnp.asarray(x[:1, :1]), 16, keys)  # an element over keys
        assert abs(np.mean(np.asarray(one).astype(np.float32) > 1) - 0.3) < 4 * np.sqrt(0.3 * 0.7 / len(keys))

    def test_a_weight_that_is_nan_is_a_parameter_that_is(self):
        """0x7FFFFFFF + 0x8000 would carry into -0."""
        x = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
        for bits in (32, 24, 16):
            assert np.isnan(np.asarray(split(jnp.asarray(x), bits, WORDS)[0]).astype(np.float32)).all()


@pytest.fixture(scope="module")
def weights():
    x = np.random.default_rng(3).standard_normal((64, 96)) * 0.02
    return jnp.asarray(x, jnp.bfloat16)


def gradient(i, shape):
    return jax.random.normal(jax.random.key(i), shape)


class TestSteps:
    def test_200_of_adamw_are_those_of_float32_to_the_bit(self, weights):
        """Operation by operation: of two programs XLA may contract a product and a sum in one alone."""
        inner = optax.adamw(1e-3, weight_decay=0.1)
        tx = jlp.optim.master_weights(inner)
        full, low = weights.astype(jnp.float32), weights
        first, second = inner.init(full), tx.init(low)
        for i in range(200):
            g = gradient(i, full.shape)
            updates, first = inner.update(g, first, full)
            full = optax.apply_updates(full, updates)
            updates, second = tx.update(g, second, low)
            low = optax.apply_updates(low, updates)
        assert_same_bytes(join_weight(low, second.remainders), full)
        assert low.dtype == jnp.bfloat16 and np.any(second.remainders)
        assert_same_bytes(second.inner, first)

    @pytest.mark.parametrize(("bits", "bound"), [(32, 2.0**-24), (24, 2.0**-15), (16, 0.4)])
    def test_small_ones_add_up(self, bits, bound):
        """A hundred steps of a thousandth of bfloat16's distance are lost without remainders."""
        tx = jlp.optim.master_weights(optax.sgd(1.0), bits=bits)
        p = jnp.ones((128, 128), jnp.bfloat16)
        state, step = tx.init(p), stepper(tx)
        for _ in range(100):
            p, state = step(jnp.full(p.shape, -(2.0**-10)), state, p)
        mean = np.asarray(join_weight(p, state.remainders)).astype(np.float64).mean()
        assert abs((mean - 1) / (100 * 2.0**-10) - 1) < max(bound, 0.01 if bits == 16 else 0)

    @pytest.mark.parametrize("bits", [32, 24])
    def test_parameter_and_remainder_agree_after_any_change(self, bits):
        """Also if it takes all but the last bits of a weight: p plus the update is rounded again there."""
        rng = np.random.default_rng(0)
        weight = rng.uniform(0.5, 4, 1 << 18).astype(np.float32) * rng.choice([-1, 1], 1 << 18).astype(np.float32)
        weight[: 1 << 16] = np.exp2(rng.integers(-3, 3, 1 << 16)) * (1 - 2.0 ** -rng.integers(9, 24, 1 << 16))
        p, rest = split(jnp.asarray(weight), bits)
        weight = np.asarray(join_weight(p, rest))
        ulps = np.round(rng.standard_normal(weight.size) * 2.0 ** rng.integers(0, 20, weight.size))
        gradient = (weight - ulps * 2.0**-24 * np.exp2(np.floor(np.log2(np.abs(weight))))).astype(np.float32)
        tx = jlp.optim.master_weights(optax.sgd(1.0), bits=bits)
        after, state = stepper(tx)(gradient, tx.init(p)._replace(remainders=rest), p)
        new, found = weight - gradient, np.asarray(join_weight(after, state.remainders))
        p = np.abs(np.asarray(p).astype(np.float64))
        assert np.mean(np.abs(new) < 2.0**-16 * p) > 0.2 and np.mean(found != new) > 0.001
        lost = np.abs(found.astype(np.float64) - new)
        assert np.all(lost <= np.maximum(2.0**-24 * p, 0 if bits == 32 else 2.0**-16 * np.abs(new)))
        large = np.abs(new) >= 2.0**-16 * p
        assert bits == 24 or np.all(found[large] == new[large])

    @pytest.mark.parametrize("bits", [32, 24])
    def test_weights_that_a_product_cancels_stay_numbers(self, bits):
        """XLA contracts the product with the sum: what is left is no multiple of the weight's last place."""
        weight = np.asarray(jax.random.normal(jax.random.key(0), (64, 64)))
        p, rest = split(jnp.asarray(weight), bits)
        weight = np.asarray(join_weight(p, rest))
        tx = jlp.optim.master_weights(optax.scale(-0.37), bits=bits)
        given = weight / np.float32(0.37), tx.init(p)._replace(remainders=rest), p
        optimized = {"xla_backend_optimization_level": 3}  # contracts; these tests do without
        after, state = stepper(tx).lower(*given).compile(compiler_options=optimized)(*given)
        found = np.asarray(join_weight(after, state.remainders))
        assert np.all(np.abs(found) <= 2.0**-22 * np.abs(weight))  # and no NaN

    def test_gradients_of_bfloat16_are_widened_and_others_pass(self, weights):
        seen = []
        inner = optax.GradientTransformation(
            lambda params: seen.append(params) or (), lambda g, s, p: (seen.append((g, p)) or g, s)
        )
        params = {"w": weights, "b": jnp.ones(3), "h": jnp.ones(3, jnp.float16)}
        tx = jlp.optim.master_weights(inner)
        updates, state = tx.update(params, tx.init(params), params)
        at_init, (g, p) = seen
        for tree in (at_init, g, p):
            assert {name: leaf.dtype.name for name, leaf in tree.items()} == {
                "w": "float32", "b": "float32", "h": "float16",
            }  # fmt: skip
        assert state.remainders["b"] is None and state.remainders["h"] is None
        assert {name: leaf.dtype.name for name, leaf in updates.items()} == {
            "w": "float32", "b": "float32", "h": "float16",
        }  # fmt: skip

    def test_16_bits_draw_anew_in_each_step_leaf_and_key(self):
        params = {"a": jnp.ones((64, 64), jnp.bfloat16), "b": jnp.ones((64, 64), jnp.bfloat16)}
        g = jax.tree.map(lambda p: jnp.full(p.shape, -(2.0**-9)), params)

        def after(key):
            tx = jlp.optim.master_weights(optax.sgd(1.0), bits=16, key=key)
            p, state = stepper(tx)(g, tx.init(params), params)
            q, _ = stepper(tx)(g, state, params)
            return [np.asarray(x).tobytes() for x in (p["a"], p["b"], q["a"])]

        drawn = after(0) + after(1) + after(jax.random.key(2))
        assert len(set(drawn)) == 9
        assert after(1) == after(jax.random.key(1))


class TestErrors:
    def test_say_what_is_needed(self, weights):
        tx = jlp.optim.master_weights(optax.sgd(1.0))
        state = tx.init(weights)
        with pytest.raises(ValueError, match=r"needs update\(gradients, state, params\)"):
            tx.update(weights, state)
        with pytest.raises(TypeError, match=r"the parameter 'ids' is int32.*optax.masked"):
            tx.init({"ids": jnp.arange(3)})
        with pytest.raises(ValueError, match="master_weights: bits=8; needs 32, 24 or 16"):
            jlp.optim.master_weights(optax.sgd(1.0), bits=8)
        with pytest.raises(TypeError, match="inner=0.1; needs an optax.GradientTransformation"):
            jlp.optim.master_weights(0.1)
        for key in (None, 0.5, "0", True):
            with pytest.raises(TypeError, match="master_weights: key=.*JAX key such as"):
                jlp.optim.master_weights(optax.sgd(1.0), key=key)
        with pytest.raises(ValueError, match="key=-1; needs an int from 0 on"):
            jlp.optim.master_weights(optax.sgd(1.0), key=-1)

    def test_states_that_do_not_fit(self, weights):
        tx, other = (jlp.optim.master_weights(optax.sgd(1.0), bits=bits) for bits in (32, 24))
        state = tx.init(weights)
        needed = "the state has int16[64, 96] at 'remainders'; these parameters and arguments need int8[64, 96]"
        with pytest.raises(ValueError, match=re.escape(needed)):
            other.update(weights, state, weights)
        with pytest.raises(TypeError, match="the state is a tuple; needs the MasterState that init"):
            tx.update(weights, (), weights)
        with pytest.raises(ValueError, match="made for other parameters"):
            tx.update({"w": weights}, state, {"w": weights})

    def test_a_parameter_that_became_float32(self, weights):
        """`p + u` is float32: what eqx.apply_updates does."""
        tx = jlp.optim.master_weights(optax.sgd(1.0))
        updates, state = tx.update({"w": weights}, tx.init({"w": weights}), {"w": weights})
        needed = "the parameter 'w' is float32, and the state has a remainder of bfloat16: apply updates with optax"
        with pytest.raises(ValueError, match=needed):
            tx.update({"w": weights}, state, {"w": weights + updates["w"]})

    def test_another_version_is_an_error_or_nan(self, weights):
        tx = jlp.optim.master_weights(optax.sgd(1.0))
        state = tx.init(weights)._replace(version=jnp.int32(2))
        with pytest.raises(ValueError, match="the state has version 2; this jaxlowprec reads version 1"):
            tx.update(weights, state, weights)
        assert np.isnan(np.asarray(jax.jit(tx.update)(weights, state, weights)[0])).all()
