"""Models of Linen and NNX in quantisation-aware training, what explain says of them, and their 4-bit export."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxlowprec as jlp
from tests.flax.libraries import LIBRARIES
from tests.helpers import assert_same_bytes, often, random_array

pytestmark = pytest.mark.sampled(5)

RECIPE = jlp.Int4QAT(group_size=16)
FORMAT = jlp.Int4(16)
RECIPES = {
    "int4": RECIPE,
    "int4 asymmetric": jlp.Int4QAT(16, symmetric=False),
    "nvfp4": jlp.WeightQAT(jlp.NVFP4()),
    "mxfp4": jlp.WeightQAT(jlp.MXFP4()),
}
BF16 = {"dtype": jnp.bfloat16}
# class, positional and keyword arguments, shape of the input, of the exported kernel
LAYERS = {
    "linear": ("Linear", (32, 48), {}, (4, 8, 32), (32, 48)),
    "linear bf16": ("Linear", (32, 48), BF16 | {"use_bias": False}, (16, 32), (32, 48)),
    "general": ("LinearGeneral", (32, (4, 12)), BF16, (4, 8, 32), (32, 48)),
    "general two axes": ("LinearGeneral", ((4, 12), 32), {"axis": (-2, -1)}, (4, 8, 4, 12), (48, 32)),
    "general batched": ("LinearGeneral", (32, 24), {"axis": 2, "batch_axis": {0: 3}}, (3, 16, 32), (3, 32, 24)),
    "einsum": ("Einsum", ("btd,df->btf", (32, 24)), {}, (4, 8, 32), (32, 24)),
    "einsum experts": ("Einsum", ("etd,edf->etf", (3, 32, 24)), {}, (3, 8, 32), (3, 32, 24)),
}
OF_NNX = {
    "linear float32 result": ("Linear", (32, 48), {"preferred_element_type": "float32"}, (16, 32), (32, 48)),
    "einsum any batch": ("Einsum", ("...d,df->...f", (32, 24)), {}, (4, 8, 32), (32, 24)),
}
ALL = LAYERS | OF_NNX
CASES = [("linen", name) for name in LAYERS] + [("nnx", name) for name in ALL]
# Often: every layer in each library, every recipe with each dtype in each library.
OFTEN = [
    *((*case, "int4", ("bfloat16", "float32")[i % 2]) for i, case in enumerate(CASES)),
    *itertools.product(LIBRARIES, ["general"], RECIPES, ["bfloat16", "float32"]),
]


@pytest.mark.parametrize(
    ("library", "name", "recipe", "dtype"),
    often(OFTEN, [(*case, *rest) for case in CASES for rest in itertools.product(RECIPES, ["bfloat16", "float32"])], 4),
)
def test_the_export_serves_the_bits_that_were_trained(library, name, recipe, dtype):
    (kind, args, options, shape, exported), library, recipe = ALL[name], LIBRARIES[library], RECIPES[recipe]
    x = random_array(shape, dtype)
    model = library.model(library.maker(kind, *args, **options), x)
    served = model.served(recipe, x)
    kernel = served.kernel()
    assert (kernel.shape, kernel.axis, kernel.format) == (exported, -2, recipe.weight_format)

    def call(model):
        return jax.jit(model.apply)(model.tree, x)

    with jlp.autocast(recipe):
        trained = call(model)
        assert_same_bytes(call(served), trained)
        if name == "general":  # what is compiled does not matter
            assert_same_bytes((model(x), served(x)), (trained, trained))
    assert_same_bytes(call(served), trained)
    assert np.any(np.asarray(call(model)) != np.asarray(trained))


def whole(library):
    """A layer of each kind, some of them left out in each way there is."""

    def call(model, x):
        x = x + model.out(model.qkv(x))
        x = x + model.up(x)
        x = x * jax.nn.sigmoid(model.router(x))
        x = x + model.own(x)
        x = x + model.nvfp4(x)
        return model.lm_head(x + model.flax(x))

    make = library.maker
    return library.composed(
        call,
        qkv=make("LinearGeneral", 32, (4, 16), **BF16),
        out=make("LinearGeneral", (4, 16), 32, axis=(-2, -1), **BF16),
        up=make("Linear", 32, 32, **BF16),
        router=make("Linear", 32, 32, **BF16),
        own=make("Linear", 32, 32, recipe=None, **BF16),
        nvfp4=make("Linear", 32, 32, recipe=jlp.WeightQAT(jlp.NVFP4()), **BF16),
        flax=make("Linear", 32, 32, of=library.flax, **BF16),
        lm_head=make("Linear", 32, 8, **BF16),
    )


X = random_array((2, 8, 32))
CHOSEN = {"qkv": FORMAT, "out": FORMAT, "up": FORMAT, "nvfp4": jlp.NVFP4()}


@pytest.fixture(scope="module")
def model(library):
    return library.model(whole(library), X)


@pytest.fixture(scope="module")
def trained(model):
    """The model's output under the recipe."""
    with jlp.autocast(RECIPE):
        return jax.jit(model.apply)(model.tree, X)


def notes(explanation):
    return {layer.path: layer.note for layer in explanation.layers}


