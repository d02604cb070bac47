"""Quantisation-aware training in NNX, where a layer knows a name only if it has one; and the example's model."""

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
from tests.flax.libraries import numbers
from tests.helpers import assert_same_bytes, random_array

RECIPE = jlp.Int4QAT(group_size=16)
FORMAT = jlp.Int4(16)
X = random_array((8, 32))


class Model(nnx.Module):
    """Layers in lists and dicts, one of which has a name of its own."""

    def __init__(self, rngs):
        make = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.blocks = nnx.List([nnx.Dict(up=jlp.nnx.Linear(32, 32, **make)) for _ in range(2)])
        self.router = jlp.nnx.Linear(32, 32, **make)
        self.named = jlp.nnx.Linear(32, 32, name="expert_gate", **make)

    def __call__(self, x):
        for block in self.blocks:
            x = x + block["up"](x)
        return x * jax.nn.sigmoid(self.router(x)) + self.named(x)


def filled(make):
    """A module with numbers of numpy."""
    module = nnx.eval_shape(make)
    state = nnx.state(module, nnx.Param)
    nnx.replace_by_pure_dict(state, numbers(nnx.to_pure_dict(state)))
    nnx.update(module, state)
    return module


@nnx.jit
def call(model, x):
    return model(x)


@pytest.fixture
def model():
    model = filled(lambda: Model(nnx.Rngs(0)))
    jlp.nnx.name_layers(model)
    return model


class TestModel:
    chosen = ("blocks/0/up", "blocks/1/up")

    def test_layers_in_lists_are_chosen_by_their_paths(self, model):
        kernel = model.blocks[0]["up"].kernel[...]
        served = jlp.quantize_params(model, RECIPE)
        quantized = {
            "/".join(map(str, path)): variable.get_value().format
            for path, variable in nnx.to_flat_state(nnx.state(served, jlp.nnx.Quantized))
        }
        assert quantized == {f"{path}/kernel": FORMAT for path in self.chosen}
        assert model.blocks[0]["up"].kernel[...] is kernel
        layers = jlp.explain(served, None).layers
        assert {layer.path for layer in layers if layer.note == "loaded"} == set(self.chosen)
        with jlp.autocast(RECIPE):
            assert_same_bytes(call(served, X), call(model, X))

    def test_a_name_that_was_given_stays(self, model):
        assert (model.named.name, model.router.name) == ("expert_gate", "router")
        assert jlp.explain(model, RECIPE).formats == dict.fromkeys(self.chosen, FORMAT) | {
            "named": None,
            "router": None,
        }

    def test_explain_notes_layers_whose_path_would_say_otherwise(self):
        nameless = filled(lambda: Model(nnx.Rngs(0)))
        layers = {layer.path: layer for layer in jlp.explain(nameless, RECIPE).layers}
        assert layers["router"].roles.weight.format == FORMAT
        assert layers["router"].note == "nameless; by its path left out: see jaxlowprec.nnx.name_layers"
        assert layers["blocks/0/up"].note == ""
        layers = {layer.path: layer for layer in jlp.explain(nameless, jlp.Int4QAT(16, include=("up",))).layers}
        assert layers["blocks/0/up"].roles.weight is None
        assert layers["blocks/0/up"].note == "nameless; by its path chosen: see jaxlowprec.nnx.name_layers"

    def test_quantized_kernels_leave_out_what_the_recipe_does(self, model):
        with jlp.autocast(RECIPE), jlp.nnx.quantized_kernels(model):
            assert model.blocks[0]["up"].quantized.get_value().weight_only
            assert model.router.quantized is None

    def test_the_export_is_no_parameter_and_the_rest_learns(self, model):
        served = jlp.quantize_params(model, RECIPE)
        optimizer = nnx.Optimizer(served, optax.adam(1e-2), wrt=nnx.Param)
        before = jax.tree.leaves(nnx.state(served, jlp.nnx.Quantized))

        @nnx.jit
        def step(model, optimizer, x):
            loss, gradients = nnx.value_and_grad(lambda m: jnp.mean(m(x).astype(jnp.float32) ** 2))(model)
            optimizer.update(model, gradients)
            return loss

        losses = [float(step(served, optimizer, X)) for _ in range(4)]
        assert losses[-1] < losses[0]
        assert_same_bytes(jax.tree.leaves(nnx.state(served, jlp.nnx.Quantized)), before)


class TestDemo:
    """The example's model: its first and last blocks and its head are Flax's own, and stay in high precision."""

    @pytest.fixture
    def demo(self, monkeypatch):
        monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parents[2] / "examples"))
        module = importlib.import_module("lm.model")
        yield filled(lambda: module.LanguageModel(module.Config(layers=3, width=32, heads=2, context=16), nnx.Rngs(0)))
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

    @pytest.mark.slow
    def test_the_export_gives_the_logits_of_training(self, demo):
        served = jlp.quantize_params(demo, RECIPE)
        tokens = np.random.default_rng(0).integers(0, 256, (2, 16))
        with jlp.autocast(RECIPE):
            trained = call(demo, tokens)
        assert_same_bytes(call(served, tokens), trained)
        assert jnp.any(call(demo, tokens) != trained)
        one = call(served, tokens[:1])
        assert_same_bytes(one, trained[:1])
