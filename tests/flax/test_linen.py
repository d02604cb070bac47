"""What only Linen has: attributes of dataclasses, variables in collections, scopes within a call."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax.errors import ScopeParamNotFoundError, ScopeParamShapeError

import jaxlowprec as jlp
from jaxlowprec.layers.delayed_scaling import OVERWRITE_WITH_GRADIENT
from tests.flax.libraries import LIBRARIES
from tests.helpers import assert_same_bytes, random_array

LINEN = LIBRARIES["linen"]
FULL = jlp.NVFP4BlockScaling()
KINDS = ("Dense", "DenseGeneral", "Einsum")
BF16 = {"dtype": jnp.bfloat16}


def block(width=32):
    return LINEN.composed(
        lambda block, x: x + block.down(jax.nn.gelu(block.up(x))),
        up=LINEN.maker("Linear", width, 64, **BF16),
        down=LINEN.maker("LinearGeneral", 64, width, **BF16),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_and_defaults_are_flaxs(kind):
    flax, ours = (inspect.signature(getattr(library, kind)).parameters for library in (nn, jlp.linen))
    assert {n: p for n, p in ours.items() if n != "recipe"} == dict(flax)
    assert [n for n in ours if n != "recipe"] == list(flax)
    positional = [f.name for f in dataclasses.fields(getattr(nn, kind)) if f.name not in ("parent", "name")]
    assert list(ours)[: len(positional)] == positional


class TestQuantizedCollection:
    @pytest.mark.parametrize("kind", ["Linear", "LinearGeneral"])
    def test_serves_without_the_master_weights(self, kind):
        x = random_array((16, 32))
        model = LINEN.model(LINEN.maker(kind, 32, 48, recipe=FULL), x)
        y, quantized = model.module.apply(model.variables(), x, mutable="quantized")
        assert list(quantized) == ["quantized"]
        assert_same_bytes(model.module.apply({"params": {"bias": model.tree["bias"]}} | quantized, x), y)

    def test_of_a_scanned_model_has_all_its_kernels(self):
        x = random_array((32, 32))
        model = LINEN.model(LINEN.stack(block(), 3), x)
        with jlp.autocast(FULL):
            once = model.quantized_once(x)
            kernels = jax.tree.leaves(once.further, is_leaf=lambda q: isinstance(q, jlp.QuantizedKernel))
            assert sorted(k.shape for k in kernels) == [(3, 32, 64), (3, 64, 32)]
            assert_same_bytes(jax.jit(once.apply)(once.tree, x), jax.jit(model.apply)(model.tree, x))

    def test_of_a_scanned_model_has_the_scales_of_its_states(self):
        x = random_array((16, 32), "float32")
        layer = LINEN.maker("Linear", 32, 32)
        scanned = LINEN.stack(LINEN.composed(lambda block, x: 0.5 * block.layer(block.layer(x)), layer=layer), 3)
        with jlp.autocast(jlp.DelayedScaling(amax_history_len=3)):
            model = LINEN.model(scanned, x)
            states = model.gradients(lambda y: (y**2).sum(), x)["blocks"]["layer"][OVERWRITE_WITH_GRADIENT]
            model.tree["blocks"]["layer"][OVERWRITE_WITH_GRADIENT] = states
            assert len(set(states["kernel_amax_history"][:, 0].tolist())) == 3
            once = model.quantized_once(x)
            assert_same_bytes(jax.jit(once.apply)(once.tree, x), jax.jit(model.apply)(model.tree, x))


class TestRandomStream:
    def test_layers_of_a_model_do_not_share_bits(self):
        x, dy = random_array((32, 64)), random_array((32, 48), "float32")
        make = LINEN.maker("Linear", 64, 48, use_bias=False)
        model = LINEN.model(LINEN.composed(lambda model, x: (model.a(x), model.b(x)), a=make, b=make), x)
        kernels = {name: {"kernel": jnp.zeros((64, 48))} for name in ("a", "b")}
        for options in ({}, {"sr": jax.random.key(0)}):

            def gradients(tree):
                return jax.vjp(lambda tree: model.apply(tree, x, **options), tree)[1]((dy, dy))[0]

            with jlp.autocast(FULL):
                of = jax.jit(gradients)(kernels)
            assert jnp.any(of["a"]["kernel"] != of["b"]["kernel"])

    def test_trains_a_scanned_model(self):
        x = jax.random.normal(jax.random.key(0), (32, 32)).astype(jnp.bfloat16)
        model, optimizer = LINEN.model(LINEN.stack(block(), 3, remat=True), x), optax.adam(3e-3)

        def loss(tree, key):
            return jnp.mean((model.apply(tree, x, sr=key) + x).astype(jnp.float32) ** 2)

        @jax.jit
        def step(tree, state, key):
            value, gradients = jax.value_and_grad(loss)(tree, key)
            updates, state = optimizer.update(gradients, state)
            return optax.apply_updates(tree, updates), state, value

        tree, state = model.tree, jax.tree.map(jnp.zeros_like, jax.eval_shape(optimizer.init, model.tree))
        losses = []
        with jlp.autocast(FULL):
            for i in range(8):
                tree, state, value = step(tree, state, jax.random.key(i))
                losses.append(float(value))
        assert losses[-1] < 0.9 * losses[0]


class TestParameters:
    x = jnp.ones((8, 32))

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("recipe", [None, FULL], ids=["without a recipe", "with one"])
    def test_that_do_not_fit_are_flaxs_own_errors(self, kind, recipe):
        einsum = {"shape": (32, 16), "einsum_str": "td,df->tf"}
        layer = getattr(jlp.linen, kind)(**(einsum if kind == "Einsum" else {"features": 16}), recipe=recipe)
        kernel, bias = jnp.ones((32, 16)), jnp.ones(16)
        for params in ({"bias": bias}, {"kernel": kernel}):
            with pytest.raises(ScopeParamNotFoundError):
                layer.apply({"params": params}, self.x)
        with pytest.raises(ScopeParamShapeError):
            layer.apply({"params": {"kernel": jnp.ones((32, 24)), "bias": jnp.ones(24)}}, self.x)

    def test_of_a_grouped_layer_are_checked(self):
        kernel = jnp.ones((4, 32, 17))
        layer = jlp.linen.GroupedDense(4, 16, use_bias=False)
        with pytest.raises(ScopeParamShapeError, match="kernel"):
            layer.apply({"params": {"kernel": kernel}}, self.x, jnp.zeros(4, jnp.int32))

    @pytest.mark.parametrize("make", [jlp.linen.Dense, jlp.linen.DenseGeneral])
    def test_that_were_loaded_are_checked(self, make):
        kernel = jlp.quantize(jnp.ones((32, 24)), jlp.Int4(16), axis=-2)
        with pytest.raises(ScopeParamShapeError):
            make(16, use_bias=False).apply({"params": {"kernel": kernel}}, self.x)

    @pytest.mark.parametrize("recipe", [None, FULL], ids=["without a recipe", "with one"])
    def test_that_the_layer_does_not_use_are_ignored(self, recipe):
        params = {"kernel": random_array((32, 16), "float32"), "bias": jnp.ones(16)}
        layer = jlp.linen.Dense(16, use_bias=False, recipe=recipe)
        without = layer.apply({"params": {"kernel": params["kernel"]}}, self.x)
        assert_same_bytes(layer.apply({"params": params}, self.x), without)

    def test_of_experts_carry_the_names_of_their_axes(self):
        x = random_array((8, 16, 64))
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("experts", "embed", None))
        moe = jlp.linen.MoE(8, 32, 2, kernel_init=init)
        params = jax.jit(moe.init)(jax.random.key(0), x)["params"]
        assert params["experts"]["up_proj"]["kernel"].names == ("experts", "embed", None)
        apply = jax.jit(lambda params: moe.apply({"params": params}, x))
        assert_same_bytes(apply(params), apply(nn.meta.unbox(params)))
        with jlp.autocast(jlp.MXFP8BlockScaling()):
            y, _ = apply(params)
        assert jnp.all(jnp.isfinite(y))


@pytest.mark.parametrize("recipe", [None, FULL], ids=["without a recipe", "with one"])
@pytest.mark.parametrize(
    ("kind", "arguments", "inputs"),
    [
        ("Linear", (32, 16), ((8, 32),)),
        ("LinearGeneral", (32, 16), ((8, 32),)),
        ("Einsum", ("td,df->tf", (32, 16)), ((8, 32),)),
        ("GroupedLinear", (4, 32, 16), ((8, 32), (4,))),
    ],
)
class TestCalls:
    """What Flax does around each method sees one call of a layer, as of Flax's own."""

    def made(self, kind, arguments, inputs, recipe):
        inputs = [jnp.ones(shape, "int32" if len(shape) == 1 else "float32") for shape in inputs]
        return LINEN.model(LINEN.maker(kind, *arguments, recipe=recipe), *inputs), inputs

    def test_are_captured_once(self, kind, arguments, inputs, recipe):
        model, inputs = self.made(kind, arguments, inputs, recipe)
        y, found = model(*inputs, capture_intermediates=True)
        assert_same_bytes(found["intermediates"], {"__call__": (y,)})

    def test_are_intercepted_once(self, kind, arguments, inputs, recipe):
        (model, inputs), calls = self.made(kind, arguments, inputs, recipe), []

        def count(call, args, kwargs, context):
            calls.append(context.method_name)
            return call(*args, **kwargs)

        with nn.intercept_methods(count):
            model(*inputs)
        assert [name for name in calls if name != "setup"] == ["__call__"]


