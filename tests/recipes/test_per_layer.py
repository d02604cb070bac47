"""PerLayer: each layer has the bytes of the recipe that the first matching rule names."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.recipes.transformer_engine import Calibrating
from tests.helpers import assert_same_bytes, random_array

NVFP4, MXFP8 = jlp.NVFP4BlockScaling(), jlp.MXFP8BlockScaling()
RECIPE = jlp.PerLayer(((r"block_0/.*|head", None), (r".*/out", MXFP8)), default=NVFP4)
CHOSEN = {"block_0/up": None, "head": None, "block_1/out": MXFP8, "block_0/out": None, "block_1/up": NVFP4, "": NVFP4}
by_name = pytest.mark.parametrize(("name", "chosen"), CHOSEN.items(), ids=str)
X, W = random_array((32, 64)), random_array((64, 48), "float32", 1)


def gradients(function, *operands):
    y, vjp = jax.vjp(function, *operands)
    return y, *vjp(jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype))


class TestRules:
    @by_name
    def test_the_first_that_matches_the_whole_name_decides(self, name, chosen):
        assert RECIPE.at(name) == chosen
        assert RECIPE.applies_to(name) == (chosen is not None)

    def test_part_of_a_name_is_no_match(self):
        assert RECIPE.at("head_2") == RECIPE.at("my/head") == NVFP4

    def test_rules_within_rules(self):
        inner = jlp.PerLayer(((r".*/up", None),), default=MXFP8)
        recipe = jlp.PerLayer(((r"block_0/.*", inner),), default=NVFP4)
        assert [recipe.at(n) for n in ("block_0/up", "block_0/down", "block_1/up")] == [None, MXFP8, NVFP4]

    def test_exclusions_of_the_chosen_recipe_hold(self):
        recipe = jlp.PerLayer(((".*", jlp.Int4QAT(32, exclude=("out$",))),))
        assert recipe.at("out") is None and recipe.at("up") == recipe.rules[0][1]

    def test_equal_ones_are_equal_and_hashable(self):
        again = jlp.PerLayer([[r"block_0/.*|head", None], [r".*/out", MXFP8]], jlp.NVFP4BlockScaling())
        assert again == RECIPE and hash(again) == hash(RECIPE)
        assert again != jlp.PerLayer(RECIPE.rules[::-1], NVFP4)

    def test_it_prints_as_a_table(self):
        recipe = jlp.PerLayer((("a.*", None), ("b", jlp.NVFP4BlockScaling(disable_rht=True))), default=MXFP8)
        assert str(recipe).splitlines() == [
            "rule         recipe",
            "a.*          high precision",
            "b            NVFP4BlockScaling(disable_rht=True)",
            "all others   MXFP8BlockScaling",
        ]


class TestLayers:
    @by_name
    def test_a_linear_has_the_bytes_of_its_own_recipe(self, name, chosen):
        found = gradients(lambda x, w: jlp.linear(x, w, recipe=RECIPE, name=name), X, W)
        assert_same_bytes(found, gradients(lambda x, w: jlp.linear(x, w, recipe=chosen, name=name), X, W))

    @by_name
    def test_so_have_a_dot_general_and_rows_in_groups(self, name, chosen):
        dims, sizes = (((1,), (0,)), ((), ())), jnp.asarray([12, 20], jnp.int32)

        def results(recipe):
            with jlp.autocast(recipe, enabled=recipe is not None):
                y = jlp.dot_general(X, W.astype(X.dtype), dims, name=name)
                return y, jlp.grouped_matmul(X, jnp.stack([W, -W]), sizes, name=name)

        assert_same_bytes(results(RECIPE), results(chosen))

    def test_a_weight_that_was_quantised_before_fits_its_layer(self):
        quantized = jlp.quantize_kernel(W, RECIPE, name="block_1/out")
        assert quantized.columnwise.format == jlp.MXFP8()
        y = jlp.linear(X, W, recipe=RECIPE, name="block_1/out", quantized_kernel=quantized)
        assert_same_bytes(y, jlp.linear(X, W, recipe=MXFP8))
        with pytest.raises(ValueError, match="keeps the weight of layer 'head' in high precision"):
            jlp.quantize_kernel(W, RECIPE, name="head")

    def test_other_rules_retrace_and_the_first_are_cached(self):
        traced = []

        @jax.jit
        def layer(x, w):
            traced.append(None)
            return jlp.linear(x, w, name="block_1/up")

        results = []
        for recipe in (RECIPE, jlp.PerLayer(((".*", MXFP8),)), jlp.PerLayer(RECIPE.rules, NVFP4)):
            with jlp.autocast(recipe):
                results.append(layer(X, W))
        assert len(traced) == 2
        assert_same_bytes(results[0], results[2])


class Model(nn.Module):
    """Two blocks and a head; with `recipes`, each has a recipe of its own."""

    recipes: tuple = (jlp.FROM_CONTEXT,) * 3

    @nn.compact
    def __call__(self, x):
        for name, features, recipe in zip(
            ("block_0_up", "block_1_up", "head"), (64, 64, 32), self.recipes, strict=True
        ):
            x = jlp.linen.Dense(features, name=name, recipe=recipe)(x)
        return x


class TestModels:
    RULES = jlp.PerLayer(((r"block_0.*", MXFP8), (r"head", None)), default=NVFP4)

    def test_linen_layers_go_by_their_paths(self):
        variables = Model().init(jax.random.key(0), X)
        table = jlp.explain(Model(), self.RULES, variables, X)
        assert table.formats == {"block_0_up": jlp.MXFP8(), "block_1_up": jlp.NVFP4((16, 16)), "head": None}
        with jlp.autocast(self.RULES):
            y = Model().apply(variables, X)
        assert_same_bytes(y, Model((MXFP8, NVFP4, None)).apply(variables, X))

    def test_nnx_layers_go_by_the_names_they_were_given(self):
        model = nnx.Dict(
            block_0_up=jlp.nnx.Linear(64, 64, rngs=nnx.Rngs(0)), head=jlp.nnx.Linear(64, 32, rngs=nnx.Rngs(1))
        )
        notes = {layer.path: layer.note for layer in jlp.explain(model, self.RULES).layers}
        assert "nameless; by its path MXFP8BlockScaling" in notes["block_0_up"]
        assert "nameless; by its path left out" in notes["head"]
        jlp.nnx.name_layers(model)
        assert jlp.explain(model, self.RULES).formats == {"block_0_up": jlp.MXFP8(), "head": None}
        with jlp.autocast(self.RULES):
            found = model.block_0_up(X), model.head(X)
        with jlp.autocast(MXFP8):
            expected = model.block_0_up(X)
        assert_same_bytes(found, (expected, model.head(X)))

    def test_delayed_scaling_keeps_state_where_a_rule_has_it(self):
        rules = jlp.PerLayer(((r"head", jlp.DelayedScaling(amax_history_len=4)),), default=MXFP8)
        variables = Model().init(jax.random.key(0), X)
        with jlp.autocast(rules):
            stateful = Model().init(jax.random.key(0), X)
        (collection,) = set(stateful) - set(variables)
        assert set(stateful[collection]) == {"head"}

    def test_what_was_trained_by_a_rule_is_exported_by_it(self):
        rules = jlp.PerLayer(((r"block_.*", jlp.Int4QAT(group_size=32)),))
        variables = Model().init(jax.random.key(0), X)
        served = jlp.quantize_params(Model(), rules, variables, X)["params"]
        assert isinstance(served["block_0_up"]["kernel"], jlp.QuantizedArray)
        assert not isinstance(served["head"]["kernel"], jlp.QuantizedArray)
        with jlp.autocast(rules):
            trained = Model().apply(variables, X)
        assert_same_bytes(Model().apply({"params": served}, X), trained)


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ((".*",), TypeError, "PerLayer: rules='.*'; needs pairs"),
            ((((".*",),),), TypeError, "needs pairs"),
            ((((3, NVFP4),),), TypeError, "a rule begins with 3; needs a regular expression"),
            (((("(", NVFP4),),), ValueError, r"a rule has '\(', which is not a valid regular expression"),
            ((((".*", "nvfp4"),),), TypeError, "rule '.*' has 'nvfp4'; needs a recipe"),
            (((), jlp.NVFP4()), TypeError, "default has NVFP4.*; needs a recipe"),
            (((), Calibrating(jlp.DelayedScaling())), TypeError, "default has .*; needs a recipe"),
            (((("head", None),),), ValueError, "nothing would be quantised"),
            (
                ((("a", jlp.DelayedScaling(amax_history_len=3)),), jlp.DelayedScaling(amax_history_len=4)),
                ValueError,
                "2 rules have different DelayedScaling",
            ),
        ],
    )
    def test_wrong_rules_are_named(self, arguments, error, message):
        with pytest.raises(error, match=message):
            jlp.PerLayer(*arguments)
