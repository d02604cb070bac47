"""Linen layers: Flax's own without a recipe, bit for bit, and with the same parameters under one."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import serialization
from flax.errors import ScopeParamNotFoundError, ScopeParamShapeError

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, random_array

FULL = jlp.NVFP4BlockScaling()
PLAIN = jlp.NVFP4BlockScaling(disable_stochastic_rounding=True)
CLASSES = {
    "Dense": (nn.Dense, jlp.linen.Dense),
    "DenseGeneral": (nn.DenseGeneral, jlp.linen.DenseGeneral),
    "Einsum": (nn.Einsum, jlp.linen.Einsum),
}
# class, arguments, shape of the input
LAYERS = {
    "dense": ("Dense", {"features": 48}, (4, 8, 32)),
    "dense bf16": ("Dense", {"features": 48, "dtype": jnp.bfloat16}, (16, 32)),
    "dense bf16 parameters": ("Dense", {"features": 48, "param_dtype": jnp.bfloat16, "use_bias": False}, (16, 32)),
    "general": ("DenseGeneral", {"features": (4, 12), "dtype": jnp.bfloat16}, (4, 8, 32)),
    "general two axes": ("DenseGeneral", {"features": 32, "axis": (-2, -1)}, (4, 8, 4, 12)),
    "general batched": ("DenseGeneral", {"features": 24, "axis": 2, "batch_dims": (0,)}, (3, 16, 32)),
    "einsum": ("Einsum", {"shape": (32, 4, 12), "einsum_str": "btd,dhk->bthk"}, (4, 8, 32)),
    "einsum out": ("Einsum", {"shape": (4, 12, 32), "einsum_str": "bthk,hkd->btd", "dtype": "bfloat16"}, (2, 8, 4, 12)),
    "einsum batched": ("Einsum", {"shape": (4, 12, 16), "einsum_str": "bthk,hkd->bthd"}, (2, 8, 4, 12)),
}
each_layer = pytest.mark.parametrize(("kind", "arguments", "shape"), LAYERS.values(), ids=LAYERS)


def both(kind, arguments, **more):
    flax, ours = CLASSES[kind]
    return flax(**arguments), ours(**arguments, **more)


def run(layer, variables, x, given=None, **options):
    """The output, and gradients of the parameters and of x; `given`: further collections."""

    @jax.jit
    def call(variables, x):
        y, pullback = jax.vjp(lambda v, x: layer.apply(v | (given or {}), x, **options), variables, x)
        return y, *pullback(weights_of(y))

    return call(variables, x)


def weights_of(y):
    return jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype)


def assert_close(actual, expected):
    """Within NVFP4's error (numerics.md 11)."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        a, e = (np.asarray(v).astype(np.float64) for v in (a, e))
        assert np.linalg.norm(a - e) < 0.3 * np.linalg.norm(e)


@pytest.mark.parametrize("kind", CLASSES)
def test_arguments_and_defaults_are_flaxs(kind):
    flax, ours = (inspect.signature(c).parameters for c in CLASSES[kind])
    assert {n: p for n, p in ours.items() if n != "recipe"} == dict(flax)
    assert [n for n in ours if n != "recipe"] == list(flax)
    positional = [f.name for f in dataclasses.fields(CLASSES[kind][0]) if f.name not in ("parent", "name")]
    assert list(ours)[: len(positional)] == positional


