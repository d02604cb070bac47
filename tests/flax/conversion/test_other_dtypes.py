"""Operands of dtypes that no recipe has are computed by Flax, and a warning says so."""

import warnings

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.recipes import silence
from tests.helpers import random_array

RECIPE = jlp.Float8CurrentScaling(backward_override="dequantized")
X = np.asarray(random_array((4, 32), "float32")).astype("complex64")
LINEN = {"Dense": (16,), "DenseGeneral": ((4, 4),), "Einsum": ((32, 16), "td,dk->tk")}
NNX = {"Linear": (32, 16), "LinearGeneral": (32, (4, 4)), "Einsum": ("td,dk->tk", (32, 16))}


@pytest.fixture
def said():
    """The warnings of a test; those of earlier ones are said again."""
    before = set(silence._said)
    silence._said.clear()
    with jlp.autocast(RECIPE, strict=None), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found
    silence._said.update(before)


def the_warning(kind):
    takes = "recipes take bfloat16, float16, float32"
    return [f"{kind}: complex64 operands stay in high precision, as Flax has them; {takes}"]


@pytest.mark.parametrize(("kind", "arguments"), NNX.items(), ids=NNX)
def test_in_nnx(kind, arguments, said):
    flax, ours = (getattr(library, kind)(*arguments, rngs=nnx.Rngs(0)) for library in (nnx, jlp.nnx))
    for _ in range(2):
        np.testing.assert_array_equal(ours(X), flax(X))
    assert [str(w.message) for w in said] == the_warning(kind)


@pytest.mark.parametrize(("kind", "arguments"), LINEN.items(), ids=LINEN)
def test_in_linen(kind, arguments, said):
    flax, ours = (getattr(library, kind)(*arguments) for library in (nn, jlp.linen))
    variables = flax.init(jax.random.key(0), X)
    for _ in range(2):
        np.testing.assert_array_equal(ours.apply(variables, X), flax.apply(variables, X))
    assert [str(w.message) for w in said] == the_warning(kind)
