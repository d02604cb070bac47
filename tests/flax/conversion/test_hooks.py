"""flax_dot_general_cls: layers that take a module for their product compute as this library's."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.layers.delayed_scaling import OVERWRITE_WITH_GRADIENT
from tests.helpers import assert_same_bytes, random_array

RECIPE = jlp.NVFP4BlockScaling()
DELAYED = jlp.DelayedScaling(amax_history_len=3)
X = random_array((16, 32), "float32")


def layer(kind, rules, features=32):
    return kind(features, dot_general_cls=jlp.flax_dot_general_cls(rules), use_bias=False)


def model(rules):
    return nn.Sequential([layer(nn.Dense, rules), jnp.tanh, layer(nn.DenseGeneral, rules, (4, 8))])


def ours(recipe):
    layers = [jlp.linen.Dense(32, use_bias=False, recipe=recipe), jnp.tanh]
    return nn.Sequential([*layers, jlp.linen.DenseGeneral((4, 8), use_bias=False, recipe=recipe)])


def step(module, variables):
    def loss(variables):
        y = module.apply(variables, X)
        return jnp.sum(y**2), y

    return jax.jit(jax.grad(loss, has_aux=True))(variables)


@pytest.mark.parametrize("rules", [RECIPE, jlp.PerLayer((("layers_0", None),), RECIPE)], ids=["recipe", "rules"])
def test_it_computes_as_the_librarys_layers(rules):
    variables = nn.Sequential([nn.Dense(32, use_bias=False), jnp.tanh, nn.DenseGeneral((4, 8), use_bias=False)])
    variables = variables.init(jax.random.key(0), X)
    assert_same_bytes(model(rules).init(jax.random.key(0), X), variables)
    assert_same_bytes(step(model(rules), variables), step(ours(rules), variables))


def test_without_a_recipe_it_is_flaxs():
    variables = model(None).init(jax.random.key(0), X)
    assert_same_bytes(model(None).apply(variables, X), ours(None).apply(variables, X))


def test_the_scopes_recipe_applies():
    variables = model(jlp.FROM_CONTEXT).init(jax.random.key(0), X)
    with jlp.autocast(RECIPE):
        assert_same_bytes(model(jlp.FROM_CONTEXT).apply(variables, X), ours(RECIPE).apply(variables, X))


@pytest.mark.slow
def test_delayed_scalings_state_is_in_the_collection():
    expected = ours(DELAYED).init(jax.random.key(0), X)
    variables = model(DELAYED).init(jax.random.key(0), X)
    assert_same_bytes(variables, expected)
    actual, expected = step(model(DELAYED), variables), step(ours(DELAYED), expected)
    assert actual[0][OVERWRITE_WITH_GRADIENT]["layers_0"]["DotGeneral_0"]["input_amax_history"][0] == jnp.abs(X).max()
    assert_same_bytes(actual, expected)


def test_amaxes_of_a_layer_called_again_are_combined_by_max():
    module = layer(nn.Dense, DELAYED)

    def loss(variables):
        return module.apply(variables, X, method=lambda layer, x: sum(layer(k * x) for k in (1, 3, 2))).sum()

    new = jax.jit(jax.grad(loss))(module.init(jax.random.key(0), X))
    state = new[OVERWRITE_WITH_GRADIENT]["DotGeneral_0"]
    assert state["input_amax_history"].tolist() == [jnp.abs(3 * X).max(), 0, 0]
    assert state["output_grad_amax_history"].tolist() == [1, 0, 0]


def test_a_state_in_boxes_is_the_state():
    """As MaxText's ToNNX hands it over, with the metadata of NNX variables."""
    variables = model(DELAYED).init(jax.random.key(0), X)
    boxed = jax.tree.map(lambda leaf: nn.Partitioned(leaf, (None,)), variables[OVERWRITE_WITH_GRADIENT])
    y = model(DELAYED).apply(variables | {OVERWRITE_WITH_GRADIENT: boxed}, X)
    assert_same_bytes(y, model(DELAYED).apply(variables, X))


def test_rules_that_are_none_raise():
    with pytest.raises(TypeError, match="flax_dot_general_cls: recipe='nvfp4'"):
        jlp.flax_dot_general_cls("nvfp4")


def test_equal_rules_make_equal_layers():
    assert layer(nn.Dense, RECIPE) == layer(nn.Dense, jlp.NVFP4BlockScaling()) != layer(nn.Dense, DELAYED)


class TestInNnx:
    """As MaxText has it: `ToNNX(quant.dot_general_cls(mesh_axes)(), rngs=rngs)` and `lazy_init`."""

    DIMS = (((1,), (0,)), ((), ()))

    def made(self, rules, w):
        product = nnx.bridge.ToNNX(jlp.flax_dot_general_cls(rules)(), rngs=nnx.Rngs(params=0))
        return product.lazy_init(X, w, self.DIMS, precision=None)

    def test_a_product_is_dot_general(self):
        w = random_array((32, 16), "float32", 1)
        y = nnx.jit(lambda product, x, w: product(x, w, self.DIMS, precision=None))(self.made(RECIPE, w), X, w)
        assert_same_bytes(y, jlp.dot_general(X, w, self.DIMS, recipe=RECIPE))

    @pytest.mark.slow
    def test_delayed_scalings_state_is_a_variable_and_learns(self):
        w = random_array((32, 16), "float32", 1)
        product = self.made(DELAYED, w)
        graph, state = nnx.split(product)
        new = jax.grad(lambda state: nnx.merge(graph, state)(X, w, self.DIMS).sum(), allow_int=True)(state)
        leaves = {path[-1]: v for path, v in nnx.to_flat_state(new)}
        assert leaves["kernel_amax_history"][...].tolist() == [float(jnp.abs(w).max()), 0, 0]


@pytest.mark.slow
def test_dot_general_is_what_haliax_calls():
    """Haliax hands its `DotGeneralOp` to jnp.einsum, the weight as the second operand in any order of its axes."""
    w = random_array((48, 32), "float32", 1)
    with jlp.autocast(RECIPE):
        y = jnp.einsum("td,hd->th", X, w, _dot_general=jlp.dot_general)
        assert_same_bytes(y, jlp.dot_general(X, w, (((1,), (1,)), ((), ()))))
