"""NNX models in quantisation-aware training, what explain says of them, and their 4-bit export."""

import importlib
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, random_array

RECIPE = jlp.Int4QAT(group_size=16)
FORMAT = jlp.Int4(16)
RECIPES = (RECIPE, jlp.Int4QAT(16, symmetric=False), jlp.WeightQAT(jlp.NVFP4()), jlp.WeightQAT(jlp.MXFP4()))
# class, arguments, shape of the input, of the exported kernel
LAYERS = {
    "linear": ("Linear", (32, 48), {}, (4, 8, 32), (32, 48)),
    "linear bf16": ("Linear", (32, 48), {"dtype": "bfloat16", "use_bias": False}, (16, 32), (32, 48)),
    "linear float32 result": ("Linear", (32, 48), {"preferred_element_type": "float32"}, (16, 32), (32, 48)),
    "general": ("LinearGeneral", (32, (4, 12)), {"dtype": "bfloat16"}, (4, 8, 32), (32, 48)),
    "general two axes": ("LinearGeneral", ((4, 12), 32), {"axis": (-2, -1)}, (4, 8, 4, 12), (48, 32)),
    "general batched": ("LinearGeneral", (32, 24), {"axis": 2, "batch_axis": {0: 3}}, (3, 16, 32), (3, 32, 24)),
    "einsum": ("Einsum", ("btd,df->btf", (32, 24)), {}, (4, 8, 32), (32, 24)),
    "einsum any batch": ("Einsum", ("...d,df->...f", (32, 24)), {}, (4, 8, 32), (32, 24)),
    "einsum experts": ("Einsum", ("etd,edf->etf", (3, 32, 24)), {}, (3, 8, 32), (3, 32, 24)),
}


class Model(nnx.Module):
    """A layer of each kind, some of them left out in each way there is."""

    def __init__(self, rngs):
        make = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.blocks = nnx.List([nnx.Dict(up=jlp.nnx.Linear(32, 32, **make)) for _ in range(2)])
        self.router = jlp.nnx.Linear(32, 32, **make)
        self.named = jlp.nnx.Linear(32, 32, name="expert_gate", **make)
        self.own = jlp.nnx.Linear(32, 32, recipe=None, **make)
        self.nvfp4 = jlp.nnx.Linear(32, 32, recipe=jlp.WeightQAT(jlp.NVFP4()), **make)
        self.flax = nnx.Linear(32, 32, **make)

    def __call__(self, x):
        for block in self.blocks:
            x = x + block["up"](x)
        x = x * jax.nn.sigmoid(self.router(x)) + self.named(x)
        return self.flax(x + self.own(x) + self.nvfp4(x))


@nnx.jit
def call(model, x):
    return model(x)