class Model(nn.Module):
    """Layers that a scope leaves out; a norm; an argument besides the input."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.LayerNorm(name="norm")(x).astype(jnp.bfloat16)
        x = x + jlp.linen.Dense(32, name="up", **BF16)(x)
        with jlp.autocast(enabled=False):
            x = x + jlp.linen.Dense(32, name="scoped", **BF16)(x)
        return x * (2 if train else 1)


class TestExport:
    recipe = jlp.Int4QAT(group_size=16)
    x = random_array((2, 8, 32))

    def variables(self):
        return jax.jit(Model().init)(jax.random.key(1), self.x)

    def test_sees_scopes_and_passes_arguments_on(self):
        variables = self.variables()
        served = jlp.quantize_params(Model(), self.recipe, variables, self.x, train=True)
        assert isinstance(served["params"]["up"].pop("kernel"), jlp.QuantizedArray)
        assert not isinstance(variables["params"]["up"]["kernel"], jlp.QuantizedArray)
        for name, layer in served["params"].items():
            assert all(value is variables["params"][name][leaf] for leaf, value in layer.items())
        assert set(served["params"]["scoped"]) == {"kernel", "bias"} and set(served["params"]["up"]) == {"bias"}

    def test_is_explained_from_arrays_or_their_shapes(self):
        variables = self.variables()
        for given in (variables, jax.eval_shape(lambda: variables)):
            explanation = jlp.explain(Model(), self.recipe, given, self.x)
            assert explanation.formats == {"up": jlp.Int4(16), "scoped": None}
            assert {layer.path: layer.note for layer in explanation.layers} == {"up": "", "scoped": "no recipe"}

    def test_gives_the_logits_of_training(self):
        variables = self.variables()
        served = jlp.quantize_params(Model(), self.recipe, variables, self.x)
        with jlp.autocast(self.recipe):
            trained = jax.jit(Model().apply)(variables, self.x)
        assert_same_bytes(jax.jit(Model().apply)(served, self.x), trained)