@each_layer
class TestLayers:
    @pytest.mark.parametrize("recipe", [None, FULL], ids=["without a recipe", "with one"])
    def test_parameters_are_flaxs(self, kind, arguments, shape, recipe):
        flax, ours = both(kind, arguments)
        x = random_array(shape, "float32")
        expected = flax.init(jax.random.key(1), x)
        with jlp.autocast(recipe, enabled=recipe is not None):
            actual = ours.init(jax.random.key(1), x)
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        assert_same_bytes(actual, expected)

    def test_without_a_recipe_everything_is_flaxs_bit_for_bit(self, kind, arguments, shape):
        flax, ours = both(kind, arguments)
        x = random_array(shape, "bfloat16")
        variables = flax.init(jax.random.key(1), x)
        assert_same_bytes(run(ours, variables, x), run(flax, variables, x))
        with jlp.autocast(FULL):
            assert_same_bytes(run(both(kind, arguments, recipe=None)[1], variables, x), run(flax, variables, x))

    def test_under_a_recipe_it_approximates_flax(self, kind, arguments, shape):
        flax, ours = both(kind, arguments)
        x = jax.random.normal(jax.random.key(0), shape)
        variables = flax.init(jax.random.key(1), x)
        variables = jax.tree.map(lambda p: p + jnp.asarray(0.1, p.dtype), variables)  # a bias that can be missed
        with jlp.autocast(PLAIN):
            actual = run(ours, variables, x)
        expected = run(flax, variables, x)
        assert_close(actual, expected)
        assert jnp.any(actual[0] != expected[0])
        assert_same_bytes(jax.jit(both(kind, arguments, recipe=PLAIN)[1].apply)(variables, x), actual[0])

    def test_a_checkpoint_moves_both_ways(self, kind, arguments, shape):
        flax, ours = both(kind, arguments)
        x = random_array(shape, "float32")
        with jlp.autocast(FULL):
            mine = ours.init(jax.random.key(1), x)
        theirs = flax.init(jax.random.key(2), x)
        restored = serialization.from_bytes(theirs, serialization.to_bytes(mine))
        assert_same_bytes(flax.apply(restored, x), ours.apply(mine, x))
        restored = serialization.from_bytes(mine, serialization.to_bytes(theirs))
        assert_same_bytes(ours.apply(restored, x), flax.apply(theirs, x))


@pytest.mark.parametrize("name", [n for n, (kind, *_) in LAYERS.items() if kind != "Einsum"])
def test_a_kernel_is_quantised_once_for_many_calls(name):
    kind, arguments, shape = LAYERS[name]
    ours = both(kind, arguments)[1]
    x = random_array(shape, "bfloat16")
    variables = ours.init(jax.random.key(1), x)
    with jlp.autocast(FULL):
        y, quantized = ours.apply(variables, x, mutable="quantized")
        assert list(quantized) == ["quantized"]
        changed = variables["params"] | {"kernel": 2 * variables["params"]["kernel"]}
        expected = run(ours, variables, x)
        reused = run(ours, variables, x, given=quantized)  # compiled alike: XLA adds up a bias's gradient
        stale = ours.apply({"params": changed} | quantized, x)
    assert_same_bytes((y, stale), (expected[0],) * 2)
    assert_same_bytes(reused, expected)


@pytest.mark.parametrize("kind", ["Dense", "DenseGeneral"])
def test_quantised_kernels_serve_without_the_master_weights(kind):
    x, layer = random_array((16, 32)), CLASSES[kind][1](48, recipe=FULL)
    variables = layer.init(jax.random.key(1), x)
    y, quantized = layer.apply(variables, x, mutable="quantized")
    served = {"params": {"bias": variables["params"]["bias"]}} | quantized
    assert_same_bytes(layer.apply(served, x), y)


def test_contracted_axes_are_taken_in_flaxs_order_and_must_exist():
    x = random_array((4, 8, 8))
    layers = [jlp.linen.DenseGeneral(16, axis=axis, recipe=FULL) for axis in ((-2, -1), (-1, -2), (-2, 3))]
    variables = layers[0].init(jax.random.key(0), x)
    assert_same_bytes(*(layer.apply(variables, x) for layer in layers[:2]))
    with pytest.raises(ValueError, match="DenseGeneral: axis=3 is out of range for an array of 3 dimensions"):
        layers[2].apply(variables, x)


class TestMasterWeight:
    """A float32 kernel beside bfloat16 activations: its gradient is rounded once, to float32."""

    x = jax.random.normal(jax.random.key(0), (64, 32)).astype(jnp.bfloat16)

    def gradient(self, layer):
        variables = nn.Dense(48).init(jax.random.key(1), self.x)
        with jlp.autocast(FULL):
            y, gradients, _ = run(layer, variables, self.x)
        assert y.dtype == jnp.bfloat16
        return gradients["params"]["kernel"]

    def test_gets_a_gradient_that_is_not_rounded_to_bfloat16(self):
        dw = self.gradient(jlp.linen.Dense(48, dtype=jnp.bfloat16))
        assert dw.dtype == jnp.float32
        assert jnp.mean(dw == dw.astype(jnp.bfloat16)) < 0.1

    def test_in_flaxs_dense_too_with_keep_kernel_dtype(self):
        options = {"dtype": jnp.bfloat16, "dot_general": jlp.dot_general}
        kept = self.gradient(nn.Dense(48, promote_dtype=jlp.linen.keep_kernel_dtype, **options))
        assert jnp.mean(kept == kept.astype(jnp.bfloat16)) < 0.1
        assert_same_bytes(kept, self.gradient(jlp.linen.Dense(48, dtype=jnp.bfloat16)))
        assert jnp.all((g := self.gradient(nn.Dense(48, **options))) == g.astype(jnp.bfloat16))  # what it is for


