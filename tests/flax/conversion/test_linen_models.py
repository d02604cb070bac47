"""linen.convert: a module of Flax's layers computes as the same module of this library's, with its own parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxlowprec as jlp
from jaxlowprec.layers.delayed_scaling import OVERWRITE_WITH_GRADIENT
from tests.flax.libraries import numbers
from tests.helpers import assert_same_bytes, random_array

pytestmark = pytest.mark.sampled(5)

CLASSES = {kind: (getattr(nn, kind), getattr(jlp.linen, kind)) for kind in ("Dense", "DenseGeneral", "Einsum")}
LAYERS = {  # class, arguments, shape of the input
    "dense": ("Dense", {"features": 48}, (4, 8, 32)),
    "general": ("DenseGeneral", {"features": (4, 12), "dtype": jnp.bfloat16}, (4, 8, 32)),
    "general batched": ("DenseGeneral", {"features": 24, "axis": 2, "batch_dims": (0,)}, (3, 16, 32)),
    "einsum": ("Einsum", {"shape": (32, 4, 12), "einsum_str": "btd,dhk->bthk"}, (4, 8, 32)),
}
each_layer = pytest.mark.parametrize(("kind", "arguments", "shape"), LAYERS.values(), ids=LAYERS)

RECIPE = jlp.NVFP4BlockScaling()
DELAYED = jlp.DelayedScaling(amax_history_len=3)
RULES = jlp.PerLayer((("layers/up", jlp.MXFP8BlockScaling()), ("embed", None)), RECIPE)
X = random_array((2, 16, 32))


class Block(nn.Module):
    """A block whose layers are made where they are called; its state counts the calls."""

    dense: Any

    @nn.compact
    def __call__(self, x):
        calls = self.variable("count", "calls", lambda: jnp.zeros((), jnp.int32))
        if self.is_mutable_collection("count"):
            calls.value += 1
        hidden = jnp.tanh(nn.remat(self.dense)(48, name="up")(x))
        return self.dense(32, name="down")(hidden).astype(x.dtype), None


class Model(nn.Module):
    """Layers made in setup, scanned, rematerialised and jitted; the library's if `ours`."""

    ours: bool = False

    def setup(self):
        dense = jlp.linen.Dense if self.ours else nn.Dense
        axes, rngs = {"params": 0, "count": 0}, {"params": True}
        self.embed = dense(32)
        self.layers = nn.scan(nn.remat(Block), variable_axes=axes, split_rngs=rngs, length=3)(dense)
        self.out = nn.jit(dense)(16)

    def __call__(self, x):
        return self.out(self.layers(self.embed(x))[0])

    def embedded(self, x):
        return self.embed(x)


PATHS = {"embed", "layers/up", "layers/down", "out"}


class OwnDense(nn.Dense):
    """A user's."""


def variables_of(model, x=X):
    """Numbers of NumPy instead of the initialisers', as after `init`, which counts as the first call."""
    made = numbers(jax.eval_shape(model.init, jax.random.key(0), x))
    return jax.tree.map(lambda leaf: np.ones_like(leaf) if leaf.dtype == jnp.int32 else leaf, made)


def initialised(model, x=X):
    return jax.jit(model.init)(jax.random.key(0), x)


def applied(model, variables, x=X):
    return jax.jit(model.apply)(variables, x)


def step(model, variables):
    """The output, the gradients and the new state."""

    @jax.jit
    def call(variables):
        def loss(params):
            y, state = model.apply({**variables, "params": params}, X, mutable="count")
            return jnp.sum(y.astype(jnp.float32) ** 2), (y, state)

        return jax.grad(loss, has_aux=True)(variables["params"])

    return call(variables)


