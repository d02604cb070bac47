"""Linen models in quantisation-aware training, what explain says of them, and their 4-bit export."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax.errors import ScopeParamShapeError
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, random_array
from tests.sharding.meshes import mesh_of, place

RECIPE = jlp.Int4QAT(group_size=16)
FORMAT = jlp.Int4(16)
RECIPES = (RECIPE, jlp.Int4QAT(16, symmetric=False), jlp.WeightQAT(jlp.NVFP4()), jlp.WeightQAT(jlp.MXFP4()))
# layer, shape of the input, of the exported kernel
LAYERS = {
    "dense": (jlp.linen.Dense(48), (4, 8, 32), (32, 48)),
    "dense bf16": (jlp.linen.Dense(48, dtype=jnp.bfloat16, use_bias=False), (16, 32), (32, 48)),
    "general": (jlp.linen.DenseGeneral((4, 12), dtype=jnp.bfloat16), (4, 8, 32), (32, 48)),
    "general two axes": (jlp.linen.DenseGeneral(32, axis=(-2, -1)), (4, 8, 4, 12), (48, 32)),
    "general batched": (jlp.linen.DenseGeneral(24, axis=2, batch_dims=(0,)), (3, 16, 32), (3, 32, 24)),
    "einsum": (jlp.linen.Einsum((32, 24), "btd,df->btf", use_bias=False), (4, 8, 32), (32, 24)),
    "einsum experts": (jlp.linen.Einsum((3, 32, 24), "etd,edf->etf", use_bias=False), (3, 8, 32), (3, 32, 24)),
}


class Model(nn.Module):
    """A layer of each kind, some of them left out in each way there is."""

    @nn.compact
    def __call__(self, x, train=False):
        dtype = {"dtype": jnp.bfloat16}
        x = nn.LayerNorm(name="norm")(x).astype(jnp.bfloat16)
        heads = jlp.linen.DenseGeneral((4, 16), name="qkv", **dtype)(x)
        x = x + jlp.linen.DenseGeneral(32, axis=(-2, -1), name="out", **dtype)(heads)
        x = x + jlp.linen.Dense(32, name="up", **dtype)(x)
        x = x * jax.nn.sigmoid(jlp.linen.Dense(32, name="router", **dtype)(x))
        with jlp.autocast(enabled=False):
            x = x + jlp.linen.Dense(32, name="scoped", **dtype)(x)
        x = x + jlp.linen.Dense(32, name="own", recipe=None, **dtype)(x)
        x = x + jlp.linen.Dense(32, name="nvfp4", recipe=jlp.WeightQAT(jlp.NVFP4()), **dtype)(x)
        x = x + nn.Dense(32, name="flax", **dtype)(x)
        return jlp.linen.Dense(8, name="lm_head", **dtype)(x) * (2 if train else 1)


class Blocks(nn.Module):
    """A scanned stack."""

    @nn.compact
    def __call__(self, x):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return x + jlp.linen.Dense(32, name="up", dtype=jnp.bfloat16)(x), None

        scanned = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return scanned(name="blocks")(x, None)[0]


@pytest.fixture(scope="module")
def model():
    x = random_array((2, 8, 32))
    return Model(), Model().init(jax.random.key(1), x), x


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: str(r.weight_format))
@pytest.mark.parametrize(("layer", "shape", "exported"), LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_export_serves_the_bits_that_were_trained(layer, shape, exported, recipe, dtype):
    x = random_array(shape, dtype)
    variables = layer.init(jax.random.key(1), x)
    served = jlp.quantize_params(layer, recipe, variables, x)
    kernel = served["params"]["kernel"]
    assert (kernel.shape, kernel.axis, kernel.format) == (exported, -2, recipe.weight_format)
    with jlp.autocast(recipe):
        trained = layer.apply(variables, x)
        assert_same_bytes(jax.jit(layer.apply)(variables, x), trained)
        assert_same_bytes(layer.apply(served, x), trained)
    assert_same_bytes(layer.apply(served, x), trained)
    assert_same_bytes(jax.jit(layer.apply)(served, x), trained)
    assert jnp.any(layer.apply(variables, x) != trained)


class TestModel:
    def test_the_export_has_exactly_the_chosen_kernels(self, model):
        module, variables, x = model
        served = jlp.quantize_params(module, RECIPE, variables, x, train=True)
        formats = {
            name: layer["kernel"].format
            for name, layer in served["params"].items()
            if isinstance(layer.get("kernel"), jlp.QuantizedArray)
        }
        assert formats == {"qkv": FORMAT, "out": FORMAT, "up": FORMAT, "nvfp4": jlp.NVFP4()}
        for name, layer in variables["params"].items():
            for leaf, value in layer.items():
                if leaf != "kernel" or name not in formats:
                    assert served["params"][name][leaf] is value
        assert not any(isinstance(leaf, jlp.QuantizedArray) for leaf in variables["params"]["up"].values())

    def test_its_logits_are_those_of_training(self, model):
        module, variables, x = model
        served = jlp.quantize_params(module, RECIPE, variables, x)
        with jlp.autocast(RECIPE):
            trained = jax.jit(module.apply)(variables, x)
            assert_same_bytes(jax.jit(module.apply)(served, x), trained)
        assert_same_bytes(jax.jit(module.apply)(served, x), trained)

    def test_explain_is_a_table_of_what_applies(self, model):
        module, variables, x = model
        shapes = jax.eval_shape(lambda: variables)
        for given in (variables, shapes):
            explanation = jlp.explain(module, RECIPE, given, x)
            assert explanation.formats == {
                **dict.fromkeys(("qkv", "out", "up"), FORMAT),
                **dict.fromkeys(("router", "scoped", "own"), None),
                "nvfp4": jlp.NVFP4(),
                **dict.fromkeys(("flax", "lm_head"), None),
            }
        assert str(explanation).splitlines() == [
            "layer    kernel   weight      input  gradient",
            "qkv      32x4x16  Int4 1x16   -      -",
            "out      4x16x32  Int4 1x16   -      -",
            "up       32x32    Int4 1x16   -      -",
            "router   32x32    -           -      -         left out by the recipe",
            "scoped   32x32    -           -      -         no recipe",
            "own      32x32    -           -      -         no recipe",
            "nvfp4    32x32    NVFP4 1x16  -      -",
            "flax     32x32    -           -      -         no jaxlowprec layer",
            "lm_head  32x8     -           -      -         left out by the recipe",
        ]

    def test_explain_says_what_is_loaded(self, model):
        module, variables, x = model
        served = jlp.quantize_params(module, RECIPE, variables, x)
        layers = {layer.path: layer for layer in jlp.explain(module, None, served, x).layers}
        assert {path for path, layer in layers.items() if layer.note == "loaded"} == {"qkv", "out", "up", "nvfp4"}
        assert layers["qkv"].roles.weight.format == FORMAT and layers["qkv"].kernel == (32, 64)

    def test_explain_shows_other_recipes_too(self, model):
        module, variables, x = model
        up = next(
            layer for layer in jlp.explain(module, jlp.MXFP8BlockScaling(), variables, x).layers if layer.path == "up"
        )
        assert up.roles == jlp.MXFP8BlockScaling().roles()

    def test_explain_notes_a_kernel_that_does_not_divide(self, model):
        module, variables, x = model
        notes = {layer.path: layer.note for layer in jlp.explain(module, jlp.Int4QAT(64), variables, x).layers}
        assert "K = 32, which is not a multiple of the group of 64" in notes["up"]
        assert notes["out"] == ""
        with pytest.raises(ValueError, match="quantize_params: layer 'qkv' .* not a multiple of the group of 64"):
            jlp.quantize_params(module, jlp.Int4QAT(64), variables, x)

    def test_explain_notes_a_group_that_would_lie_on_two_shards(self, model):
        module, variables, x = model
        kernel = place(variables["params"]["up"]["kernel"], mesh_of((4,)), P("a"))
        variables = {"params": {**variables["params"], "up": {**variables["params"]["up"], "kernel": kernel}}}
        notes = {layer.path: layer.note for layer in jlp.explain(module, RECIPE, variables, x).layers}
        assert "K = 32, in shards of 8" in notes["up"]

    def test_a_step_lowers_the_loss_and_keeps_types(self, model):
        module, variables, x = model
        target, optimizer = random_array((2, 8, 8), "float32", 5), optax.adam(3e-3)

        @jax.jit
        def step(params, state):
            def loss(params):
                return jnp.mean((module.apply({"params": params}, x) - target).astype(jnp.float32) ** 2)

            value, gradients = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(gradients, state)
            return optax.apply_updates(params, updates), state, value

        params, state, losses = variables["params"], optimizer.init(variables["params"]), []
        with jlp.autocast(RECIPE):
            for _ in range(8):
                params, state, value = step(params, state)
                losses.append(float(value))
        assert losses[-1] < 0.95 * losses[0]
        assert jax.tree.map(lambda p: p.dtype, params) == jax.tree.map(lambda p: p.dtype, variables["params"])

    def test_a_kernel_is_quantised_once_for_many_calls(self, model):
        module, variables, x = model
        with jlp.autocast(RECIPE):
            y, quantized = module.apply(variables, x, mutable="quantized")
            assert set(quantized["quantized"]) == {"qkv", "out", "up", "nvfp4"}
            assert_same_bytes(module.apply(variables | quantized, x), y)


class TestScan:
    x = random_array((8, 32))

    def test_the_export_of_a_scanned_stack_is_served_by_it(self):
        model = Blocks()
        variables = model.init(jax.random.key(1), self.x)
        served = jlp.quantize_params(model, RECIPE, variables, self.x)
        assert served["params"]["blocks"]["up"]["kernel"].shape == (3, 32, 32)
        with jlp.autocast(RECIPE):
            trained = model.apply(variables, self.x)
        assert_same_bytes(model.apply(served, self.x), trained)


class TestErrors:
    x = jnp.ones((8, 32))

    def test_nothing_to_export(self):
        layer = jlp.linen.Dense(16)
        variables = layer.init(jax.random.key(0), self.x)
        for recipe in (None, jlp.MXFP8BlockScaling(), jlp.Int4QAT(16, exclude=("",))):
            with pytest.raises(ValueError, match="no layer follows a recipe of quantisation-aware training"):
                jlp.quantize_params(layer, recipe, variables, self.x)

    def test_an_einsum_without_a_form_to_serve_in(self):
        layer = jlp.linen.Einsum((32, 4, 16), "td,dhk->thk")
        variables = layer.init(jax.random.key(0), self.x)
        with pytest.raises(ValueError, match=r"kernel of shape \(32, 4, 16\) that is no \[batch"):
            jlp.quantize_params(layer, RECIPE, variables, self.x)

    @pytest.mark.parametrize("function", [jlp.explain, jlp.quantize_params])
    def test_no_model(self, function):
        with pytest.raises(TypeError, match="model is a dict; needs a Flax Linen or NNX module"):
            function({"params": {}}, RECIPE)

    @pytest.mark.parametrize("make", [jlp.linen.Dense, jlp.linen.DenseGeneral])
    def test_a_loaded_kernel_that_does_not_fit(self, make):
        kernel = jlp.quantize(jnp.ones((32, 24)), FORMAT, axis=-2)
        with pytest.raises(ScopeParamShapeError):
            make(16, use_bias=False).apply({"params": {"kernel": kernel}}, self.x)

    def test_a_dot_general_would_not_be_used(self):
        kernel = jlp.quantize(jnp.ones((32, 16)), FORMAT, axis=-2)
        layer = jlp.linen.Dense(16, use_bias=False, dot_general=jax.lax.dot_general)
        with pytest.raises(ValueError, match="Dense: dot_general= is set, so the quantised kernel would be ignored"):
            layer.apply({"params": {"kernel": kernel}}, self.x)

    def test_a_recipe_that_wants_another_format(self):
        kernel = jlp.quantize(jnp.ones((32, 16)), FORMAT, axis=-2)
        layer = jlp.linen.Dense(16, use_bias=False)
        with (
            jlp.autocast(jlp.MXFP8BlockScaling()),
            pytest.raises(ValueError, match="kernel in Int4 1x16, but the recipe"),
        ):
            layer.apply({"params": {"kernel": kernel}}, self.x)