@pytest.fixture
def model():
    model = Model(nnx.Rngs(0))
    jlp.nnx.name_layers(model)
    return model


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: str(r.weight_format))
@pytest.mark.parametrize(("kind", "args", "options", "shape", "exported"), LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_export_serves_the_bits_that_were_trained(kind, args, options, shape, exported, recipe, dtype):
    x = random_array(shape, dtype)
    layer = getattr(jlp.nnx, kind)(*args, **options, rngs=nnx.Rngs(0))
    master = layer.kernel[...]
    served = jlp.quantize_params(layer, recipe)
    kernel = served.kernel.get_value()
    assert (kernel.shape, kernel.axis, kernel.format) == (exported, -2, recipe.weight_format)
    assert layer.kernel[...] is master
    with jlp.autocast(recipe):
        trained = layer(x)
        assert_same_bytes(call(layer, x), trained)
        assert_same_bytes(served(x), trained)
    assert_same_bytes(served(x), trained)
    assert_same_bytes(call(served, x), trained)
    assert jnp.any(layer(x) != trained)


class TestModel:
    x = random_array((8, 32))
    chosen = ("blocks/0/up", "blocks/1/up")

    def test_the_export_has_exactly_the_chosen_kernels(self, model):
        served = jlp.quantize_params(model, RECIPE)
        quantized = {
            "/".join(map(str, path)): variable.get_value().format
            for path, variable in nnx.to_flat_state(nnx.state(served, jlp.nnx.Quantized))
        }
        expected = dict.fromkeys(self.chosen, FORMAT) | {"nvfp4": jlp.NVFP4()}
        assert quantized == {f"{path}/kernel": fmt for path, fmt in expected.items()}
        before, after = (nnx.to_pure_dict(nnx.state(m, nnx.Param)) for m in (model, served))
        for name in ("router", "named", "own", "flax"):
            assert_same_bytes(after[name], before[name])

    def test_its_logits_are_those_of_training(self, model):
        served = jlp.quantize_params(model, RECIPE)
        with jlp.autocast(RECIPE):
            trained = call(model, self.x)
            assert_same_bytes(call(served, self.x), trained)
        assert_same_bytes(call(served, self.x), trained)

    def test_explain_is_a_table_of_what_applies(self, model):
        assert str(jlp.explain(model, RECIPE)).splitlines() == [
            "layer        kernel  weight      input  gradient",
            "blocks/0/up  32x32   Int4 1x16   -      -",
            "blocks/1/up  32x32   Int4 1x16   -      -",
            "flax         32x32   -           -      -         no jaxlowprec layer",
            "named        32x32   -           -      -         left out by the recipe",
            "nvfp4        32x32   NVFP4 1x16  -      -",
            "own          32x32   -           -      -         no recipe",
            "router       32x32   -           -      -         left out by the recipe",
        ]
        with jlp.autocast(RECIPE):
            assert jlp.explain(model) == jlp.explain(model, RECIPE)

    def test_explain_notes_layers_whose_path_would_say_otherwise(self):
        nameless = Model(nnx.Rngs(0))
        layers = {layer.path: layer for layer in jlp.explain(nameless, RECIPE).layers}
        assert layers["router"].roles.weight.format == FORMAT
        assert layers["router"].note == "nameless; by its path left out: see jaxlowprec.nnx.name_layers"
        assert layers["blocks/0/up"].note == ""
        layers = {layer.path: layer for layer in jlp.explain(nameless, jlp.Int4QAT(16, include=("up",))).layers}
        assert layers["blocks/0/up"].roles.weight is None
        assert layers["blocks/0/up"].note == "nameless; by its path chosen: see jaxlowprec.nnx.name_layers"

    def test_explain_says_what_is_loaded(self, model):
        layers = jlp.explain(jlp.quantize_params(model, RECIPE), None).layers
        assert {layer.path for layer in layers if layer.note == "loaded"} == {*self.chosen, "nvfp4"}

    def test_a_name_that_was_given_stays(self, model):
        assert (model.named.name, model.router.name) == ("expert_gate", "router")

    def test_the_export_is_no_parameter_and_the_rest_learns(self, model):
        served = jlp.quantize_params(model, RECIPE)
        optimizer = nnx.Optimizer(served, optax.adam(1e-2), wrt=nnx.Param)
        before = jax.tree.leaves(nnx.state(served, jlp.nnx.Quantized))

        @nnx.jit
        def step(model, optimizer, x):
            loss, gradients = nnx.value_and_grad(lambda m: jnp.mean(m(x).astype(jnp.float32) ** 2))(model)
            optimizer.update(model, gradients)
            return loss

        losses = [float(step(served, optimizer, self.x)) for _ in range(4)]
        assert losses[-1] < losses[0]
        assert_same_bytes(jax.tree.leaves(nnx.state(served, jlp.nnx.Quantized)), before)

    def test_kernels_are_quantised_once_for_many_calls(self, model):
        with jlp.autocast(RECIPE):
            expected = model(self.x)
            with jlp.nnx.quantized_kernels(model):
                assert model.blocks[0]["up"].quantized.get_value().weight_only
                assert model.router.quantized is None
                assert_same_bytes(model(self.x), expected)
        served = jlp.quantize_params(model, RECIPE)
        with jlp.autocast(RECIPE), jlp.nnx.quantized_kernels(served):
            assert_same_bytes(served(self.x), expected)

    def test_a_stack_made_by_vmap_is_exported_whole(self):
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(key):
            return jlp.nnx.Linear(32, 32, dtype=jnp.bfloat16, rngs=nnx.Rngs(key))

        stack = make(jax.random.split(jax.random.key(0), 3))
        served = jlp.quantize_params(stack, RECIPE)
        assert served.kernel.get_value().shape == (3, 32, 32)

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer, x):
            return layer(x)

        with jlp.autocast(RECIPE):
            trained = run(stack, self.x)
        assert_same_bytes(run(served, self.x), trained)


