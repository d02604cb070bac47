"""Steps of the demo's model on a GPU are the CPU's, to the rounding of products and sums."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from lm.data import Batches, read_text
from lm.model import SIZES, LanguageModel
from lm.training import Schedule, make_steps, optimizer, recipe_context

from tests.low_precision import recipes

RECIPES = recipes("bf16", "nvfp4", "mxfp8", "fp8_block", "fp8_current", "fp8_delayed")
STEPS = 16
MOMENT = optax.tree_utils.tree_get  # of an optimiser's state, by its name


def training(device, recipe):
    """Parameters, the optimiser's state and a step, on one device."""
    config = SIZES["demo"]
    with jax.default_device(device), recipe_context(recipe):
        graph, parameters = nnx.split(LanguageModel(config, nnx.Rngs(0)), nnx.Param)
        transformation = optimizer(Schedule(STEPS, 1e-3, 8, 0, STEPS))
        step, _ = make_steps(graph, transformation)
        return parameters, transformation.init(parameters), step


def one_step(device, recipe, step, parameters, state, batch):
    with jax.default_device(device), recipe_context(recipe):
        return jax.tree.map(np.asarray, step(*jax.device_put((parameters, state, batch), device)))


def size(tree):
    """The Euclidean norm of all leaves together."""
    return np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(tree)))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_each_step_is_the_cpus(cpu, gpu, recipe):
    """Every step from the CPU's own state: what differs is one step's rounding, and not where it led to."""
    batches = Batches(read_text(None), 8, SIZES["demo"].context, 0)
    parameters, state, on_cpu = training(cpu, recipe)
    on_gpu = training(gpu, recipe)[-1]
    losses = []
    for i in range(STEPS):
        given = (parameters, state, batches.train(i))
        found, found_state, loss = one_step(gpu, recipe, on_gpu, *given)
        parameters, state, expected = one_step(cpu, recipe, on_cpu, *given)
        np.testing.assert_allclose(loss, expected, rtol=1e-3)
        mine, other = (MOMENT(s, "mu") for s in (found_state, state))  # the gradients, the last the most
        assert size(jax.tree.map(np.subtract, mine, other)) < 0.1 * size(other)
        assert jax.tree.structure(found) == jax.tree.structure(parameters)
        losses.append(expected)
    assert losses[-1] < 0.8 * losses[0]  # it learns
