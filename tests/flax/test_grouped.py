"""The grouped linear of Linen and NNX: a linear for each expert, in one product."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec.layers.subscripts import KernelAxes
from tests.flax.libraries import weights_of
from tests.helpers import assert_same_bytes
from tests.moe.stack import RECIPES, each_recipe

pytestmark = pytest.mark.sampled(5)

EXPERTS, INPUTS, OUTPUTS, ROWS = 4, 64, 32, 48
SIZES = {  # of few lengths: each is a program of `linear`
    "all": (10, 17, 1, 20),
    "an empty one": (20, 0, 28, 0),
    "one takes all": (0, 0, 48, 0),
    "rows of nobody": (10, 1, 0, 17),
}
SIZES = {name: np.asarray(sizes, np.int32) for name, sizes in SIZES.items()}
X = np.random.default_rng(0).standard_normal((ROWS, INPUTS)).astype(jnp.bfloat16)
BF16 = {"dtype": jnp.bfloat16}


def made(library, **options):
    return library.model(library.maker("GroupedLinear", EXPERTS, INPUTS, OUTPUTS, **options), X, SIZES["all"])


def ran(model):
    """For each of SIZES: the output, and gradients of the tree and of x; in one program."""
    program = model.program(X, SIZES["all"]).compile()
    return {name: jax.device_get(program(model.tree, X, sizes)) for name, sizes in SIZES.items()}


@functools.partial(jax.jit, static_argnums=0)
def alone(recipe, x, w, dy):
    """One expert's rows through a linear: the output, and gradients of rows and kernel."""
    y, pullback = jax.vjp(lambda x, w: jlp.linear(x, w, recipe=recipe), x, w)
    return y, *pullback(dy)


@pytest.mark.slow
@each_recipe
def test_each_experts_rows_go_through_its_own_linear(library, recipe):
    if isinstance(recipe, jlp.NVFP4BlockScaling):
        recipe = jlp.NVFP4BlockScaling(disable_stochastic_rounding=True)  # whose bits are those of a batch of experts
    model = made(library, recipe=recipe, use_bias=False, **BF16)
    for name, (y, gradients, of_x) in ran(model).items():
        weights, start, kernels = weights_of(y), 0, np.asarray(model.tree["kernel"])
        for expert, size in enumerate(SIZES[name].tolist()):
            rows, start = slice(start, start + size), start + size
            if not size:
                assert not np.any(gradients["kernel"][expert])
                continue
            expected = jax.device_get(alone(recipe, X[rows], kernels[expert], weights[rows]))
            actual = y[rows], of_x[rows], gradients["kernel"][expert]
            if recipe is not None and recipe.roles().ste is None:
                assert_same_bytes(actual, expected)
                continue
            if recipe is not None:
                assert_same_bytes(actual[0], expected[0])
            for a, e in zip(actual, expected, strict=True):  # products in high precision add up in XLA's order
                np.testing.assert_allclose(np.float32(a), np.float32(e), atol=0.05, rtol=0.02)
        assert not np.any(y[start:]) and not np.any(of_x[start:])


@pytest.mark.slow
def test_each_expert_has_a_bias_with_a_float32_gradient(library):
    model, plain = made(library, **BF16), made(library, use_bias=False, **BF16)
    assert_same_bytes(model.tree["kernel"], plain.tree["kernel"])
    without = ran(plain)
    for name, (y, gradients, _) in ran(model).items():
        expert = np.repeat(np.arange(EXPERTS), SIZES[name])
        rows = len(expert)
        expected = np.float32(without[name][0][:rows]) + np.asarray(model.tree["bias"])[expert]
        np.testing.assert_allclose(np.float32(y[:rows]), expected, rtol=2**-7, atol=2**-6)
        wanted = np.zeros((EXPERTS, OUTPUTS))
        np.add.at(wanted, expert, np.asarray(weights_of(y)[:rows], np.float32))
        assert gradients["bias"].dtype == jnp.float32
        np.testing.assert_allclose(gradients["bias"], wanted, rtol=2**-8, atol=1e-5)  # rounded once, like a linear's
        assert not np.any(y[rows:])


def test_parameters_are_float32_masters_of_the_size_of_a_linears(library):
    make = library.maker("GroupedLinear", EXPERTS, INPUTS, OUTPUTS)
    tree = library.initial(make, X, SIZES["all"]).compile()(jax.random.key(0))
    assert {name: (leaf.shape, leaf.dtype.name) for name, leaf in tree.items()} == {
        "kernel": ((EXPERTS, INPUTS, OUTPUTS), "float32"),
        "bias": ((EXPERTS, OUTPUTS), "float32"),
    }
    deviation = np.asarray(tree["kernel"]).std(axis=(1, 2))
    np.testing.assert_allclose(deviation, INPUTS**-0.5, rtol=0.15)
    assert not jnp.any(tree["bias"])


@pytest.mark.parametrize(("dtype", "expected"), [(None, jnp.float32), (jnp.bfloat16, jnp.bfloat16)])
def test_the_result_has_the_dtype_asked_for_or_the_widest(library, dtype, expected):
    model = made(library, dtype=dtype)
    y, gradients, of_x = model.program(X, SIZES["all"]).out_info
    assert y.dtype == expected and of_x.dtype == X.dtype
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradients)} == {"float32"}


@pytest.mark.slow
def test_precision_is_that_of_the_product_in_high_precision(library):
    precise = made(library, dtype=jnp.float32, precision=jax.lax.Precision.HIGHEST)
    plain = made(library, dtype=jnp.float32)
    lowered = precise.program(X, SIZES["all"]).as_text()
    assert lowered.count("precision = [HIGHEST, HIGHEST]") == 3
    for a, e in zip(*map(jax.tree.leaves, (ran(precise), ran(plain))), strict=True):
        a, e = np.float32(a), np.float32(e)
        np.testing.assert_allclose(a, e, rtol=2**-7, atol=1e-5)
    with jlp.autocast(RECIPES["mxfp8"]):
        programs = [model.program(X, SIZES["all"]).as_text() for model in (precise, plain)]
    assert programs[0] == programs[1] != lowered


@pytest.mark.parametrize(
    ("x", "sizes", "message"),
    [
        (X[None], jnp.zeros(4, jnp.int32), r"x \(1, 48, 64\)"),
        (X, jnp.zeros(3, jnp.int32), r"group_sizes \(3,\): needs"),
    ],
)
def test_a_wrong_input_is_named(library, x, sizes, message):
    model = made(library)
    said = f"{type(model.module).__name__}: .*" if x.ndim == 3 else ""
    with pytest.raises(ValueError, match=said + message):
        model(x, sizes)


def test_a_recipe_that_is_none(library):
    said = type(made(library).module).__name__
    with pytest.raises(TypeError, match=f"{said}: recipe='nvfp4'"):
        made(library, recipe="nvfp4")


def test_they_are_explained_like_any_layer(library):
    make = library.maker("GroupedLinear", EXPERTS, INPUTS, INPUTS, use_bias=False)
    model = library.model(
        library.composed(lambda m, x, sizes: m.gate(m.experts(x, sizes), sizes), experts=make, gate=make),
        X,
        SIZES["all"],
    )
    found = model.explain(jlp.Int4QAT(group_size=32), X, SIZES["all"])
    assert found.formats == {"experts": jlp.Int4(32), "gate": None}
    assert {applied.kernel for applied in found.layers} == {(EXPERTS, INPUTS, INPUTS)}
    assert {applied.axes for applied in found.layers} == {KernelAxes.in_front(1, 1, 3)}