class TestModel:
    def test_the_export_has_exactly_the_chosen_kernels(self, model):
        served = model.served(RECIPE, X)
        kernels = {name: served.kernel(name) for name in model.tree}
        formats = {name: k.format for name, k in kernels.items() if isinstance(k, jlp.QuantizedArray)}
        assert formats == CHOSEN
        for name, layer in model.tree.items():
            assert_same_bytes(served.tree[name].get("bias"), layer["bias"])
            if name not in CHOSEN:
                assert_same_bytes(kernels[name], layer["kernel"])

    def test_its_logits_are_those_of_training(self, model, trained):
        served = model.served(RECIPE, X)
        with jlp.autocast(RECIPE):
            assert_same_bytes(jax.jit(served.apply)(served.tree, X), trained)
        assert_same_bytes(jax.jit(served.apply)(served.tree, X), trained)

    def test_explain_is_a_table_of_what_applies(self, model, library):
        header, *lines = [
            "layer    kernel   weight      input  gradient",
            "qkv      32x4x16  Int4 1x16   -      -",
            "out      4x16x32  Int4 1x16   -      -",
            "up       32x32    Int4 1x16   -      -",
            "router   32x32    -           -      -         left out by the recipe",
            "own      32x32    -           -      -         no recipe",
            "nvfp4    32x32    NVFP4 1x16  -      -",
            "flax     32x32    -           -      -         no jaxlowprec layer",
            "lm_head  32x8     -           -      -         left out by the recipe",
        ]
        explanation = model.explain(RECIPE, X)
        lines = lines if library.name == "linen" else sorted(lines)  # as they are called, or by name
        assert str(explanation).splitlines() == [header, *lines]
        assert explanation.formats == dict.fromkeys(model.tree) | CHOSEN
        with jlp.autocast(RECIPE):
            assert model.explain(jlp.FROM_CONTEXT, X) == explanation

    def test_explain_says_what_is_loaded(self, model):
        explanation = model.served(RECIPE, X).explain(None, X)
        layers = {layer.path: layer for layer in explanation.layers}
        assert {path for path, layer in layers.items() if layer.note == "loaded"} == set(CHOSEN)
        assert layers["qkv"].roles.weight.format == FORMAT and layers["qkv"].kernel == (32, 64)
        (row,) = (line.split() for line in str(explanation).splitlines() if line.startswith("qkv"))
        assert row == ["qkv", "32x64", *str(FORMAT).split(), "-", "-", "loaded"]

    def test_explain_shows_other_recipes_too(self, model):
        recipe = jlp.MXFP8BlockScaling()
        (up,) = (layer for layer in model.explain(recipe, X).layers if layer.path == "up")
        assert up.roles == recipe.roles()

    def test_explain_notes_a_kernel_that_does_not_divide(self, model):
        found = notes(model.explain(jlp.Int4QAT(64), X))
        assert "K = 32, which is not a multiple of the group of 64" in found["up"]
        assert found["out"] == ""
        with pytest.raises(ValueError, match="quantize_params: layer '.*' .* not a multiple of the group of 64"):
            model.served(jlp.Int4QAT(64), X)

    def test_a_step_lowers_the_loss_and_keeps_types(self, model):
        target = random_array((2, 8, 8), "float32", 5)
        with jlp.autocast(RECIPE):
            tree, losses = model.trained(optax.adam(3e-3), X, target, steps=8)
        assert losses[-1] < 0.95 * losses[0]
        assert jax.tree.map(lambda p: p.dtype, tree) == jax.tree.map(lambda p: p.dtype, model.tree)

    def test_kernels_are_quantised_once_for_many_calls(self, model, trained):
        with jlp.autocast(RECIPE):
            once = model.quantized_once(X)
            assert_same_bytes(jax.jit(once.apply)(once.tree, X), trained)
            served = model.served(RECIPE, X).quantized_once(X)
            assert_same_bytes(jax.jit(served.apply)(served.tree, X), trained)

    def test_a_stack_is_exported_whole(self, library):
        block = library.composed(lambda m, x: x + m.up(x), up=library.maker("Linear", 32, 32, **BF16))
        model = library.model(library.stack(block, 3), X)
        served = model.served(RECIPE, X)
        assert served.kernel("blocks", "up").shape == (3, 32, 32)
        with jlp.autocast(RECIPE):
            trained = jax.jit(model.apply)(model.tree, X)
        assert_same_bytes(jax.jit(served.apply)(served.tree, X), trained)


class TestErrors:
    x = jnp.ones((8, 32))

    def layer(self, library, kind="Linear", args=(32, 16), **options):
        return library.model(library.maker(kind, *args, **options), self.x)

    def test_nothing_to_export(self, library):
        for recipe in (None, jlp.MXFP8BlockScaling(), jlp.Int4QAT(16, exclude=("",))):
            with pytest.raises(ValueError, match="no layer follows a recipe of quantisation-aware training"):
                self.layer(library).served(recipe, self.x)

    def test_a_dot_general_would_not_be_used(self, library):
        layer = self.layer(library, dot_general=jlp.dot_general)
        with pytest.raises(ValueError, match="no layer follows a recipe of quantisation-aware training"):
            layer.served(RECIPE, self.x)
        served = self.layer(library).served(RECIPE, self.x).changed(dot_general=jlp.dot_general)
        said = f"{type(layer.module).__name__}: dot_general= is set, so the quantised kernel would be ignored"
        with pytest.raises(ValueError, match=said):
            served(self.x)

    def test_a_recipe_that_wants_another_format(self, library):
        served = self.layer(library).served(RECIPE, self.x)
        with (
            jlp.autocast(jlp.MXFP8BlockScaling()),
            pytest.raises(ValueError, match="kernel in Int4 1x16, but the recipe"),
        ):
            served(self.x)

    @pytest.mark.parametrize("function", [jlp.explain, jlp.quantize_params])
    def test_no_model(self, function):
        with pytest.raises(TypeError, match="model is a dict; needs a Flax Linen or NNX module"):
            function({"params": {}}, RECIPE)
