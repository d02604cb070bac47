"""The README's programs run as they stand."""

import pathlib
import re

import jax
import pytest

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS, ids=["quantise-and-multiply", "train-a-flax-model"])
def test_a_program_of_the_readme_runs(program):
    names = {}
    exec(program, names)
    result = names["y"] if "y" in names else names["loss"]
    assert jax.numpy.isfinite(result).all()


def test_the_error_that_the_readme_computes_is_that_of_4_bits():
    names = {}
    exec(PROGRAMS[0], names)
    assert 0.05 < names["error"] < 0.15
    assert names["row"].shape == names["col"].shape == (1024, 4096)
