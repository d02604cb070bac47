"""jaxlowprec.lora: adapters for trees of parameters, and functions that are given adapted or quantised weights."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec.wiring import native
from tests.flax.libraries import numbers
from tests.helpers import assert_same_bytes, random_array
from tests.sharding.meshes import by_axis_type, mesh_of, place

pytestmark = pytest.mark.sampled(5)


def tenth(shape, seed):
    return jax.device_put(np.asarray(random_array(shape, "float32", seed)) * np.float32(0.1))


KEY = jax.random.key(0)
X = random_array((8, 64), "float32")
PARAMS = {
    "stack": {"up": {"kernel": tenth((3, 64, 96), 1), "bias": np.ones((3, 96), np.float32)}},
    "down": {"w": tenth((64, 96), 2)},
    "norm": {"kernel": random_array((64, 4), "float32", 3)},
}
FORMATS = {"array": None, "nvfp4": jlp.NVFP4(), "int4": jlp.Int4(32)}


@functools.cache
def base(fmt):
    """The parameters, their kernels quantised along the axis that `function` contracts."""
    if fmt is None:
        return PARAMS
    up, down = PARAMS["stack"]["up"]["kernel"], PARAMS["down"]["w"]
    quantized = {"up": {"kernel": jlp.quantize(up, fmt, axis=-2), "bias": PARAMS["stack"]["up"]["bias"]}}
    return PARAMS | {"stack": quantized, "down": {"w": jlp.quantize(down, fmt, axis=-1)}}


def trained(adapters):
    """Adapters as after training: b is not zero any more."""
    return jax.tree.map(lambda leaf: tenth(leaf.shape, leaf.size), adapters)


def function(params, x):
    """Plain JAX: a scan over a stack of layers, and a product by a transposed weight."""

    def layer(x, up):
        hidden = jnp.tanh(x @ up["kernel"].astype(x.dtype) + up["bias"])
        return jax.jit(lambda hidden, w: hidden @ w.T)(hidden, params["down"]["w"]), None

    return lax.scan(jax.checkpoint(layer), x, params["stack"]["up"])[0]


class TestInit:
    def test_has_an_adapter_for_each_matrix_by_its_layers_name(self):
        adapters = jlp.lora.init(KEY, PARAMS, rank=4)
        assert {name: (a.a.shape, a.b.shape) for name, a in adapters.items()} == {
            "down": ((64, 4), (4, 96)),
            "stack/up": ((3, 64, 4), (3, 4, 96)),
        }
        assert {leaf.dtype for leaf in jax.tree.leaves(adapters)} == {jnp.dtype("bfloat16")}
        assert not any(np.any(adapter.b) for adapter in adapters.values())
        assert {adapter.scale for adapter in adapters.values()} == {1.0}
        assert np.ptp(np.float32(adapters["stack/up"].a), axis=0).min() > 0  # the layers differ
        bound = np.sqrt(6 / 64)
        assert 0.9 * bound < np.abs(np.float32(adapters["down"].a)).max() <= bound * 1.01

    def test_is_the_same_for_quantised_and_abstract_weights(self):
        expected = jlp.lora.init(KEY, PARAMS, rank=4)
        for params in (base(jlp.NVFP4()), jax.eval_shape(lambda: base(jlp.NVFP4()))):
            assert_same_bytes(jlp.lora.init(KEY, params, rank=4), expected)

    def test_patterns_choose_without_changing_the_numbers(self):
        every = jlp.lora.init(KEY, PARAMS, rank=4, exclude=())
        assert sorted(every) == ["down", "norm", "stack/up"]
        only = jlp.lora.init(KEY, PARAMS, rank=4, include=("^down$",))
        assert list(only) == ["down"]
        assert_same_bytes(only["down"], every["down"])

    def test_axes_of_kernels_with_several(self):
        params = {"query": jnp.ones((32, 4, 8)), "out": jnp.ones((4, 8, 32))}
        adapters = jlp.lora.init(KEY, params, rank=2, axes={"query": (0, 1), "out": (0, 2)}, alpha=6, dtype="float32")
        assert {(adapter.a.shape, adapter.b.shape) for adapter in adapters.values()} == {((32, 2), (2, 32))}
        assert adapters["out"].scale == 3.0

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"rank": 0}, "rank=0"),
            ({"rank": 2.5}, "rank=2.5"),
            ({"alpha": -1}, "alpha=-1; needs a positive number"),
            ({"dtype": "int8"}, "dtype=int8"),
            ({"include": "up"}, "include='up'; needs a tuple of regular expressions"),
            ({"exclude": ("(",)}, "not a valid regular expression"),
            ({"include": ("nothing",)}, "leave none of the weights 'down', 'norm', 'stack/up'"),
            ({"key": 3}, "lora.init: key=3"),
            ({"axes": {"down": 3}}, r"axes\['down'\]=3; needs two whole numbers"),
            ({"axes": {"down": (1, 1)}}, r"axes=\(1, 1\) for 'down' of shape \(64, 96\)"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
    )
    def test_bad_arguments(self, options, said):
        with pytest.raises((TypeError, ValueError), match=said):
            jlp.lora.init(**{"key": KEY, "params": PARAMS, "rank": 4} | options)


class TestTrees:
    @pytest.mark.parametrize("call", [jlp.lora.apply, jlp.lora.merge])
    def test_adapters_that_do_not_fit(self, call):
        adapters = jlp.lora.init(KEY, PARAMS, rank=4)
        with pytest.raises(ValueError, match="no weight has the name 'dawn'; .*; the nearest ones are 'down'"):
            call(PARAMS, {"dawn": adapters["down"]})
        with pytest.raises(ValueError, match="'down': adapter.a"):
            call(PARAMS, {"down": adapters["stack/up"]})
        with pytest.raises(TypeError, match="needs the dict that lora.init makes"):
            call(PARAMS, list(adapters))

    def test_merging_untrained_adapters_changes_nothing(self):
        adapters = jlp.lora.init(KEY, PARAMS, rank=4)
        jax.tree.map(np.testing.assert_array_equal, jlp.lora.merge(PARAMS, adapters), PARAMS)
        assert jlp.lora.merge(PARAMS, adapters, dtype="bfloat16")["down"]["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
class TestFunctions:
    """`quantize_matmuls` gives any function such weights."""

    def test_computes_and_learns_as_with_merged_weights(self, fmt):
        adapters = trained(jlp.lora.init(KEY, base(fmt), rank=4, alpha=8))
        adapted = jlp.quantize_matmuls(function, None)

        def results(f, made):
            loss = lambda adapters: jnp.sum(jnp.sin(f(made(base(fmt), adapters), X)))  # noqa: E731
            return jax.jit(jax.value_and_grad(loss))(adapters)

        actual, expected = results(adapted, jlp.lora.apply), results(function, jlp.lora.merge)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4), actual, expected)

    def test_explain_names_format_and_adapter(self, fmt):
        params = jlp.lora.apply(base(fmt), jlp.lora.init(KEY, base(fmt), rank=4, include=("up",)))
        layers = {layer.path: layer for layer in jlp.explain(jlp.quantize_matmuls(function), None, params, X).layers}
        assert "adapter of rank 4" in layers["stack/up"].note
        assert "adapter" not in layers["down"].note
        weights = [layers[name].roles.weight for name in ("stack/up", "down")]
        assert [None if role is None else role.format for role in weights] == [fmt, fmt]


class TestQuantizedParameters:
    def test_a_function_computes_with_the_codes(self):
        if native.isa() is None:
            pytest.skip("without kernels there are no calls to count")
        adapted = jlp.quantize_matmuls(function, None)
        text = jax.jit(adapted).lower(base(jlp.NVFP4()), X).as_text()
        assert text.count("jaxlowprec_weight_only_matmul") == 2
        assert "jaxlowprec_dequantize" not in text

    def test_other_uses_have_the_decoded_array(self):
        q = jlp.quantize(PARAMS["down"]["w"], jlp.NVFP4(), axis=-1)
        decoded = jlp.dequantize(q)

        def uses(w, x):
            wrong_axis = x @ w  # quantised along the other one
            reshaped = x @ w.reshape(64, 2, 48)[:, 0]
            looped = lax.fori_loop(0, 2, lambda _, carry: (carry[0] @ w @ w.T, w), (x, w))
            chosen = lax.cond(x[0, 0] > 0, lambda w: w.sum(), lambda w: w.max(), w)
            return wrong_axis, reshaped, *looped, chosen, w, w.mT, jax.jit(lambda w: w)(w)

        actual = jax.jit(jlp.quantize_matmuls(uses, None))(q, X)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), actual, jax.jit(uses)(decoded, X)
        )

    def test_two_products_of_one_weight(self):
        q = jlp.quantize(random_array((64, 64), "float32", 5), jlp.Int4(32), axis=-2)
        twice = jlp.quantize_matmuls(lambda w, x: x @ w @ w, None)
        w = np.asarray(jlp.dequantize(q))
        np.testing.assert_allclose(jax.jit(twice)(q, X), np.asarray(X) @ w @ w, rtol=1e-3, atol=1e-3)


class TestUnderARecipe:
    def test_an_adapted_array_follows_it(self):
        recipe = jlp.NVFP4BlockScaling()
        adapters = trained(jlp.lora.init(KEY, PARAMS, rank=4, include=("down",)))
        quantized = jlp.quantize_matmuls(lambda params, x: x @ params["down"]["w"], recipe)
        kernel = jlp.lora.LoRAKernel(PARAMS["down"]["w"], adapters["down"])
        expected = jax.jit(lambda w: jlp.linear(X, w, recipe=recipe, name="down"))(kernel)
        assert_same_bytes(jax.jit(quantized)(jlp.lora.apply(PARAMS, adapters), X), expected)

    def test_a_stack_whose_ends_stay_in_high_precision(self):
        rules = jlp.PerLayer.keep_ends(jlp.NVFP4BlockScaling(), first=1, last=1, block="stack")
        adapters = trained(jlp.lora.init(KEY, PARAMS, rank=4, include=("stack",)))
        quantized = jax.jit(jlp.quantize_matmuls(function, rules))
        merged = quantized(jlp.lora.merge(PARAMS, adapters), X)
        assert_same_bytes(quantized(jlp.lora.apply(PARAMS, adapters), X), merged)

    def test_a_quantised_weight_refuses_one_for_training(self):
        with pytest.raises(ValueError, match="layer 'stack/up' has a kernel in NVFP4 1x16, but the recipe wants"):
            jlp.quantize_matmuls(function, jlp.MXFP8BlockScaling())(base(jlp.NVFP4()), X)


class Attention(nn.Module):
    """Flax's own attention and a Dense."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(16, name="up")(nn.MultiHeadDotProductAttention(4, name="attention")(x))