class TestModel:
    @pytest.mark.slow
    def test_variables_are_the_modules_own(self):
        expected, actual = (initialised(m) for m in (Model(), jlp.linen.convert(Model(), RULES)))
        assert_same_bytes(actual, expected)
        assert jax.tree.structure(actual) == jax.tree.structure(expected)

    @pytest.mark.slow
    @pytest.mark.parametrize("rules", [RECIPE, RULES], ids=["recipe", "rules"])
    def test_it_computes_as_with_the_librarys_layers(self, rules):
        variables = variables_of(Model())
        with jlp.autocast(rules):
            expected = step(Model(ours=True), variables)
        assert_same_bytes(step(jlp.linen.convert(Model(), rules), variables), expected)
        assert expected[1][1]["count"]["layers"]["calls"].tolist() == [2, 2, 2]  # init was the first

    def test_without_a_recipe_it_is_flaxs_bit_for_bit(self):
        variables = variables_of(Model())
        assert_same_bytes(step(jlp.linen.convert(Model()), variables), step(Model(), variables))

    @pytest.mark.slow
    def test_the_scopes_recipe_applies(self):
        variables, model = variables_of(Model()), jlp.linen.convert(Model())
        with jlp.autocast(RECIPE):
            y = applied(model, variables)
        assert_same_bytes(y, applied(jlp.linen.convert(Model(), RECIPE), variables))

    @pytest.mark.slow
    def test_what_nn_jit_traced_before_is_not_used(self):
        model = Model()
        variables = variables_of(model)
        plain = model.apply(variables, X)
        converted = jlp.linen.convert(model, jlp.PerLayer((("out", RECIPE),))).apply(variables, X)
        assert np.any(np.asarray(converted) != np.asarray(plain))  # only the layer in nn.jit differs
        assert_same_bytes(model.apply(variables, X), plain)

    def test_explain_names_each_layer_and_its_formats(self):
        model = jlp.linen.convert(Model(), RULES)
        formats = jlp.explain(model, jlp.FROM_CONTEXT, variables_of(Model()), X).formats
        assert {path: type(fmt) for path, fmt in formats.items()} == {
            "embed": type(None),
            "layers/up": jlp.MXFP8,
            "layers/down": jlp.NVFP4,
            "out": jlp.NVFP4,
        }

    def test_other_methods_and_bind(self):
        variables, model = variables_of(Model()), jlp.linen.convert(Model(), RECIPE)
        expected = Model(ours=True)
        with jlp.autocast(RECIPE):
            expected = expected.apply(variables, X, method="embedded")
        assert_same_bytes(model.apply(variables, X, method="embedded"), expected)
        assert_same_bytes(model.apply(variables, X, method=type(model).embedded), expected)
        assert_same_bytes(model.bind(variables).embedded(X), expected)

    def test_converted_alike_they_are_equal(self):
        assert jlp.linen.convert(Model(), RULES) == jlp.linen.convert(Model(), RULES)
        assert jlp.linen.convert(Model(), RULES) != jlp.linen.convert(Model(), RECIPE)
        assert jlp.linen.convert(Model(), None) == Model()

    def test_part_of_another_module(self):
        parts = nn.Sequential([jlp.linen.convert(Model(), RECIPE), nn.Dense(8)])
        formats = jlp.explain(parts, jlp.FROM_CONTEXT, variables_of(parts), X).formats
        assert {path for path, fmt in formats.items() if fmt} == {f"layers_0/{path}" for path in PATHS}

    def test_quantized_parameters_are_served(self):
        recipe = jlp.Int4QAT(group_size=16, exclude=("layers",))
        model = jlp.linen.convert(Model(), recipe)
        variables = variables_of(model)
        served = jlp.quantize_params(model, jlp.FROM_CONTEXT, variables, X)
        assert isinstance(served["params"]["out"]["kernel"], jlp.QuantizedArray)
        assert_same_bytes(applied(model, served), applied(model, variables))


@each_layer
def test_every_layer_computes_as_the_librarys(kind, arguments, shape):
    flax, ours = (nn.Sequential([layer(**arguments)]) for layer in CLASSES[kind])
    x = random_array(shape)
    variables = variables_of(flax, x)
    with jlp.autocast(RECIPE):
        expected = applied(ours, variables, x)
    assert_same_bytes(applied(jlp.linen.convert(flax, RECIPE), variables, x), expected)


def test_a_single_layer_becomes_the_librarys():
    assert jlp.linen.convert(nn.Dense(8, use_bias=False), RECIPE) == jlp.linen.Dense(8, use_bias=False, recipe=RECIPE)


def test_converting_again_gives_other_rules():
    mxfp8 = jlp.MXFP8BlockScaling()
    once = jlp.linen.convert(Model(), RECIPE)
    assert jlp.linen.convert(once, mxfp8) == jlp.linen.convert(Model(), mxfp8) != once
    assert jlp.linen.convert(once, RECIPE) == once
    assert jlp.linen.convert(once, None) == Model()


