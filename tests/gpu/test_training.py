"""Twenty steps of the demo's model on a GPU follow the CPU's losses."""

import jax
import numpy as np
import pytest
from flax import nnx
from lm.data import Batches, read_text
from lm.model import SIZES, LanguageModel
from lm.training import Schedule, make_steps, optimizer, recipe_context

from tests.low_precision import recipes

RECIPES = recipes("bf16", "nvfp4", "mxfp8", "fp8_block", "fp8_current", "fp8_delayed")
STEPS = 20


def losses(device, recipe):
    config = SIZES["demo"]
    batches = Batches(read_text(None), 8, config.context, 0)
    with jax.default_device(device), recipe_context(recipe):
        graph, parameters = nnx.split(LanguageModel(config, nnx.Rngs(0)), nnx.Param)
        transformation = optimizer(Schedule(STEPS, 1e-3, 8, 0, STEPS))
        state, found = transformation.init(parameters), []
        step, _ = make_steps(graph, transformation)
        for i in range(STEPS):
            parameters, state, loss = step(parameters, state, batches.train(i))
            found.append(float(loss))
    return np.array(found)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_losses_follow_the_cpus(cpu, gpu, recipe):
    on_cpu, on_gpu = losses(cpu, recipe), losses(gpu, recipe)
    assert on_cpu[-1] < 0.8 * on_cpu[0]  # it learns
    assert abs(on_gpu[0] / on_cpu[0] - 1) < 2e-3  # same parameters, same batch
    np.testing.assert_allclose(on_gpu, on_cpu, rtol=0.02)
