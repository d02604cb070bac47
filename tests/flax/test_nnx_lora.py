"""NNX layers with adapters: Flax's LoRALinear under recipes, models that are given adapters, and merged ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlowprec as jlp
from tests.flax.libraries import filled
from tests.helpers import assert_same_bytes, random_array

X = random_array((2, 8, 64))
NVFP4 = jlp.NVFP4BlockScaling()
pytestmark = pytest.mark.sampled(7)
SERVED = {"nvfp4": jlp.NVFP4(), "mxfp4": jlp.MXFP4(), "int4": jlp.Int4(32)}


class Model(nnx.Module):
    """Flax's attention, a layer of Flax, one of this library, a stack and a head."""

    def __init__(self, rngs=None):
        rngs = rngs or nnx.Rngs(0)
        options = {"rngs": rngs, "dtype": jnp.bfloat16}
        self.attention = nnx.MultiHeadAttention(4, 64, decode=False, **options)
        self.up = nnx.Linear(64, 96, **options)
        self.down = jlp.nnx.Linear(96, 64, **options)
        self.head = nnx.Linear(64, 16, **options)

        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0)
        def layers(rngs):
            return jlp.nnx.Linear(64, 64, rngs=rngs, dtype=jnp.bfloat16, name="stack")

        self.stack = layers(rngs)

    def __call__(self, x):
        x = x + self.down(jax.nn.relu(self.up(self.attention(x))))
        x = nnx.scan(lambda layer, x: jnp.tanh(layer(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.stack, x)
        return self.head(x)


def made():
    return filled(Model)


class Own(nnx.Linear):
    """Somebody's layer."""


run = nnx.jit(lambda model, x: model(x))


def set_adapters(model, seed=0):
    """Adapters as after training: b is not zero any more."""
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        number = seed + sum(map(ord, "/".join(map(str, path))))
        b = np.float32(random_array(variable.get_value().shape, "bfloat16", number)) / 8
        variable.set_value(jax.device_put(b.astype(jnp.bfloat16)))
        nnx.update(model, nnx.from_flat_state([(path, variable)]))
    return model


class TestLoRALinear:
    def test_without_a_recipe_has_flaxs_parameters_and_bits(self):
        ours = jlp.nnx.LoRALinear(64, 48, lora_rank=4, rngs=nnx.Rngs(3))
        flaxs = nnx.LoRALinear(64, 48, lora_rank=4, rngs=nnx.Rngs(3))
        assert isinstance(ours, nnx.LoRALinear)
        assert_same_bytes(nnx.state(ours, nnx.Param), nnx.state(flaxs, nnx.Param))
        for layer in (ours, flaxs):
            layer.lora.lora_b[...] = random_array((4, 48), "float32", 1)
        for x in (X, X.astype(jnp.float32), X.astype(jnp.float16)):
            assert_same_bytes(ours(x), flaxs(x))

    def test_alpha_scales_the_adapter_alone(self):
        layer = jlp.nnx.LoRALinear(64, 48, lora_rank=4, lora_alpha=2, rngs=nnx.Rngs(3))
        without = layer(X)
        layer.lora.lora_b[...] = random_array((4, 48), "float32", 1)
        np.testing.assert_allclose(layer(X) - without, layer.lora(X) / 2, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("recipe", [NVFP4, jlp.DelayedScaling()], ids=["nvfp4", "delayed"])
    def test_under_a_recipe_the_kernel_follows_it(self, recipe):
        with jlp.autocast(recipe):
            layer = jlp.nnx.LoRALinear(64, 48, lora_rank=4, lora_alpha=8, name="up", rngs=nnx.Rngs(3))
            plain = jlp.nnx.Linear(64, 48, name="up", rngs=nnx.Rngs(3))
            layer.lora.lora_b[...] = random_array((4, 48), "float32", 1)
            added = 2 * (np.float32(X) @ np.asarray(layer.lora.lora_a[...]) @ np.asarray(layer.lora.lora_b[...]))
            found = np.asarray(run(layer, X)) - np.asarray(run(plain, X))
            np.testing.assert_allclose(found, added, rtol=0.05, atol=0.05)

    @pytest.mark.parametrize(
        ("options", "said"), [({"lora_rank": 0}, "lora_rank=0"), ({"lora_rank": 4, "lora_alpha": 0}, "alpha=0")]
    )
    def test_bad_arguments(self, options, said):
        with pytest.raises(ValueError, match=f"LoRALinear: {said}"):
            jlp.nnx.LoRALinear(64, 48, rngs=nnx.Rngs(0), **options)


class TestAddLora:
    @pytest.mark.slow
    def test_names_and_adapts_what_the_patterns_choose(self):
        model, options = made(), {"rngs": nnx.Rngs(1)}
        before = run(model, X)
        assert jlp.nnx.add_lora(model, rank=4, exclude=("head", "out"), **options) is model
        adapted = {
            layer.name: layer.adapter.a.shape for _, layer in nnx.iter_modules(model) if hasattr(layer, "adapter")
        }
        assert adapted == {
            "attention/query": (64, 4),
            "attention/key": (64, 4),
            "attention/value": (64, 4),
            "up": (64, 4),
            "down": (96, 4),
            "stack": (3, 64, 4),
        }
        assert type(model.head) is nnx.Linear
        assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, nnx.LoRAParam))} == {jnp.dtype("bfloat16")}
        assert_same_bytes(run(model, X), before)

    def test_explain_names_the_adapters(self):
        model = jlp.nnx.add_lora(made(), rank=4, include=("up", "out"), rngs=nnx.Rngs(1))
        notes = {layer.path: layer.note for layer in jlp.explain(model, NVFP4).layers}
        assert notes["attention/out"] == notes["up"] == "adapter of rank 4"
        assert "adapter" not in notes["down"]

    def test_bad_arguments(self):
        add, rngs = jlp.nnx.add_lora, nnx.Rngs(0)
        with pytest.raises(TypeError, match="nnx.add_lora: model is a dict; needs an NNX module"):
            add({}, rank=4, rngs=rngs)
        with pytest.raises(ValueError, match="rank=0"):
            add(made(), rank=0, rngs=rngs)
        with pytest.raises(TypeError, match="rngs=3; needs nnx.Rngs"):
            add(made(), rank=4, rngs=3)
        with pytest.raises(ValueError, match=r"choose none of the .* layers 'attention/key', 'attention/out'"):
            add(made(), rank=4, include=("nothing",), rngs=rngs)
        with pytest.raises(ValueError, match="the layer 'up' has an adapter already; leave it out with exclude="):
            add(jlp.nnx.add_lora(made(), rank=4, include=("up",), rngs=rngs), rank=4, rngs=rngs)

        with pytest.raises(ValueError, match="the layer 'up' is a Own, a subclass"):
            model = made()
            model.up = Own(8, 8, rngs=rngs)
            add(model, rank=4, rngs=rngs)


