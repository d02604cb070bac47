"""Blocks of experts with a selection bias, groups and further losses, in both libraries."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlowprec as jlp
from tests.flax.experts import EXPERTS, HIDDEN, WIDTH, K, X
from tests.helpers import assert_same_bytes

pytestmark = pytest.mark.sampled(5)

DEEPSEEK = jlp.moe.RouterConfig(
    "sigmoid",
    scale=2.5,
    groups=4,
    groups_per_token=2,
    selection_bias=True,
    load_balance_coef=0.0,
    sequence_balance_coef=0.5,
    z_loss_coef=0.25,
)
BIAS = jnp.asarray(np.random.default_rng(5).normal(0, 0.3, EXPERTS), jnp.float32)


class OfNnx:
    def __init__(self, routing=DEEPSEEK):
        self.module = jlp.nnx.MoE(EXPERTS, WIDTH, HIDDEN, top_k=K, routing=routing, dtype=jnp.float32, rngs=nnx.Rngs(0))
        self.graph, self.params, self.rest = nnx.split(self.module, nnx.Param, ...)
        self.bias = nnx.to_pure_dict(self.rest).get("selection_bias")

    def apply(self, params, bias, x, tape=None):
        rest = jax.tree.map(lambda _: bias, self.rest)  # nothing else is in it
        return nnx.merge(self.graph, params, rest)(x, tape)

    def router(self, params):
        return params["router"]["kernel"].get_value()


class OfLinen:
    def __init__(self, routing=DEEPSEEK):
        self.module = jlp.linen.MoE(EXPERTS, HIDDEN, K, routing=routing, dtype=jnp.float32)
        variables = jax.jit(self.module.init)(jax.random.key(0), X)
        self.params, self.bias = variables["params"], variables.get("selection_bias", {}).get("bias")

    def apply(self, params, bias, x, tape=None):
        return self.module.apply({"params": params, "selection_bias": {"bias": bias}}, x, tape)

    def router(self, params):
        return params["router"]["kernel"]


@pytest.fixture(scope="module", params=[OfNnx, OfLinen], ids=["nnx", "linen"])
def block(request):
    return request.param()


def routed(block, params, bias, x=X):
    """What `route` makes of the block's logits."""
    logits = jnp.matmul(x.astype(jnp.float32), block.router(params), precision=jax.lax.Precision.HIGHEST)
    return jlp.moe.route(logits.reshape(-1, EXPERTS), K, DEEPSEEK, bias=bias, sequence_length=x.shape[-2])


