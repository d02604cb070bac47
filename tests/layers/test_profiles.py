"""Operations are named in profiles: the layer, and which of its GEMMs or quantisations they belong to."""

import contextlib
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from tests.low_precision import recipes

pytestmark = pytest.mark.sampled(5)

QUANTISED = {"quantize input", "quantize weight", "fprop", "quantize gradient", "dgrad", "wgrad"}
WEIGHT_ONLY = {"quantize weight", "fprop", "dgrad", "wgrad"}
RECIPES = recipes("nvfp4", "mxfp8", "fp8_current", "int4_qat")
PARTS = (QUANTISED, QUANTISED, QUANTISED, WEIGHT_ONLY)
by_recipe = pytest.mark.parametrize(("recipe", "parts"), list(zip(RECIPES.values(), PARTS, strict=True)), ids=RECIPES)


@pytest.fixture(autouse=True)
def names_are_part_of_the_key():
    """A compilation cache would answer with the same program under the names that it was first compiled with."""
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)


def loss(y):
    return jnp.square(y.astype(jnp.float32)).sum()  # a gradient that is not a constant, which XLA would fold


def two_layers(x, first, second):
    x = jlp.linear(x, first, name="up")
    return loss(jlp.linear(x, second, name="down"))


def experts(x, first, second):
    sizes = jnp.array([16, 48])
    kernels = jnp.stack([first, first]), jnp.stack([second, second])
    x = jlp.grouped_matmul(x, kernels[0], sizes, name="up")
    return loss(jlp.grouped_matmul(x, kernels[1], sizes, name="down"))


def operands():
    x, first, second = (np.random.default_rng(i).normal(size=s) for i, s in enumerate(((64, 64), (64, 96), (96, 32))))
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(first, jnp.float32), jnp.asarray(second, jnp.float32)


def lowered(model, recipe):
    with jlp.autocast(recipe, enabled=recipe is not None):
        return jax.jit(jax.value_and_grad(model, (0, 1, 2))).lower(*operands())


def parts_of(compiled, layer):
    """Which parts of a layer operations of a compiled program belong to; a transposed scope ends with brackets."""
    names = re.findall(r'op_name="([^"]*)"', compiled.as_text())
    of_layer = [re.split(rf"(?:^|[/(]){layer}\)*/", name)[1:] for name in names]
    return {part for rest in of_layer for part in QUANTISED if part in "/".join(rest).split("/")}


@by_recipe
@pytest.mark.parametrize("model", [two_layers, experts])
def test_a_profile_says_layer_and_gemm(model, recipe, parts):
    compiled = lowered(model, recipe).compile()
    assert parts_of(compiled, "up") == parts_of(compiled, "down") == parts


@pytest.mark.parametrize("recipe", [jlp.NVFP4BlockScaling(), jlp.MXFP8BlockScaling()], ids=["nvfp4", "mxfp8"])
def test_the_part_follows_the_layer_forwards_and_backwards(recipe):
    text = lowered(two_layers, recipe).compile().as_text()
    for layer in ("up", "down"):
        for part in QUANTISED:
            op = "quantize" if part.startswith("quantize") else "scaled_matmul"
            assert re.search(rf"[/(]{layer}\)*/jit\(_matmul\)/{part}/[^\"]*/jaxlowprec_{op}/", text)


@pytest.mark.parametrize("model", [two_layers, experts])
def test_without_a_recipe_the_layer_is_named(model):
    text = lowered(model, None).compile().as_text()
    assert "jvp(up)" in text
    assert "jvp(down)" in text


@by_recipe
def test_a_weight_quantised_for_many_calls_is_named(recipe, parts):
    with jlp.autocast(recipe):
        text = jax.jit(lambda w: jlp.quantize_kernel(w, name="up")).lower(operands()[1]).compile().as_text()
    assert "/up/quantize weight/" in text


@by_recipe
@pytest.mark.parametrize("model", [two_layers, experts])
def test_names_change_nothing_but_metadata(model, recipe, parts):
    with_names = lowered(model, recipe)
    jax.clear_caches()
    with mock.patch.object(jax, "named_scope", lambda name: contextlib.nullcontext()):
        without = lowered(model, recipe)
    jax.clear_caches()
    assert with_names.as_text() == without.as_text()
    assert "fprop" in with_names.as_text(debug_info=True)
    assert "fprop" not in without.as_text(debug_info=True)