class TestRandomStream:
    x = jax.random.normal(jax.random.key(0), (32, 64)).astype(jnp.bfloat16)

    def gradients(self, layer, variables, **options):
        return run(layer, variables, self.x, **options)[1:]

    def test_is_optional_and_decides_the_bits_where_given(self):
        layer = jlp.linen.Dense(48, recipe=FULL)
        variables = layer.init(jax.random.key(1), self.x)
        streams = [{"sr": jax.random.key(i)} for i in (0, 1)]
        a, b = (self.gradients(layer, variables, rngs=s) for s in streams)
        assert jnp.any(a[1] != b[1])
        assert_same_bytes(a, self.gradients(layer, variables, rngs=streams[0]))
        assert_same_bytes(self.gradients(layer, variables), self.gradients(layer, variables))
        assert_same_bytes(layer.apply(variables, self.x, rngs=streams[0]), layer.apply(variables, self.x))

    def test_is_not_used_where_nothing_is_rounded_stochastically(self):
        layer = jlp.linen.Dense(48, recipe=PLAIN)
        variables = layer.init(jax.random.key(1), self.x)
        keyed = self.gradients(layer, variables, rngs={"sr": jax.random.key(0)})
        assert_same_bytes(keyed, self.gradients(layer, variables))

    def test_layers_of_a_model_do_not_share_bits(self):
        class Twins(nn.Module):
            @nn.compact
            def __call__(self, x):
                zeros = nn.initializers.zeros
                return [jlp.linen.Dense(48, kernel_init=zeros, name=n)(x) for n in ("a", "b")]

        model = Twins()
        variables = model.init(jax.random.key(1), self.x)
        dy = random_array((32, 48), "float32")
        for rngs in ({}, {"sr": jax.random.key(0)}):
            with jlp.autocast(FULL):
                pullback = jax.vjp(lambda v, rngs=rngs: model.apply(v, self.x, rngs=rngs), variables)[1]
            gradients = pullback([dy.astype(jnp.float32)] * 2)[0]["params"]
            assert jnp.any(gradients["a"]["kernel"] != gradients["b"]["kernel"])


class Model(nn.Module):
    """A residual stack of layers, repeated by nn.scan or nn.remat where asked for."""

    depth: int = 3
    scan: bool = False
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block) if self.remat else Block
        if self.scan:
            block = nn.scan(
                block,
                variable_axes={"params": 0, "quantized": 0},
                split_rngs={"params": True, "sr": True},
                length=self.depth,
            )
            return block(name="blocks")(x, None)[0]
        for i in range(self.depth):
            x = block(name=f"block{i}")(x, None)[0]
        return x


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        hidden = nn.gelu(jlp.linen.Dense(64, dtype=jnp.bfloat16)(x))
        return x + jlp.linen.DenseGeneral(32, dtype=jnp.bfloat16)(hidden), None


class TestModels:
    x = jax.random.normal(jax.random.key(0), (32, 32)).astype(jnp.bfloat16)

    @pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
    @pytest.mark.parametrize("scan", [False, True], ids=["", "scan"])
    def test_a_training_step_lowers_the_loss(self, scan, remat):
        model = Model(scan=scan, remat=remat)
        target = jnp.roll(self.x, 1, axis=-1)
        optimizer = optax.adam(3e-3)

        def loss(params, rngs):
            return jnp.mean((model.apply({"params": params}, self.x, rngs=rngs) - target).astype(jnp.float32) ** 2)

        @jax.jit
        def step(params, state, key):
            value, gradients = jax.value_and_grad(loss)(params, {"sr": key})
            updates, state = optimizer.update(gradients, state)
            return optax.apply_updates(params, updates), state, value

        with jlp.autocast(FULL):
            params = model.init(jax.random.key(1), self.x)["params"]
            before, state, losses = params, optimizer.init(params), []
            for i in range(8):
                params, state, value = step(params, state, jax.random.key(i))
                losses.append(float(value))
        assert losses[-1] < 0.9 * losses[0]
        assert jax.tree.map(lambda p: (p.shape, p.dtype), params) == jax.tree.map(lambda p: (p.shape, p.dtype), before)

    def test_remat_does_not_change_gradients(self):
        variables = Model().init(jax.random.key(1), self.x)
        with jlp.autocast(FULL):
            plain, remat = (run(Model(remat=r), variables, self.x) for r in (False, True))
        assert_same_bytes(remat, plain)

    def test_a_scanned_models_kernels_are_quantised_once(self):
        model = Model(scan=True)
        variables = model.init(jax.random.key(1), self.x)
        with jlp.autocast(FULL):
            y, quantized = model.apply(variables, self.x, mutable="quantized")
            kernels = jax.tree.leaves(quantized, is_leaf=lambda q: isinstance(q, jlp.QuantizedKernel))
            assert sorted(k.shape for k in kernels) == [(3, 32, 64), (3, 64, 32)]
            assert_same_bytes(model.apply(variables | quantized, self.x), y)


