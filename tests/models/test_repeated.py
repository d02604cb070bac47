"""Equations that equal layers repeat are differentiated once, and the program is the one that they make one by one."""

import collections
import re

import jax
import jax.numpy as jnp
import pytest

import jaxlowprec as jlp
from jaxlowprec.models.transform import evaluating, repeated
from tests.helpers import random_array

RECIPE = jlp.NVFP4BlockScaling()
X = random_array((16, 32))
PARAMS = {f"layer_{i}": random_array((32, 32), "float32", i) for i in range(4)}


def terms_inside_and_after(x):
    """x has two terms of its gradient here, and the residual's after it."""
    return jnp.exp(x) + x * jnp.sin(x)


def squared(x):
    return x * x + jax.lax.tanh(x)


def of_jax_numpy(x):
    return jnp.where(x > 0, jax.nn.silu(x), jax.nn.softmax(x))


def loss_with(between):
    def loss(params, x):
        for name, weight in params.items():
            with jax.named_scope(name):
                x = x + between(x) @ weight.astype(x.dtype)
        return jnp.square(x.astype(jnp.float32)).mean()

    return loss


def lowered(loss):
    jax.clear_caches()
    return jax.jit(jax.grad(jlp.quantize_matmuls(loss, RECIPE))).lower(PARAMS, X)


@pytest.mark.parametrize("between", [terms_inside_and_after, squared, of_jax_numpy])
def test_program_is_that_of_single_equations(between, monkeypatch):
    together = lowered(loss_with(between)).as_text()
    monkeypatch.setattr(evaluating, "runs_of", lambda jaxpr, others: {})
    assert together == lowered(loss_with(between)).as_text()


def test_equal_layers_share_one_function():
    jaxpr = jax.make_jaxpr(loss_with(of_jax_numpy))(PARAMS, X).jaxpr
    products = {i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "dot_general"}
    runs = repeated.runs_of(jaxpr, products)
    shared = collections.Counter(run.call for run in runs.values())
    assert shared
    assert {*shared.values()} == {len(PARAMS)}


def test_shared_function_has_each_callers_names():
    text = lowered(loss_with(jnp.exp)).as_text(debug_info=True)
    assert all(re.search(rf"{name}\)*/(jit\(repeated\)/)?exp", text) for name in PARAMS)


def test_eager_calls_run_single_equations(monkeypatch):
    def none(jaxpr, others):
        raise AssertionError("XLA would fuse equations that are evaluated one by one otherwise")

    monkeypatch.setattr(evaluating, "runs_of", none)
    loss = jlp.quantize_matmuls(loss_with(of_jax_numpy), RECIPE)
    jax.grad(loss)(PARAMS, X)
    with pytest.raises(AssertionError, match="one by one"):
        jax.jit(loss)(PARAMS, X)


def test_cast_that_only_products_read_is_not_evaluated():
    def casts(params):
        found = jax.make_jaxpr(jlp.quantize_matmuls(loss_with(jnp.exp), RECIPE))(params, X).jaxpr.eqns
        return [eqn for eqn in found if eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.ndim == 2]

    assert len(casts(PARAMS)) == 1  # the loss's


def test_cast_that_others_read_keeps_its_value():
    def loss(params, x):
        weight = params["kernel"].astype(x.dtype)
        return (x @ weight).astype(jnp.float32).sum() + weight.astype(jnp.float32).sum()

    params, quantized = {"kernel": PARAMS["layer_1"]}, jlp.quantize_matmuls(loss, RECIPE)
    rounded = params["kernel"].astype(jnp.bfloat16).astype(jnp.float32).sum()
    product = jlp.linear(X, params["kernel"], recipe=RECIPE, name="kernel").astype(jnp.float32).sum()
    assert jnp.allclose(jax.jit(quantized)(params, X) - product, rounded, atol=1e-2)


def test_roles_are_made_once_for_equal_recipes():
    assert jlp.NVFP4BlockScaling().roles("linear", "a") is jlp.NVFP4BlockScaling().roles("linear", "b")
    assert jlp.NVFP4BlockScaling(disable_rht=True).roles() != RECIPE.roles()