class TestDelayedScaling:
    @pytest.mark.slow
    def test_a_step_is_as_with_the_librarys_layers(self):
        x = X.astype(jnp.float32)
        variables, results = [], []
        for layer in (nn.Dense, jlp.linen.Dense):
            layers = nn.Sequential([layer(32), jnp.tanh, layer(16)])
            model = jlp.linen.convert(layers, DELAYED)
            variables.append(initialised(model, x))
            results.append(jax.jit(jax.grad(lambda v, model=model: model.apply(v, x).sum()))(variables[-1]))
        assert_same_bytes(variables[0], variables[1])
        assert results[0][OVERWRITE_WITH_GRADIENT]["layers_2"]["kernel_amax_history"][0] > 0
        assert_same_bytes(results[0], results[1])


class TestWhatIsLeft:
    def test_a_subclass_and_an_own_product_stay_and_are_named(self):
        def product(*args, **kwargs):
            return jax.lax.dot_general(*args, **kwargs)

        layers = [OwnDense(8), nn.Dense(8, dot_general=product), nn.remat(nn.Dense)(8)]
        model = jlp.linen.convert(nn.Sequential(layers), RECIPE)
        wanted = r"stay Flax's: 'layers_0' \(a OwnDense, a subclass\), 'layers_1' \(dot_general= is set\)$"
        with pytest.warns(UserWarning, match=wanted):
            variables = variables_of(model)
        formats = jlp.explain(model, jlp.FROM_CONTEXT, variables, X).formats
        assert [path for path, fmt in formats.items() if fmt] == ["layers_2"]

    @pytest.mark.parametrize("rules", [jlp.FROM_CONTEXT, jlp.Int4QAT(exclude=("layers_0",))], ids=["context", "rules"])
    def test_nothing_converted_warns(self, rules):
        layer = nn.LayerNorm() if rules is jlp.FROM_CONTEXT else nn.Dense(8)
        model = jlp.linen.convert(nn.Sequential([layer]), rules)
        with pytest.warns(UserWarning, match=r"linen.convert: (Sequential has called no|no layer followed Int4QAT)"):
            variables_of(model)

    def test_a_rule_that_matches_nothing_warns(self):
        model = jlp.linen.convert(Model(), jlp.PerLayer((("block_0/.*", None),), RECIPE))
        with pytest.warns(UserWarning, match="the rule 'block_0/.*' of PerLayer matches no layer.*'layers/down'"):
            variables_of(model)

    def test_layers_of_the_library_follow_the_rules_or_their_own(self):
        layers = [jlp.linen.Dense(32), jlp.linen.Dense(32, recipe=None)]
        model = jlp.linen.convert(nn.Sequential(layers), RECIPE)
        assert_same_bytes(initialised(model), initialised(nn.Sequential(layers)))
        formats = jlp.explain(model, jlp.FROM_CONTEXT, variables_of(model), X).formats
        assert [fmt is None for fmt in formats.values()] == [False, True]

    @pytest.mark.parametrize("module", [{}, nn.Dense, lambda x: x])
    def test_what_is_no_module_raises(self, module):
        with pytest.raises(TypeError, match=r"linen\.convert: module=.*; needs a Linen .*jaxlowprec\.nnx\.convert"):
            jlp.linen.convert(module)

    def test_a_bound_module_raises(self):
        with pytest.raises(ValueError, match="this Model is bound or inside another module; convert the whole model"):
            jlp.linen.convert(Model().bind({}))

    def test_what_is_no_recipe_raises(self):
        with pytest.raises(TypeError, match=r"linen\.convert: recipe='nvfp4'"):
            jlp.linen.convert(Model(), "nvfp4")


@pytest.mark.slow
def test_decoding_in_a_scan_carries_the_states():
    """`apply` returns what is mutable: with the collection among it, the carry keeps what `init` made."""
    x = random_array((16, 32))
    with jlp.autocast(jlp.DelayedScaling(amax_history_len=3)):
        model = jlp.linen.convert(nn.MultiHeadDotProductAttention(2, decode=True))
        variables = model.init(jax.random.key(0), x[None])
        params = variables["params"]
        carry = {name: value for name, value in variables.items() if name != "params"}

        def body(carry, x):
            y, carry = model.apply({"params": params, **carry}, x[None, None], mutable=list(carry))
            return carry, y

        last, y = jax.lax.scan(body, carry, x)
    assert y.shape == (16, 1, 1, 32) and last["cache"]["cache_index"] == 16
    assert_same_bytes(last[OVERWRITE_WITH_GRADIENT], variables[OVERWRITE_WITH_GRADIENT])