class TestErrors:
    x = jnp.ones((8, 32))

    def test_nothing_to_export(self):
        for recipe in (None, jlp.MXFP8BlockScaling(), jlp.Int4QAT(16, exclude=("",))):
            with pytest.raises(ValueError, match="no layer follows a recipe of quantisation-aware training"):
                jlp.quantize_params(jlp.nnx.Linear(32, 16, rngs=nnx.Rngs(0)), recipe)

    def test_an_einsum_without_a_form_to_serve_in(self):
        model = nnx.Dict(heads=jlp.nnx.Einsum("td,dhk->thk", (32, 4, 16), rngs=nnx.Rngs(0)))
        with pytest.raises(ValueError, match=r"layer 'heads' has a kernel of shape \(32, 4, 16\) that is no \[batch"):
            jlp.quantize_params(model, RECIPE)

    def test_a_dot_general_would_not_be_used(self):
        layer = jlp.nnx.Linear(32, 16, dot_general=lambda *a, **k: None, rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match="Linear: dot_general= is set, so the quantised kernel would be ignored"):
            jlp.quantize_params(layer, RECIPE)(self.x)

    def test_a_recipe_that_wants_another_format(self):
        served = jlp.quantize_params(jlp.nnx.Linear(32, 16, name="up", rngs=nnx.Rngs(0)), RECIPE)
        with (
            jlp.autocast(jlp.MXFP8BlockScaling()),
            pytest.raises(ValueError, match="layer 'up' has a kernel in Int4 1x16"),
        ):
            served(self.x)


class TestDemo:
    """The example's model: its first and last blocks and its head are Flax's own, and stay in high precision."""

    @pytest.fixture
    def demo(self, monkeypatch):
        monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parents[2] / "examples"))
        module = importlib.import_module("lm.model")
        yield module.LanguageModel(module.Config(layers=3, width=32, heads=2, context=16), nnx.Rngs(0))
        for name in [n for n in sys.modules if n == "lm" or n.startswith("lm.")]:
            del sys.modules[name]

    def test_what_applies(self, demo):
        formats = jlp.explain(demo, RECIPE).formats
        chosen = {f"blocks/{i}/{name}" for i in (0, 1) for name in ("qkv", "out", "up", "down")}
        assert {path for path, fmt in formats.items() if fmt is not None} == chosen
        assert {path for path in formats if path not in chosen} == {
            *(f"blocks/2/{name}" for name in ("qkv", "out", "up", "down")),
            *("tokens", "positions", "head"),
        }

    def test_the_export_gives_the_logits_of_training(self, demo):
        served = jlp.quantize_params(demo, RECIPE)
        tokens = np.random.default_rng(0).integers(0, 256, (2, 16))
        with jlp.autocast(RECIPE):
            trained = call(demo, tokens)
        assert_same_bytes(call(served, tokens), trained)
        assert jnp.any(call(demo, tokens) != trained)
        one = call(served, tokens[:1])
        assert_same_bytes(one, trained[:1])