def initialised(model, x):
    """Its variables, of NumPy's normal numbers."""
    return numbers(jax.eval_shape(model.init, KEY, x))


class TestLinen:
    axes = {".*/(query|key|value)": (0, 1), ".*/out": (0, 2)}  # noqa: RUF012

    @pytest.mark.slow
    def test_a_converted_model_trains_its_adapters(self):
        x = random_array((2, 8, 64))
        model = jlp.linen.convert(Attention(), jlp.NVFP4BlockScaling())
        params = initialised(model, x)["params"]
        adapters = jlp.lora.init(KEY, params, rank=4, axes=self.axes, dtype="float32")
        assert len(adapters) == 5
        optimizer = optax.adam(1e-2)

        @jax.jit
        def step(adapters, state):
            def loss(adapters):
                y = model.apply({"params": jlp.lora.apply(params, adapters)}, x)
                return jnp.mean(jnp.square(y.astype(jnp.float32) - 1))

            value, gradients = jax.value_and_grad(loss)(adapters)
            updates, state = optimizer.update(gradients, state)
            return optax.apply_updates(adapters, updates), state, value

        state, losses = optimizer.init(adapters), []
        for _ in range(5):
            adapters, state, value = step(adapters, state)
            losses.append(float(value))
        assert losses[-1] < 0.8 * losses[0]

    @pytest.mark.parametrize("converted", [False, True], ids=["dense", "converted"])
    def test_a_model_served_in_four_bits_takes_adapters(self, converted):
        x = random_array((2, 8, 64))
        model = jlp.linen.convert(Attention()) if converted else jlp.linen.Dense(16, name="up")
        variables = initialised(model, x)
        served = jlp.quantize_params(model, jlp.WeightQAT(jlp.NVFP4()), variables, x)["params"]
        adapters = trained(jlp.lora.init(KEY, served, rank=4, exclude=()))
        apply = jax.jit(model.apply)
        actual = apply({"params": jlp.lora.apply(served, adapters)}, x)
        matrices = jlp.lora.merge(served, adapters)
        merged = jax.tree.map(operator.methodcaller("reshape", -1), matrices)
        merged = jax.tree.map(lambda leaf, like: leaf.reshape(like.shape), merged, variables["params"])
        np.testing.assert_allclose(actual, apply({"params": merged}, x), rtol=0.05, atol=0.05)
        note = jlp.explain(model, None, {"params": jlp.lora.apply(served, adapters)}, x).layers[0].note
        assert note == "loaded, adapter of rank 4"

    def test_an_operand_of_another_dtype_is_refused(self):
        x = random_array((8, 64))
        layer = jlp.linen.Dense(16)
        params = initialised(layer, x)["params"]
        params = jlp.lora.apply({"up": params}, jlp.lora.init(KEY, {"up": params}, rank=4))["up"]
        with pytest.raises(TypeError, match="complex64; needs bfloat16"):
            layer.apply({"params": params}, jnp.ones((8, 64), jnp.complex64))