class TestSelectionBias:
    @pytest.mark.slow
    def test_is_zero_at_first_and_no_parameter(self, block):
        assert_same_bytes(block.bias, jnp.zeros(EXPERTS))
        assert not any(leaf.shape == (EXPERTS,) for leaf in jax.tree.leaves(block.params))

    def test_changes_the_choice_as_in_route(self, block):
        _, aux = jax.jit(block.apply)(block.params, BIAS, X)
        expected = jax.jit(lambda params: routed(block, params, BIAS))(block.params)
        np.testing.assert_array_equal(aux.tape.reshape(-1, K), expected.experts)
        assert np.any(aux.tape != jax.jit(block.apply)(block.params, block.bias, X)[1].tape)

    @pytest.mark.slow
    def test_gets_no_gradient(self, block):
        def loss(params, bias):
            y, aux = block.apply(params, bias, X)
            return jnp.sum(y.astype(jnp.float32) ** 2) + aux.loss

        of_params, of_bias = jax.jit(jax.grad(loss, argnums=(0, 1)))(block.params, BIAS)
        assert not np.any(of_bias) and np.all(np.any(block.router(of_params) != 0, axis=0))

    @pytest.mark.slow
    def test_levels_the_load_while_the_model_learns(self, block):
        optimizer, x = optax.adam(1e-3), X.astype(jnp.float32) + 1  # most tokens to the same experts

        @jax.jit
        def step(params, bias, state):
            def loss(params):
                y, aux = block.apply(params, bias, x)
                return jnp.mean((y - jnp.roll(x, 1, axis=-1)) ** 2), aux

            (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(params)
            updates, state = optimizer.update(gradients, state)
            bias = jlp.moe.update_selection_bias(bias, aux.group_sizes, rate=0.02)
            return optax.apply_updates(params, updates), bias, state, value, aux.group_sizes

        params, bias, state = block.params, block.bias, optimizer.init(block.params)
        found = []
        for _ in range(60):
            params, bias, state, *more = step(params, bias, state)
            found.append(more)
        (first, uneven), (last, even) = found[0], found[-1]
        assert last < first and np.std(even) < 0.4 * np.std(uneven)

    @pytest.mark.slow
    def test_is_missed_where_it_is_needed(self):
        module = OfLinen().module
        with pytest.raises(Exception, match="selection_bias"):
            module.apply({"params": OfLinen().params}, X)


class TestLosses:
    def test_are_those_of_route_times_their_coefficients(self, block):
        _, aux = jax.jit(block.apply)(block.params, BIAS, X)
        expected = jax.jit(lambda params: routed(block, params, BIAS))(block.params)
        assert aux.load_balance_loss == 0
        np.testing.assert_allclose(aux.sequence_balance_loss, 0.5 * expected.sequence_balance_loss, rtol=1e-6)
        np.testing.assert_allclose(aux.z_loss, 0.25 * expected.z_loss, rtol=1e-6)
        np.testing.assert_allclose(aux.loss, aux.sequence_balance_loss + aux.z_loss, rtol=1e-6)
        assert abs(expected.sequence_balance_loss - expected.load_balance_loss) > 1e-4

    @pytest.mark.slow
    def test_cost_nothing_where_their_coefficients_are_zero(self):
        plain = OfLinen(jlp.moe.RouterConfig("sigmoid"))
        _, aux = jax.jit(plain.module.apply)({"params": plain.params}, X)
        assert aux.sequence_balance_loss == aux.z_loss == 0 and aux.loss == aux.load_balance_loss > 0


class TestNnx:
    @pytest.mark.slow
    def test_the_bias_is_a_variable_of_its_own_that_jit_updates(self):
        model = OfNnx().module
        assert isinstance(model.selection_bias, jlp.nnx.SelectionBias)
        assert not isinstance(model.selection_bias, nnx.Param)
        optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            def loss(model):
                y, aux = model(X.astype(jnp.float32))
                return jnp.mean(y**2) + aux.loss, aux

            gradients, aux = nnx.grad(loss, has_aux=True)(model)
            optimizer.update(model, gradients)
            bias = model.selection_bias
            bias.set_value(jlp.moe.update_selection_bias(bias.get_value(), aux.group_sizes, rate=0.5))
            return aux.group_sizes

        sizes = step(model, optimizer)
        expected = 0.5 * np.sign(np.mean(sizes) - np.asarray(sizes))
        np.testing.assert_array_equal(model.selection_bias.get_value(), expected)

    def test_without_one_there_is_none(self):
        assert jlp.nnx.MoE(4, 32, 32, top_k=2, rngs=nnx.Rngs(0)).selection_bias is None


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [jlp.Int4QAT(group_size=32)], ids=["int4_qat"])
def test_quantised_models_keep_it(recipe):
    of_nnx = OfNnx().module
    of_nnx.selection_bias.set_value(BIAS)
    served = jlp.quantize_params(of_nnx, recipe)
    assert_same_bytes(served.selection_bias.get_value(), BIAS)
    of_linen = OfLinen()
    variables = {"params": of_linen.params, "selection_bias": {"bias": BIAS}}
    served = jlp.quantize_params(of_linen.module, recipe, variables, X)
    assert_same_bytes(served["selection_bias"]["bias"], BIAS)
