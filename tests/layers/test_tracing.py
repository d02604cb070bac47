"""How often a layer is traced: JAX's compilation starts with Python, and that takes time for each layer of a model."""

import re
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import jaxlowprec as jlp
from jaxlowprec.layers import product, weight_only
from tests.low_precision import recipes

RECIPES = recipes("nvfp4", "mxfp8", "int4_qat")
MODULES = (product, product, weight_only)
by_recipe = pytest.mark.parametrize(
    ("recipe", "module"), list(zip(RECIPES.values(), MODULES, strict=True)), ids=RECIPES
)


def linears(layers):
    """The gradient's trace of linears with a name each."""

    def model(w, x):
        for i in range(layers):
            x = jlp.linear(x, w, name=f"layer {i}")
        return x.astype(jnp.float32).sum()

    return jax.jit(jax.grad(model)).trace(jnp.ones((32, 32)), jnp.ones((32, 32), jnp.bfloat16))


def experts(layers):
    def model(w, x):
        for i in range(layers):
            x = jlp.grouped_matmul(x, w, jnp.array([12, 20]), name=f"layer {i}")
        return x.astype(jnp.float32).sum()

    return jax.jit(jax.grad(model)).trace(jnp.ones((2, 32, 32)), jnp.ones((32, 32), jnp.bfloat16))


def traces(module, trace, layers):
    """How often a forward pass is traced: the first layer's x has no gradient, which is a trace of its own."""
    jax.clear_caches()
    name = "fprop" if module is product else "_fprop"
    with mock.patch.object(module, name, side_effect=getattr(module, name)) as counted:
        trace(layers)
    return counted.call_count


@by_recipe
def test_equal_linears_of_different_names_are_traced_once(recipe, module):
    with jlp.autocast(recipe):
        assert traces(module, linears, 6) == traces(module, linears, 2) <= 3


def test_kernels_calls_are_not_functions_of_their_own():
    """XLA copies a function of the lowered program for each of its calls."""
    with jlp.autocast(RECIPES["nvfp4"]):
        text = linears(2).lower().as_text()
    assert text.count("custom_call @jaxlowprec_") > 4
    assert not re.search(r"call @op\b|call @op_", text)


def test_equal_layers_of_experts_are_traced_once():
    with jlp.autocast(jlp.NVFP4BlockScaling()):
        assert traces(product, experts, 6) == traces(product, experts, 2) <= 3


@pytest.mark.parametrize("shape", [(32, 32), (2, 16, 32)], ids=["matrix", "rows split"])
def test_a_call_asks_a_custom_recipe_once_about_each_tensor(shape):
    asked = []

    def factory(role):
        asked.append(role.tensor_type)
        return jlp.MXFP8()

    jlp.linear(jnp.ones(shape, jnp.bfloat16), jnp.ones((32, 32)), recipe=jlp.Custom(factory))
    assert sorted(asked) == ["grad_output", "input", "weight"]


def test_delayed_scaling_lowers_its_divisions_once():
    recipe = jlp.DelayedScaling(amax_history_len=16)

    def model(states, w, x):
        for i, state in enumerate(states):
            x, _ = jlp.linear(x, w, recipe=recipe, state=state, name=f"layer {i}")
        return x.astype(jnp.float32).sum()

    states = [jlp.delayed_scaling.init_state(recipe)] * 2
    arguments = states, jnp.ones((32, 32)), jnp.ones((32, 32), jnp.bfloat16)
    lowered = jax.jit(jax.grad(model, (0, 1))).lower(*arguments)
    assert lowered.as_text().count("\n") < 1500


def test_indices_of_random_bits_are_constants_on_one_device():
    """XLA runs each iota, on GPUs as a kernel; equal constants are one."""
    with jlp.autocast(RECIPES["nvfp4"]):
        text = linears(2).lower().compile().as_text()
    assert "stochastic = true" in text
    assert " iota(" not in text
