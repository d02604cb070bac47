"""examples/pipeline.py: stages on devices of their own against the same stages one after the other."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pipeline
import pytest

import jaxlowprec as jlp
from tests.helpers import often
from tests.sharding.meshes import collectives

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"

PLAIN = jlp.NVFP4BlockScaling(disable_stochastic_rounding=True)  # without a key, random bits follow the amax
RECIPES = [None, jlp.MXFP8BlockScaling(), jlp.Float8CurrentScaling(), PLAIN]
# Without optimisations a multiplication and an addition are rounded once here and twice there: other codes of FP8.
AS_USERS = {"xla_backend_optimization_level": 3}


def problem(stages, count=6, width=32):
    x = jax.random.normal(jax.random.key(1), (count, 32, width))
    return pipeline.initial_parameters(stages, width), x, jnp.roll(x, 1, axis=-1)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", often([PLAIN], RECIPES), ids=lambda r: type(r).__name__)
@pytest.mark.parametrize(("stages", "count"), often([(4, 6)], [(4, 6), (2, 1)], 2))
def test_losses_and_gradients_are_those_of_the_sequential_model(recipe, stages, count):
    """A weight's gradient sums microbatches in another order: float32's rounding."""
    parameters, x, target = problem(stages, count)
    mesh = pipeline.pipeline_mesh(stages)

    def step(loss, *more):
        run = jax.value_and_grad(lambda p: loss(p, x, target, recipe, *more))
        return jax.jit(run, compiler_options=AS_USERS)(parameters)

    expected, actual = step(pipeline.sequential_loss), step(pipeline.pipelined_loss, mesh)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=4e-6 * np.abs(e).max())


def test_stages_talk_by_permutations_alone_and_once_at_the_end():
    parameters, x, target = problem(4)
    mesh = pipeline.pipeline_mesh(4)
    compiled = jax.jit(lambda p: pipeline.pipelined_loss(p, x, target, RECIPES[1], mesh)).lower(parameters).compile()
    assert sorted({kind for kind, _ in collectives(compiled)}) == ["all-reduce", "collective-permute"]


def test_a_stage_too_many_is_named():
    parameters, x, target = problem(4)
    with pytest.raises(ValueError, match="4 stages on 2 devices"):
        pipeline.pipelined_loss(parameters, x, target, None, pipeline.pipeline_mesh(2))


@pytest.mark.slow
def test_as_a_user_runs_it(program):
    said = program(pipeline.main, "--stages", "2", "--microbatches", "4", "--steps", "3")
    first, second = (np.array(re.findall(r"\d\.\d+", line), float) for line in said.splitlines())
    assert len(first) == 3 and (np.diff(first) < 0).all()
    np.testing.assert_allclose(second, first, rtol=1e-3)