class TestErrors:
    x = jnp.ones((8, 32))

    @pytest.mark.parametrize("name", ["dot_general", "dot_general_cls"])
    @pytest.mark.parametrize("kind", ["Dense", "DenseGeneral"])
    def test_a_dot_general_would_silently_win_over_the_recipe(self, kind, name):
        layer = CLASSES[kind][1](16, **{name: lambda: jax.lax.dot_general})
        variables = CLASSES[kind][1](16).init(jax.random.key(0), self.x)
        with jlp.autocast(FULL), pytest.raises(ValueError, match=f"{kind}: {name}= is set, so the recipe"):
            layer.apply(variables, self.x)

    def test_a_recipe_that_is_none(self):
        variables = nn.Dense(16).init(jax.random.key(0), self.x)
        with pytest.raises(TypeError, match="Dense: recipe='nvfp4'"):
            jlp.linen.Dense(16, recipe="nvfp4").apply(variables, self.x)

    def test_kernels_quantised_for_another_recipe(self):
        layer = jlp.linen.Dense(16)
        variables = layer.init(jax.random.key(0), self.x)
        with jlp.autocast(FULL):
            quantized = layer.apply(variables, self.x, mutable="quantized")[1]
        with (
            jlp.autocast(jlp.NVFP4BlockScaling(disable_2d_quantization=True)),
            pytest.raises(ValueError, match="quantise it again under this recipe"),
        ):
            layer.apply(variables | quantized, self.x)

    @pytest.mark.parametrize("kind", CLASSES)
    @pytest.mark.parametrize("recipe", [None, FULL], ids=["without a recipe", "with one"])
    def test_parameters_that_do_not_fit_are_flaxs_own_errors(self, kind, recipe):
        einsum = {"shape": (32, 16), "einsum_str": "td,df->tf"}
        layer = CLASSES[kind][1](**(einsum if kind == "Einsum" else {"features": 16}), recipe=recipe)
        kernel, bias = jnp.ones((32, 16)), jnp.ones(16)
        for params in ({"bias": bias}, {"kernel": kernel}):
            with pytest.raises(ScopeParamNotFoundError):
                layer.apply({"params": params}, self.x)
        with pytest.raises(ScopeParamShapeError):
            layer.apply({"params": {"kernel": jnp.ones((32, 24)), "bias": jnp.ones(24)}}, self.x)

    @pytest.mark.parametrize("recipe", [None, FULL], ids=["without a recipe", "with one"])
    def test_a_bias_that_the_layer_does_not_use_is_ignored(self, recipe):
        params = {"kernel": random_array((32, 16), "float32"), "bias": jnp.ones(16)}
        layer = jlp.linen.Dense(16, use_bias=False, recipe=recipe)
        without = layer.apply({"params": {"kernel": params["kernel"]}}, self.x)
        assert_same_bytes(layer.apply({"params": params}, self.x), without)


@each_layer
def test_a_dtype_that_no_recipe_has_is_flaxs(kind, arguments, shape):
    arguments = {name: value for name, value in arguments.items() if name != "dtype"}
    flax, ours = both(kind, arguments, recipe=jlp.MXFP8BlockScaling(fp8_format="HYBRID"))
    x = jnp.asarray(random_array(shape), "complex64")
    variables = flax.init(jax.random.key(0), x)
    np.testing.assert_array_equal(ours.apply(variables, x), flax.apply(variables, x))