class TestTraining:
    @pytest.mark.slow
    @pytest.mark.parametrize("kernels", ["arrays", *SERVED])
    def test_only_adapters_change_and_the_loss_falls(self, kernels):
        model, recipe = jlp.nnx.convert(made()), NVFP4
        if kernels in SERVED:
            model, recipe = jlp.quantize_params(model, jlp.WeightQAT(SERVED[kernels])), None
        jlp.nnx.add_lora(model, rank=4, rngs=nnx.Rngs(1))
        frozen = jax.tree.map(jnp.copy, nnx.state(model, nnx.Not(nnx.LoRAParam)))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)

        @nnx.jit
        def step(model, optimizer):
            def loss(model):
                return jnp.mean(jnp.square(model(X).astype(jnp.float32) - 1))

            value, gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
            optimizer.update(model, gradients)
            return value

        with jlp.autocast(recipe or NVFP4, enabled=recipe is not None):
            losses = [float(step(model, optimizer)) for _ in range(5)]
        assert losses[-1] < 0.8 * losses[0]
        assert_same_bytes(nnx.state(model, nnx.Not(nnx.LoRAParam)), frozen)


class TestMerging:
    @pytest.mark.parametrize("fmt", [None, *SERVED.values()], ids=["arrays", *SERVED])
    def test_gives_the_same_results_from_plain_layers(self, fmt):
        model = made()
        if fmt is not None:
            model = jlp.quantize_params(jlp.nnx.convert(model), jlp.WeightQAT(fmt))
        model = set_adapters(jlp.nnx.add_lora(model, rank=4, alpha=2, rngs=nnx.Rngs(1)))
        merged = jlp.nnx.merge_lora(model)
        np.testing.assert_allclose(np.float32(run(merged, X)), np.float32(run(model, X)), rtol=0.05, atol=0.05)
        shapes = jax.tree.map(jnp.shape, nnx.state(merged, nnx.Param))
        assert shapes == jax.tree.map(jnp.shape, nnx.state(Model(), nnx.Param))
        assert not jax.tree.leaves(nnx.state(merged, nnx.LoRAParam))
        assert jax.tree.leaves(nnx.state(model, nnx.LoRAParam))  # the model keeps its own

    def test_a_merged_model_is_quantised_again(self):
        model = set_adapters(jlp.nnx.add_lora(made(), rank=4, alpha=2, rngs=nnx.Rngs(1)))
        recipe = jlp.WeightQAT(jlp.NVFP4())
        served = jlp.quantize_params(jlp.nnx.merge_lora(model), recipe)
        with jlp.autocast(recipe):
            assert_same_bytes(run(served, X), run(jlp.nnx.merge_lora(model), X))

    def test_a_model_without_adapters_is_refused(self):
        with pytest.raises(ValueError, match="no layer with an adapter; needs those of jaxlowprec.nnx.add_lora"):
            jlp.nnx.merge_lora(made())
