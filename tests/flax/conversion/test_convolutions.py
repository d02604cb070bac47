"""convert: a Conv that is a matrix product follows the rules, in Linen and NNX; explain says why any other stays."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import jaxlowprec as jlp
from tests.flax.libraries import filled, numbers
from tests.helpers import assert_same_bytes, random_array

RECIPE, DELAYED = jlp.MXFP8BlockScaling(), jlp.DelayedScaling(amax_history_len=3)
X = random_array((2, 9, 8, 32))
LAYERS = {  # arguments of both libraries beside the features
    "patch": {"kernel_size": (2, 4), "strides": (2, 4), "padding": "VALID"},
    "down": {"kernel_size": (1, 1)},
    "mid": {"kernel_size": (3, 3), "padding": "CIRCULAR"},
    "up": {"kernel_size": (1, 1), "strides": 2, "use_bias": False},
}
NOTES = {"patch": "", "down": "", "mid": "a convolution with overlapping windows", "up": ""}
FEATURES = {"patch": (32, 64), "down": (64, 32), "mid": (32, 32), "up": (32, 64)}


class LinenModel(nn.Module):
    """A patch embedding and a bottleneck."""

    @nn.compact
    def __call__(self, x):
        for name, options in LAYERS.items():
            x = jnp.tanh(nn.Conv(FEATURES[name][1], dtype=jnp.bfloat16, name=name, **options)(x))
        return x


class NnxModel(nnx.Module):
    """The same."""

    def __init__(self, rngs):
        for name, options in LAYERS.items():
            setattr(self, name, nnx.Conv(*FEATURES[name], dtype=jnp.bfloat16, rngs=rngs, **options))

    def __call__(self, x):
        for name in LAYERS:
            x = jnp.tanh(getattr(self, name)(x))
        return x


def variables_of(model, x=X):
    return numbers(jax.eval_shape(model.init, jax.random.key(0), x))


def with_gradients(function):
    def loss(params, x):
        y = function(params, x)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def notes_of(explained):
    return {row.path: row.note for row in explained.layers}


def by_dots(params, x):
    """The model by hand."""

    def layer(x, name, patches):
        kernel = params[name]["kernel"].reshape(-1, FEATURES[name][1])
        y = jlp.linear(patches(x.astype(jnp.bfloat16)), kernel, recipe=RECIPE, name=name)
        return jnp.tanh(y + params[name]["bias"].astype(y.dtype) if "bias" in params[name] else y)

    def patches(x):
        return x[:, :8].reshape(2, 4, 2, 2, 4, 32).transpose(0, 1, 3, 2, 4, 5).reshape(2, 4, 2, -1)

    x = layer(layer(x, "patch", patches), "down", lambda x: x)
    kernel, bias = (params["mid"][name].astype(x.dtype) for name in ("kernel", "bias"))
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), "wrap")
    y = lax.conv_general_dilated(padded, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return layer(jnp.tanh(y + bias), "up", lambda x: x[:, ::2, ::2])


@pytest.fixture(scope="module")
def expected():
    """Parameters, and what the model by hand gives."""
    params = variables_of(LinenModel())["params"]
    return params, with_gradients(by_dots)(params, X)


class TestModels:
    def test_linen_has_the_bytes_of_products_by_hand(self, expected):
        model = jlp.linen.convert(LinenModel(), RECIPE)
        explained = jlp.explain(model, jlp.FROM_CONTEXT, {"params": expected[0]}, X)
        assert notes_of(explained) == NOTES
        assert [name for name, fmt in explained.formats.items() if fmt] == ["patch", "down", "up"]
        found = with_gradients(lambda params, x: model.apply({"params": params}, x))(expected[0], X)
        assert_same_bytes(found, expected[1])

    def test_nnx_has_the_bytes_of_products_by_hand(self, expected):
        model = NnxModel(nnx.Rngs(0))
        nnx.update(model, expected[0])
        jlp.nnx.convert(model, RECIPE)
        assert type(model.mid) is nnx.Conv and type(model.patch) is jlp.nnx.Conv
        explained = jlp.explain(model)
        assert notes_of(explained) == NOTES
        assert {name for name, fmt in explained.formats.items() if fmt} == {"patch", "down", "up"}
        graph, params = nnx.split(model)

        def call(params, x):
            return nnx.merge(graph, params)(x)

        (loss, y), gradients = with_gradients(call)(params, X)
        assert_same_bytes(((loss, y), nnx.to_pure_dict(gradients)), expected[1])

    def test_quantize_matmuls_finds_the_same(self, expected):
        theirs = jlp.quantize_matmuls(lambda params, x: LinenModel().apply({"params": params}, x), RECIPE)
        assert notes_of(jlp.explain(theirs, jlp.FROM_CONTEXT, expected[0], X)) == NOTES
        assert_same_bytes(with_gradients(theirs)(expected[0], X), expected[1])

    def test_without_a_recipe_it_is_flaxs(self):
        variables = variables_of(LinenModel())
        model = jlp.linen.convert(LinenModel())
        assert_same_bytes(jax.jit(model.apply)(variables, X), jax.jit(LinenModel().apply)(variables, X))


MASK = np.broadcast_to(np.tri(32, 16), (2, 2, 32, 16))
OPTIONS = {
    "vectors": ((8, 32), {"kernel_size": 2, "strides": 2}),
    "no batch, SAME": ((8, 8, 32), {"kernel_size": (2, 2), "strides": (2, 2), "padding": "SAME"}),
    "batch axes": ((2, 3, 4, 4, 32), {"kernel_size": (1, 1), "padding": "CIRCULAR", "use_bias": False}),
    "masked": ((2, 4, 4, 32), {"kernel_size": (2, 2), "strides": (2, 2), "mask": MASK}),
}


@pytest.mark.parametrize(("shape", "options"), OPTIONS.values(), ids=OPTIONS)
def test_options_are_flaxs(shape, options):
    """The result is near that of Flax's layer, and the same in both libraries."""
    x, flaxs = random_array(shape), nn.Conv(16, **options)
    variables = variables_of(flaxs, x)
    exact = flaxs.apply(variables, x)
    layer = jlp.linen.convert(flaxs, RECIPE)
    assert isinstance(layer, jlp.linen.Conv)
    y = layer.apply(variables, x)
    assert y.shape == exact.shape and y.dtype == exact.dtype
    error = np.linalg.norm(np.float32(y - exact)) / np.linalg.norm(np.float32(exact))
    assert 0.001 < error < 0.1
    size = options["kernel_size"]
    other = nnx.Conv(32, 16, rngs=nnx.Rngs(0), **options | {"kernel_size": (size,) if isinstance(size, int) else size})
    nnx.update(other, variables["params"])
    assert_same_bytes(jlp.nnx.convert(other, RECIPE)(x), y)


