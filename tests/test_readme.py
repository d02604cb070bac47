"""The programs of the README and the documents run as they stand."""

import pathlib
import re

import jax
import pytest

import jaxlowprec as jlp
from jaxlowprec.delayed_scaling import OVERWRITE_WITH_GRADIENT

ROOT = pathlib.Path(__file__).parents[1]


def programs(document):
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


PROGRAMS = programs("README.md")


@pytest.mark.parametrize("program", PROGRAMS, ids=["quantise-and-multiply", "train-a-flax-model"])
def test_a_program_of_the_readme_runs(program):
    names = {}
    exec(program, names)
    result = names["y"] if "y" in names else names["loss"]
    assert jax.numpy.isfinite(result).all()


def test_the_recipe_of_the_documents_answers_by_role():
    names = {}
    exec(programs("docs/recipes.md")[0], names)
    recipe = names["recipe"]
    assert recipe.roles("linear", "up").weight.format == jlp.MXFP4()
    assert recipe.roles("linear", "model/head").weight is None


def test_the_delayed_scaling_program_of_the_documents_records_and_quantises():
    names = {}
    exec(programs("docs/recipes.md")[1], names)
    history = getattr(names["model"], OVERWRITE_WITH_GRADIENT)["input_amax_history"][...]
    amax = abs(names["x"]).max()
    assert history[0] == history[-1] == amax and history.sum() == 2 * amax


def test_the_weight_that_int4_trains_is_the_one_it_serves():
    exec(programs("docs/int4.md")[0], {"jlp": jlp, "kernel": jax.random.normal(jax.random.key(0), (256, 64))})


def test_the_error_that_the_readme_computes_is_that_of_4_bits():
    names = {}
    exec(PROGRAMS[0], names)
    assert 0.05 < names["error"] < 0.15
    assert names["row"].shape == names["col"].shape == (1024, 4096)