class TestMeshes:
    """Tokens split over "a", the weight's columns over "b"."""

    def loss(self, adapters, params, x):
        return jnp.sum(jnp.sin(jlp.linear(x, jlp.lora.apply(params, adapters)["up"])))

    def operands(self, fmt):
        w = tenth((64, 32), 1)
        params = {"up": w if fmt is None else jlp.quantize(w, fmt, axis=-2)}
        return trained(jlp.lora.init(KEY, params, rank=4)), params, X

    @by_axis_type
    @pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
    def test_give_the_results_and_gradients_of_one_device(self, fmt, axis_type):
        adapters, params, x = self.operands(fmt)
        run = lambda *args: jax.jit(jax.value_and_grad(self.loss, argnums=0))(*args)  # noqa: E731
        expected = run(adapters, params, x)
        mesh = mesh_of((4, 2), axis_type)
        columns = P(None, "b") if fmt is None else P("b")  # codes and scales of the columns come first
        placed = jax.tree.map(lambda leaf: place(leaf, mesh, columns if leaf.ndim == 2 else P()), params)
        b = place(adapters["up"].b, mesh, P(None, "b"))
        adapters = {"up": jlp.lora.Adapter(place(adapters["up"].a, mesh, P()), b, adapters["up"].alpha)}
        with jax.set_mesh(mesh):
            actual = run(adapters, placed, place(x, mesh, P("a")))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), actual, expected)

    @pytest.mark.slow
    def test_within_shard_map_gradients_are_summed(self):
        adapters, params, x = self.operands(jlp.NVFP4())
        expected = jax.jit(jax.grad(self.loss))(adapters, params, x)
        specs = jax.tree.map(lambda _: P(), (adapters, params))

        def summed(adapters, params, x):
            return jax.lax.psum(self.loss(adapters, params, x), "a")

        split = jax.shard_map(summed, mesh=mesh_of((4,)), in_specs=(*specs, P("a")), out_specs=P())
        actual = jax.jit(jax.grad(split))(adapters, params, x)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), actual, expected)
