"""NNX layers: Flax's own without a recipe, bit for bit, and with the same parameters under one."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.recipes import silence
from tests.helpers import assert_same_bytes, random_array

FULL = jlp.NVFP4BlockScaling()
PLAIN = jlp.NVFP4BlockScaling(disable_stochastic_rounding=True)
# class, positional and keyword arguments, shape of the input
LAYERS = {
    "linear": ("Linear", (32, 48), {}, (4, 8, 32)),
    "linear bf16": ("Linear", (32, 48), {"dtype": jnp.bfloat16}, (16, 32)),
    "linear bf16 parameters": ("Linear", (32, 48), {"param_dtype": jnp.bfloat16, "use_bias": False}, (16, 32)),
    "linear float32 result": ("Linear", (32, 48), {"dtype": "bfloat16", "preferred_element_type": "float32"}, (16, 32)),
    "general": ("LinearGeneral", (32, (4, 12)), {"dtype": jnp.bfloat16}, (4, 8, 32)),
    "general two axes": ("LinearGeneral", ((4, 12), 32), {"axis": (-2, -1)}, (4, 8, 4, 12)),
    "general batched": ("LinearGeneral", (32, 24), {"axis": 2, "batch_axis": {0: 3}}, (3, 16, 32)),
    "einsum": ("Einsum", ("btd,dhk->bthk", (32, 4, 12), (4, 12)), {}, (4, 8, 32)),
    "einsum bf16": ("Einsum", ("bthk,hkd->btd", (4, 12, 32)), {"dtype": jnp.bfloat16}, (2, 8, 4, 12)),
}
each_layer = pytest.mark.parametrize(("kind", "args", "options", "shape"), LAYERS.values(), ids=LAYERS)


def both(kind, args, options, seed=0, **more):
    flax, ours = getattr(nnx, kind), getattr(jlp.nnx, kind)
    return flax(*args, **options, rngs=nnx.Rngs(seed)), ours(*args, **options, rngs=nnx.Rngs(seed), **more)


def weights_of(y):
    return jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype)


def run(layer, x):
    """The output, and gradients of the parameters and of x."""
    graph, parameters, rest = nnx.split(layer, nnx.Param, ...)

    @jax.jit
    def call(parameters, x):
        y, pullback = jax.vjp(lambda p, x: nnx.merge(graph, p, rest)(x), parameters, x)
        return y, *pullback(weights_of(y))

    return call(parameters, x)


@pytest.mark.parametrize("kind", ["Linear", "LinearGeneral", "Einsum"])
class TestArguments:
    def parameters(self, kind, method):
        return [inspect.signature(getattr(getattr(m, kind), method)).parameters for m in (nnx, jlp.nnx)]

    def test_names_order_and_defaults_are_flaxs(self, kind):
        flax, ours = self.parameters(kind, "__init__")
        own = {"recipe", "name"}
        assert own <= set(ours) and any(p.kind is p.VAR_KEYWORD for p in ours.values())  # the rest is Flax's
        for name, parameter in ours.items():
            if name not in own and parameter.kind is not parameter.VAR_KEYWORD:
                assert (parameter.kind, parameter.default) == (flax[name].kind, flax[name].default)
        positional = [n for n, p in flax.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert list(ours)[: len(positional)] == positional

    def test_of_a_call_are_flaxs(self, kind):
        flax, ours = self.parameters(kind, "__call__")
        assert [(n, p.kind, p.default) for n, p in ours.items()] == [(n, p.kind, p.default) for n, p in flax.items()]

    def test_an_unknown_one_raises(self, kind):
        args = ("td,df->tf", (32, 16)) if kind == "Einsum" else (32, 16)
        with pytest.raises(TypeError, match="margin"):
            getattr(jlp.nnx, kind)(*args, margin=0, rngs=nnx.Rngs(0))

    def test_a_recipe_that_is_none_raises_when_the_layer_is_made(self, kind):
        args = ("td,df->tf", (32, 16)) if kind == "Einsum" else (32, 16)
        with pytest.raises(TypeError, match=f"{kind}: recipe='nvfp4'"):
            getattr(jlp.nnx, kind)(*args, recipe="nvfp4", rngs=nnx.Rngs(0))


@each_layer
class TestLayers:
    def test_the_state_is_flaxs(self, kind, args, options, shape):
        with jlp.autocast(FULL):
            flax, ours = both(kind, args, options, recipe=FULL)
        expected, actual = nnx.to_pure_dict(nnx.state(flax)), nnx.to_pure_dict(nnx.state(ours))
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        assert_same_bytes(actual, expected)

    def test_without_a_recipe_everything_is_flaxs_bit_for_bit(self, kind, args, options, shape):
        flax, ours = both(kind, args, options)
        x = random_array(shape)
        expected = jax.tree.leaves(run(flax, x))
        assert_same_bytes(jax.tree.leaves(run(ours, x)), expected)
        with jlp.autocast(FULL):
            assert_same_bytes(jax.tree.leaves(run(both(kind, args, options, recipe=None)[1], x)), expected)

    def test_under_a_recipe_it_approximates_flax(self, kind, args, options, shape):
        options = options | {"bias_init": nnx.initializers.ones}  # a bias that can be missed
        flax, ours = both(kind, args, options)
        x = jax.random.normal(jax.random.key(0), shape)
        with jlp.autocast(PLAIN):
            actual = run(ours, x)
        expected = run(flax, x)
        for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            assert (a.shape, a.dtype) == (e.shape, e.dtype)
            a, e = (np.asarray(v).astype(np.float64) for v in (a, e))
            assert np.linalg.norm(a - e) < 0.3 * np.linalg.norm(e)  # NVFP4's error, numerics.md 11
        assert jnp.any(actual[0] != expected[0])
        assert_same_bytes(nnx.jit(lambda m, x: m(x))(both(kind, args, options, recipe=PLAIN)[1], x), actual[0])

    def test_a_checkpoint_moves_both_ways(self, kind, args, options, shape):
        x = random_array(shape)
        flax, ours = both(kind, args, options, seed=1)
        theirs, mine = both(kind, args, options, seed=2)
        nnx.update(ours, nnx.state(theirs))
        assert_same_bytes(ours(x), theirs(x))
        nnx.update(flax, nnx.state(mine))
        assert_same_bytes(flax(x), mine(x))


class TestMasterWeight:
    """A float32 kernel beside bfloat16 activations: its gradient is rounded once, to float32."""

    x = jax.random.normal(jax.random.key(0), (64, 32)).astype(jnp.bfloat16)

    def gradient(self, layer):
        with jlp.autocast(FULL):
            y, gradients, _ = run(layer, self.x)
        assert y.dtype == jnp.bfloat16
        return gradients["kernel"][...]

    def test_gets_a_gradient_that_is_not_rounded_to_bfloat16(self):
        dw = self.gradient(jlp.nnx.Linear(32, 48, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
        assert dw.dtype == jnp.float32
        assert jnp.mean(dw == dw.astype(jnp.bfloat16)) < 0.1

    def test_in_flaxs_linear_too_with_keep_kernel_dtype(self):
        options = {"dtype": jnp.bfloat16, "dot_general": jlp.dot_general, "rngs": nnx.Rngs(0)}
        kept = self.gradient(nnx.Linear(32, 48, promote_dtype=jlp.nnx.keep_kernel_dtype, **options))
        assert jnp.mean(kept == kept.astype(jnp.bfloat16)) < 0.1


class TestRandomStream:
    x = random_array((32, 64))

    def layer(self, recipe=FULL, **streams):
        return jlp.nnx.Linear(64, 48, recipe=recipe, rngs=nnx.Rngs(0, **streams))

    def gradients(self, layer):
        return nnx.grad(lambda m: (m(self.x).astype(jnp.float32) ** 2).mean())(layer)["kernel"][...]

    def test_is_optional_and_decides_the_bits_where_given(self):
        keyless, a, b = self.layer(), self.layer(sr=1), self.layer(sr=2)
        assert jnp.any(self.gradients(a) != self.gradients(b))
        assert_same_bytes(self.gradients(self.layer(sr=1)), self.gradients(self.layer(sr=1)))
        assert_same_bytes(self.gradients(keyless), self.gradients(keyless))

    def test_each_step_has_its_own_bits(self):
        layer = self.layer(sr=1)
        assert jnp.any(self.gradients(layer) != self.gradients(layer))

    def test_is_not_used_where_nothing_is_rounded_stochastically(self):
        layer = self.layer(recipe=PLAIN, sr=1)
        assert_same_bytes(self.gradients(layer), self.gradients(layer))
        assert layer.sr.count[...] == 0

    def test_the_output_does_not_depend_on_it(self):
        assert_same_bytes(self.layer(sr=1)(self.x), self.layer()(self.x))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = jlp.nnx.Linear(32, 64, dtype=jnp.bfloat16, rngs=rngs)
        self.down = jlp.nnx.LinearGeneral(64, 32, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Model(nnx.Module):
    """Three blocks, made by nnx.vmap and run by nnx.scan, recomputed in the backward pass where asked for."""

    def __init__(self, remat, rngs):
        self.remat = remat

        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return Block(rngs)

        self.blocks = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def forward(block, x):
            return nnx.remat(Block.__call__)(block, x) if self.remat else block(x)

        return forward(self.blocks, x)


class TestModels:
    x = jax.random.normal(jax.random.key(0), (32, 32)).astype(jnp.bfloat16)

    @pytest.mark.parametrize("streams", [{}, {"sr": 1}], ids=["keyless", "sr stream"])
    @pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
    def test_a_training_step_lowers_the_loss(self, remat, streams):
        with jlp.autocast(FULL):
            model = Model(remat, nnx.Rngs(0, **streams))
            optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
            target = jnp.roll(self.x, 1, axis=-1)

            @nnx.jit
            def step(model, optimizer):
                value, gradients = nnx.value_and_grad(
                    lambda m: jnp.mean((m(self.x) - target).astype(jnp.float32) ** 2)
                )(model)
                optimizer.update(model, gradients)
                return value

            losses = [float(step(model, optimizer)) for _ in range(8)]
        assert losses[-1] < 0.9 * losses[0]
        assert model.blocks.up.kernel[...].dtype == jnp.float32


class TestQuantizedKernels:
    x = random_array((16, 32))

    def test_are_reused_with_gradients_to_the_master_weights(self):
        model = Block(nnx.Rngs(0))

        def loss(model):
            return (model(self.x).astype(jnp.float32) ** 2).mean()

        with jlp.autocast(FULL):
            expected, fresh = nnx.value_and_grad(loss)(model)
            with jlp.nnx.quantized_kernels(model):
                value, reused = nnx.value_and_grad(loss)(model)
                model.up.kernel[...] = 2 * model.up.kernel[...]
                assert loss(model) == expected  # the kernel of then
            assert loss(model) != expected
        assert value == expected
        assert_same_bytes(jax.tree.leaves(nnx.state(reused)), jax.tree.leaves(nnx.state(fresh)))

    def test_leave_the_models_state_as_it_was(self):
        model = Block(nnx.Rngs(0))
        before = nnx.graphdef(model)
        with pytest.raises(RuntimeError, match="inside"), jlp.nnx.quantized_kernels(model, FULL):
            parameters = nnx.to_pure_dict(nnx.state(model, nnx.Param))
            assert sorted(parameters["up"]) == ["bias", "kernel"]
            raise RuntimeError("inside")
        assert nnx.graphdef(model) == before

    def test_a_layers_own_recipe_comes_first(self):
        other = jlp.NVFP4BlockScaling(disable_2d_quantization=True)
        model = nnx.List([jlp.nnx.Linear(32, 32, recipe=recipe, rngs=nnx.Rngs(0)) for recipe in (None, other, ...)])
        with jlp.nnx.quantized_kernels(model, FULL):
            kept = [getattr(layer._quantized_kernel(), "rowwise", None) for layer in model]
        assert [q and q.format for q in kept] == [None, jlp.NVFP4((1, 16)), jlp.NVFP4((16, 16))]

    def test_need_a_recipe_and_leave_nothing_behind_without(self):
        model = nnx.List([jlp.nnx.Linear(32, 32, recipe=recipe, rngs=nnx.Rngs(0)) for recipe in (FULL, ...)])
        with pytest.raises(ValueError, match="quantize_kernel: no recipe"), jlp.nnx.quantized_kernels(model):
            pass
        assert model[0].quantized is None


@pytest.mark.parametrize(
    ("kind", "args", "options"),
    [
        ("Linear", (32, 16), {"dot_general": jlp.dot_general}),
        ("LinearGeneral", (32, 16), {"dot_general": jax.lax.dot_general}),
        ("LinearGeneral", (32, 16), {"dot_general_cls": lambda: jax.lax.dot_general}),
        ("Einsum", ("td,df->tf", (32, 16)), {"einsum_op": jlp.einsum}),
    ],
)
def test_an_operation_that_overrides_the_recipe_raises(kind, args, options):
    layer = getattr(jlp.nnx, kind)(*args, **options, rngs=nnx.Rngs(0))
    (name,) = options
    with jlp.autocast(FULL), pytest.raises(ValueError, match=f"{kind}: {name}= is set, so the recipe"):
        layer(jnp.ones((8, 32)))


def test_contracted_axes_are_taken_in_flaxs_order_and_must_exist():
    x = random_array((4, 8, 8))
    layers = [
        jlp.nnx.LinearGeneral((8, 8), 16, axis=axis, rngs=nnx.Rngs(0), recipe=jlp.NVFP4BlockScaling())
        for axis in ((-2, -1), (-1, -2), (-2, 3))
    ]
    assert_same_bytes(layers[0](x), layers[1](x))
    with pytest.raises(ValueError, match="LinearGeneral: axis=3 is out of range for an array of 3 dimensions"):
        layers[2](x)


@each_layer
def test_a_dtype_that_no_recipe_has_is_flaxs_and_said(kind, args, options, shape):
    options = {name: value for name, value in options.items() if name not in ("dtype", "preferred_element_type")}
    flax, ours = both(kind, args, options)
    x, recipe = jnp.asarray(random_array(shape), "complex64"), jlp.Float8CurrentScaling(backward_override="dequantized")
    with jlp.autocast(recipe, strict=None), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        silence._said.clear()
        np.testing.assert_array_equal(ours(x), flax(x))
        ours(x)
    assert [str(w.message) for w in said] == [
        f"{kind}: complex64 operands stay in high precision, as Flax has them; recipes take bfloat16, float16, float32"
    ]