class TestWhatStays:
    def test_padding_that_the_inputs_decide(self):
        """SAME pads if the kernel does not divide the input."""
        layer = nn.Conv(16, (4, 4), strides=4)
        for x, note in ((X[:, :8], ""), (X, "a padded convolution")):
            variables = variables_of(layer, x)
            model = jlp.linen.convert(nn.Sequential([layer]), RECIPE)
            inner = {"params": {"layers_0": variables["params"]}}
            assert notes_of(jlp.explain(model, jlp.FROM_CONTEXT, inner, x)) == {"layers_0": note}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                y = model.apply(inner, x)
            exact = layer.apply(variables, x)
            assert bool((y == exact).all()) == bool(note)
            other = nnx.Conv(32, 16, (4, 4), 4, rngs=nnx.Rngs(0))
            nnx.update(other, variables["params"])
            converted = jlp.nnx.convert(nnx.List([other]), RECIPE)
            (row,) = jlp.explain(converted).layers
            assert row.note == "in high precision where its kernel does not divide the input"
            assert_same_bytes(converted[0](x), y)

    def test_an_own_function_and_a_subclass_are_named(self):
        class OwnConv(nnx.Conv):
            """A user's."""

        def product(*args, **kwargs):
            return lax.conv_general_dilated(*args, **kwargs)

        rngs = nnx.Rngs(0)
        own = OwnConv(32, 8, 1, rngs=rngs), nnx.Conv(32, 8, 1, conv_general_dilated=product, rngs=rngs)
        model = nnx.List([*own, nnx.Conv(32, 8, 1, rngs=rngs)])
        with pytest.warns(UserWarning, match=r"'0' \(a OwnConv, a subclass\), '1' \(conv_general_dilated= is set\)"):
            jlp.nnx.convert(model)

    def test_a_model_of_other_convolutions_follows_nothing(self):
        with pytest.warns(UserWarning, match="no layer followed MXFP8BlockScaling"):
            recipe = jlp.MXFP8BlockScaling(fp8_format="HYBRID")
            jlp.nnx.convert(nnx.List([nnx.Conv(32, 8, (3, 3), rngs=nnx.Rngs(0))]), recipe)
        model = jlp.linen.convert(nn.Sequential([nn.Conv(8, (3, 3))]), jlp.Float8BlockScaling())
        with pytest.warns(UserWarning, match="no layer followed Float8BlockScaling"):
            model.init(jax.random.key(0), X)


class TestStates:
    def test_products_have_one_of_delayed_scaling(self):
        model = jlp.linen.convert(LinenModel(), DELAYED)
        states = jax.eval_shape(model.init, jax.random.key(0), X)["_overwrite_with_gradient"]
        assert states.keys() == {"patch", "down", "up"}
        other = jlp.nnx.convert(nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0))), DELAYED)
        has = {n for n in LAYERS if getattr(getattr(other, n), "_overwrite_with_gradient", None) is not None}
        assert has == {"patch", "down", "up"}

    def test_a_kernel_is_quantised_once_for_many_calls(self):
        layer, x = filled(lambda: jlp.nnx.Conv(32, 16, (2, 2), (2, 2), rngs=nnx.Rngs(0))), X[:, :8]
        with jlp.autocast(RECIPE):
            expected = layer(x)
            with jlp.nnx.quantized_kernels(layer):
                assert_same_bytes(layer(x), expected)
            model, params = jlp.linen.Conv(16, (2, 2), (2, 2)), nnx.to_pure_dict(nnx.state(layer, nnx.Param))
            y, quantized = model.apply({"params": params}, x, mutable="quantized")
            again = model.apply({"params": params} | quantized, x)
        assert_same_bytes((y, again), (expected, expected))

    def test_quantized_parameters_are_served(self):
        recipe, x = jlp.Int4QAT(group_size=32), X[:, :8]
        trained = jlp.nnx.convert(filled(lambda: nnx.Conv(32, 16, (2, 2), (2, 2), rngs=nnx.Rngs(0))), recipe)
        expected, served = trained(x), jlp.quantize_params(trained)
        assert served.kernel.get_value().shape == (128, 16)
        assert_same_bytes(served(x), expected)
        model = jlp.linen.convert(nn.Conv(16, (2, 2), (2, 2)), recipe)
        variables = {"params": nnx.to_pure_dict(nnx.state(trained, nnx.Param))}
        assert_same_bytes(model.apply(jlp.quantize_params(model, jlp.FROM_CONTEXT, variables, x), x), expected)
        with pytest.raises(ValueError, match="Conv: a padded convolution, but its kernel is quantised"):
            served(X)
