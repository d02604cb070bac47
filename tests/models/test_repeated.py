"""Equations that equal layers repeat are differentiated once, and the transposition of a product is part of it. Results
are those of the equations one by one.
"""

import collections
import re

import jax
import jax.numpy as jnp
import pytest

import jaxlowprec as jlp
from jaxlowprec.models.transform import evaluating, repeated
from tests.helpers import assert_same_bytes, random_array

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


def test_biases_are_part_of_shared_functions(monkeypatch):
    """What leads to no product is not followed, so equations of such parameters are differentiated once, too."""
    alone = []

    def runs_of(jaxpr, others):
        alone.extend(jaxpr.eqns[i] for i in others)
        return repeated.runs_of(jaxpr, others)

    def loss(params, x):
        for weight, bias in params:
            x = x @ weight.astype(x.dtype) + bias.astype(x.dtype)
        return x.astype(jnp.float32).sum()

    monkeypatch.setattr(evaluating, "runs_of", runs_of)
    jax.jit(jlp.quantize_matmuls(loss, RECIPE)).trace([(w, w[0]) for w in PARAMS.values()], X)
    found = collections.Counter((eqn.primitive.name, eqn.outvars[0].aval.shape) for eqn in alone)
    assert found == {("convert_element_type", (32, 32)): len(PARAMS), ("dot_general", (16, 32)): len(PARAMS)}


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


def rows_of(weight, x):
    """A function of one row under `vmap`, as Equinox' linears are: the product is [N, T], then transposed."""
    return jax.vmap(lambda row: weight @ row)(x)


def read_twice(weight, x):
    y = jnp.einsum("nk,tk->nt", weight, x)
    return y.T + jnp.sin(y)[:, :16].T


def returned_too(weight, x):
    y = jnp.einsum("bnk,tbk->bnt", weight.reshape(2, 32, 16), x.reshape(16, 2, 16))
    return y, y.transpose(0, 2, 1)


def otherwise(weight, x):
    return jnp.einsum("nk,btk->nbt", weight, x.reshape(2, 8, 32)).transpose(1, 0, 2)


def batched(weight, x):
    return jnp.einsum("bnk,btk->btn", weight.reshape(2, 16, 32), x.reshape(2, 8, 32))


def test_vmapped_linears_have_no_further_transpositions():
    def loss(params, x):
        for weight in params.values():
            x = x + rows_of(weight, x).astype(x.dtype)
        return jnp.square(x.astype(jnp.float32)).mean()

    program = lowered(loss)
    assert "stablehlo.transpose" in program.as_text()
    assert " transpose(" not in program.compile().as_text()


@pytest.mark.parametrize("function", [rows_of, read_twice, returned_too, otherwise, batched])
def test_transposed_products_keep_their_bytes(function, monkeypatch):
    def gradients(weight, x):
        def loss(weight, x):
            y = jlp.quantize_matmuls(function, RECIPE)(weight, x)
            return sum(jnp.sum(jnp.cos(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(y)), y

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(weight, x)

    merged = gradients(PARAMS["layer_1"], X)
    monkeypatch.setattr(evaluating, "_merged", lambda jaxpr, flow: {})
    assert_same_bytes(merged, gradients(PARAMS["layer_1"], X))
