"""The grouped linear of NNX: a linear for each expert, in one product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes
from tests.moe.stack import RECIPES, each_recipe

EXPERTS, INPUTS, OUTPUTS, ROWS = 4, 64, 32, 48
SIZES = {
    "all": (10, 17, 1, 20),
    "an empty one": (20, 0, 28, 0),
    "one takes all": (0, 0, 48, 0),
    "rows of nobody": (5, 3, 0, 20),
}
each_size = pytest.mark.parametrize("sizes", [jnp.asarray(s, jnp.int32) for s in SIZES.values()], ids=SIZES)
X = jax.random.normal(jax.random.key(0), (ROWS, INPUTS), jnp.bfloat16)


def layer(**options):
    options = {"dtype": jnp.bfloat16, "bias_init": nnx.initializers.normal(1.0)} | options
    return jlp.nnx.GroupedLinear(EXPERTS, INPUTS, OUTPUTS, rngs=nnx.Rngs(0), **options)


def run(module, x, sizes):
    """The output, and gradients of the parameters and of x."""
    graph, parameters, rest = nnx.split(module, nnx.Param, ...)

    @jax.jit
    def call(parameters, x):
        y, pullback = jax.vjp(lambda p, x: nnx.merge(graph, p, rest)(x, sizes), parameters, x)
        return y, *pullback(jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype))

    return call(parameters, x)


@each_recipe
@each_size
def test_each_experts_rows_go_through_its_own_linear(recipe, sizes):
    if isinstance(recipe, jlp.NVFP4BlockScaling):
        recipe = jlp.NVFP4BlockScaling(disable_stochastic_rounding=True)  # whose bits are those of a batch of experts
    module = layer(recipe=recipe, use_bias=False)
    y, of_parameters, of_x = run(module, X, sizes)
    weights, start = jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype), 0
    for expert, size in enumerate(sizes.tolist()):
        rows, start = slice(start, start + size), start + size
        kernel = module.kernel[...][expert]
        if not size:
            assert not jnp.any(of_parameters["kernel"][...][expert])
            continue

        @jax.jit
        def alone(x, w, dy):
            y, pullback = jax.vjp(lambda x, w: jlp.linear(x, w, recipe=recipe), x, w)
            return y, *pullback(dy)

        expected = alone(X[rows], kernel, weights[rows])
        actual = y[rows], of_x[rows], of_parameters["kernel"][...][expert]
        if recipe is not None and recipe.roles().ste is None:
            assert_same_bytes(actual, expected)
            continue
        if recipe is not None:
            assert_same_bytes(actual[0], expected[0])
        for a, e in zip(actual, expected, strict=True):  # products in high precision add up in XLA's order
            np.testing.assert_allclose(a.astype(jnp.float32), e.astype(jnp.float32), atol=0.05, rtol=0.02)
    assert not jnp.any(y[start:]) and not jnp.any(of_x[start:])


@each_size
def test_each_expert_has_a_bias_with_a_float32_gradient(sizes):
    module = layer()
    y, of_parameters, _ = run(module, X, sizes)
    without, *_ = run(layer(use_bias=False), X, sizes)
    expert = np.repeat(np.arange(EXPERTS), sizes)
    bias = np.asarray(module.bias[...])[expert]
    total = int(sizes.sum())
    expected = without[:total].astype(jnp.float32) + bias
    np.testing.assert_allclose(y[:total].astype(jnp.float32), expected, rtol=2**-7, atol=2**-6)
    weights = np.asarray(jnp.cos(jnp.arange(y.size)).astype(jnp.bfloat16).astype(jnp.float32)).reshape(y.shape)
    wanted = np.zeros((EXPERTS, OUTPUTS))
    np.add.at(wanted, expert, weights[:total])
    np.testing.assert_allclose(
        of_parameters["bias"][...], wanted, rtol=2**-8, atol=1e-5
    )  # rounded once, like a linear's
    assert not jnp.any(y[total:])


def test_parameters_are_float32_masters_of_the_size_of_a_linears():
    state = nnx.to_pure_dict(nnx.state(layer(bias_init=nnx.initializers.zeros), nnx.Param))
    assert {name: (leaf.shape, leaf.dtype.name) for name, leaf in state.items()} == {
        "kernel": ((EXPERTS, INPUTS, OUTPUTS), "float32"),
        "bias": ((EXPERTS, OUTPUTS), "float32"),
    }
    deviation = np.asarray(state["kernel"]).std(axis=(1, 2))
    np.testing.assert_allclose(deviation, INPUTS**-0.5, rtol=0.15)


def test_metadata_says_where_parameters_lie():
    axes = ("experts", "embed", None)
    module = layer(kernel_init=nnx.with_partitioning(nnx.initializers.lecun_normal(), axes, eager_sharding=False))
    assert module.kernel.get_metadata("out_sharding") == axes
    module = layer(kernel_metadata={"out_sharding": axes, "eager_sharding": False})
    assert module.kernel.get_metadata("out_sharding") == axes


@pytest.mark.parametrize(("dtype", "expected"), [(None, jnp.float32), (jnp.bfloat16, jnp.bfloat16)])
def test_the_result_has_the_dtype_asked_for_or_the_widest(dtype, expected):
    y, parameters, of_x = run(layer(dtype=dtype), X, jnp.asarray(SIZES["all"], jnp.int32))
    assert y.dtype == expected and of_x.dtype == X.dtype
    assert {leaf.dtype.name for leaf in jax.tree.leaves(parameters)} == {"float32"}


@each_size
def test_precision_is_that_of_the_product_in_high_precision(sizes):
    precise = layer(dtype=jnp.float32, precision=jax.lax.Precision.HIGHEST)
    lowered = jax.jit(lambda m, x: run(nnx.merge(*m), x, sizes)).lower(nnx.split(precise), X).as_text()
    assert lowered.count("precision = [HIGHEST, HIGHEST]") == 3
    plain, found = (jax.tree.leaves(run(m, X, sizes)) for m in (layer(dtype=jnp.float32), precise))
    for a, e in zip(found, plain, strict=True):
        a, e = (v.astype(jnp.float32) for v in (a, e))
        np.testing.assert_allclose(a, e, rtol=2**-7, atol=1e-5)
    with jlp.autocast(RECIPES["mxfp8"]):
        assert_same_bytes(run(precise, X, sizes), run(layer(dtype=jnp.float32), X, sizes))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: layer(recipe="nvfp4"), TypeError, "GroupedLinear: recipe='nvfp4'"),
        (lambda: layer()(X[None], jnp.zeros(4, jnp.int32)), ValueError, r"GroupedLinear: x \(1, 48, 64\)"),
        (lambda: layer()(X, jnp.zeros(3, jnp.int32)), ValueError, r"group_sizes \(3,\): needs"),
        (lambda: layer()(X[:, :8], jnp.zeros(4, jnp.int32)), ValueError, r"x \(48, 8\)"),
    ],
)
def test_a_wrong_argument_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_it_is_named_and_explained_like_any_layer():
    model = nnx.Dict(experts=nnx.Dict(up_proj=layer(use_bias=False)), gate=layer(use_bias=False))
    jlp.nnx.name_layers(model)
    assert model.experts.up_proj.name == "experts/up_proj"
    found = jlp.explain(model, jlp.Int4QAT(group_size=32))
    assert found.formats == {"experts/up_proj": jlp.Int4(32), "gate": None}
    assert {applied.kernel for applied in found.layers} == {(EXPERTS, INPUTS, OUTPUTS)}
    assert {applied.axes for applied in found.layers} == {(1, 1)}
