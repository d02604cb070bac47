"""Norms, NormLinear and MLP of Linen and NNX: the parameters and the bits of separate layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jaxlowprec as jlp
from tests.flax.libraries import numbers
from tests.helpers import assert_same_bytes, often, random_array
from tests.layers.fused.layers import EXACT
from tests.low_precision import recipes

K, F = 64, 96
X = random_array((2, 32, K), jnp.bfloat16)
TWICE = np.asarray(X) + np.asarray(X)
RECIPES = recipes("bf16", "nvfp4", "mxfp8", "fp8_delayed", "int4_qat")
by_recipe = pytest.mark.parametrize(  # what Flax adds is the same for all recipes but those with a state
    "recipe", often([RECIPES["mxfp8"], RECIPES["fp8_delayed"]], RECIPES.values()), ids=RECIPES
)
BF16 = {"dtype": jnp.bfloat16}


def under(recipe):
    return jlp.autocast(recipe, enabled=recipe is not None)


class SeparateNnx(nnx.Module):
    """What a user has: separate layers."""

    def __init__(self, rngs, use_bias=False):
        self.norm = jlp.nnx.RMSNorm(K, rngs=rngs, **BF16)
        options = {"use_bias": use_bias, "rngs": rngs, **BF16}
        self.gate_proj = jlp.nnx.Linear(K, F, name="gate_proj", **options)
        self.up_proj = jlp.nnx.Linear(K, F, name="up_proj", **options)
        self.down_proj = jlp.nnx.Linear(F, K, name="down_proj", **options)

    def __call__(self, x):
        x = self.norm(x)
        return self.down_proj(jlp.swiglu(self.gate_proj(x), self.up_proj(x)))


class SeparateLinen(nn.Module):
    use_bias: bool = False

    @nn.compact
    def __call__(self, x):
        x = jlp.linen.RMSNorm(name="norm", **BF16)(x)
        options = {"use_bias": self.use_bias, **BF16}
        gate, up = (jlp.linen.Dense(F, name=name, **options)(x) for name in ("gate_proj", "up_proj"))
        return jlp.linen.Dense(K, name="down_proj", **options)(jlp.swiglu(gate, up))


def nnx_run(model, x):
    """Outputs, and gradients by path."""
    graph, state = nnx.split(model)

    def loss(state, x):
        y = nnx.merge(graph, state)(x)
        return (y.astype(jnp.float32) ** 2).sum(), y

    grads, y = jax.jit(jax.grad(loss, has_aux=True, allow_int=True), compiler_options=EXACT)(state, x)
    return y, dict(nnx.to_flat_state(grads))


def linen_run(model, variables, x):
    def loss(variables, x):
        y = model.apply(variables, x)
        return (y.astype(jnp.float32) ** 2).sum(), y

    grads, y = jax.jit(jax.grad(loss, has_aux=True, allow_int=True), compiler_options=EXACT)(variables, x)
    return y, {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(grads)}


def assert_same(found, wanted, but=()):
    """Equal bits of outputs and gradients; of those named in `but`, sums over readers, close ones."""
    assert_same_bytes(found[0], wanted[0])
    assert found[1].keys() == wanted[1].keys()
    for name, value in wanted[1].items():
        value, other = (v.get_value() if isinstance(v, nnx.Variable) else v for v in (value, found[1][name]))
        if any(part in str(name) for part in but):
            np.testing.assert_allclose(np.float32(other), np.float32(value), rtol=0.02, atol=0.02 * np.abs(value).max())
        else:
            assert_same_bytes(other, value)


@by_recipe
@pytest.mark.parametrize("saved", ["quantized", "recompute"])
class TestMlp:
    @pytest.mark.slow
    def test_nnx_loads_separate_layers_and_back(self, recipe, saved):
        with under(recipe):
            separate = SeparateNnx(nnx.Rngs(0), use_bias=True)
            mlp = jlp.nnx.MLP(K, F, normalization="rms", use_bias=True, saved=saved, rngs=nnx.Rngs(1), **BF16)
            jlp.nnx.name_layers(mlp)
            nnx.update(mlp, nnx.state(separate))
            assert_same(nnx_run(mlp, X), nnx_run(separate, X), but=("norm",))
            nnx.update(separate, nnx.state(mlp))

    @pytest.mark.slow
    def test_linen_loads_separate_layers(self, recipe, saved):
        separate = SeparateLinen(use_bias=True)
        mlp = jlp.linen.MLP(F, normalization="rms", use_bias=True, saved=saved, **BF16)
        with under(recipe):
            shapes = jax.eval_shape(separate.init, jax.random.key(0), X)
            assert jax.eval_shape(mlp.init, jax.random.key(1), X) == shapes
            variables = numbers(shapes)
            assert_same(linen_run(mlp, variables, X), linen_run(separate, variables, X), but=("norm",))


SIZES = {"query": 64, "key": 32}


@pytest.mark.parametrize("given", [None, 0.25])
def test_a_scale_centred_at_zero(given):
    """Both libraries' layers have the bits of the function; new ones multiply by 1."""
    scale = jnp.zeros(K) if given is None else jnp.full(K, given)
    wanted = jlp.rms_norm(X, scale, zero_centered_gamma=True)
    norm = jlp.nnx.RMSNorm(K, zero_centered_scale=True, rngs=nnx.Rngs(0))
    layer = jlp.linen.RMSNorm(zero_centered_scale=True)
    variables = layer.init(jax.random.key(0), X)
    if given is not None:
        norm.scale.set_value(scale)
        variables = {"params": {"scale": scale}}
    assert_same_bytes(norm(X), wanted)
    assert_same_bytes(layer.apply(variables, X), wanted)


@by_recipe
class TestNormLinear:
    def test_nnx_has_the_bits_of_separate_layers(self, recipe):
        with under(recipe):
            layer = jlp.nnx.NormLinear(K, SIZES, rngs=nnx.Rngs(0), **BF16)
            jlp.nnx.name_layers(layer)

            @nnx.jit
            def both(layer, x):
                h = jlp.rms_norm(x, layer.norm.scale[...])
                return layer(x), {name: getattr(layer, name)(h) for name in SIZES}

            found, expected = both(layer, X)
            assert found.keys() == expected.keys()
            assert_same_bytes(found, expected)

    def test_linen_has_the_bits_of_separate_layers(self, recipe):
        layer = jlp.linen.NormLinear(SIZES, normalization="layer", **BF16)
        with under(recipe):

            @jax.jit
            def both(variables, x):
                norm, expected = variables["params"]["norm"], {}
                h = jlp.layer_norm(x, norm["scale"], norm["bias"])
                for name, size in SIZES.items():
                    own = {kind: leaves[name] for kind, leaves in variables.items()}
                    expected[name] = jlp.linen.Dense(size, **BF16).apply(own, h)
                return layer.apply(variables, x), expected

            found, expected = both(numbers(jax.eval_shape(layer.init, jax.random.key(0), X)), X)
            assert found.keys() == expected.keys()
            assert_same_bytes(found, expected)


@pytest.mark.parametrize("make", [jlp.nnx.NormLinear, jlp.linen.NormLinear])
def test_a_residual_is_added_before_the_norm(make):
    with jlp.autocast(jlp.MXFP8BlockScaling()):
        if make is jlp.nnx.NormLinear:
            layer = make(K, F, rngs=nnx.Rngs(0), **BF16)
            y, total = nnx.jit(lambda layer, x, r: layer(x, r))(layer, X, X)
            alone = nnx.jit(lambda layer, x: layer(x))(layer, TWICE)
        else:
            layer = make(F, **BF16)
            variables = numbers(jax.eval_shape(layer.init, jax.random.key(0), X))
            y, total = jax.jit(layer.apply)(variables, X, X)
            alone = jax.jit(layer.apply)(variables, TWICE)
    assert_same_bytes(total, TWICE)
    assert_same_bytes(y, alone)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
class TestNorms:
    """Ours and Flax's differ by roundings: float32's last bits; in bfloat16 Flax rounds twice."""

    def test_nnx(self, kind, dtype):
        ours, flaxs = (getattr(module, kind)(K, dtype=dtype, rngs=nnx.Rngs(0)) for module in (jlp.nnx, nnx))
        assert jax.tree.structure(nnx.state(ours)) == jax.tree.structure(nnx.state(flaxs))
        assert_close(ours(X), flaxs(X), dtype)

    def test_linen(self, kind, dtype):
        ours, flaxs = (getattr(module, kind)(dtype=dtype) for module in (jlp.linen, nn))
        variables = flaxs.init(jax.random.key(0), X)
        assert jax.tree.structure(ours.init(jax.random.key(0), X)) == jax.tree.structure(variables)
        assert_close(ours.apply(variables, X), flaxs.apply(variables, X), dtype)


def assert_close(found, wanted, dtype):
    assert found.dtype == wanted.dtype == dtype
    rtol = 1e-5 if dtype == jnp.float32 else 2**-7
    np.testing.assert_allclose(np.float32(found), np.float32(wanted), rtol=rtol, atol=rtol)


class TestLayersThatComputeThemselves:
    """Layers that a function cannot compute for are called."""

    @pytest.mark.slow
    def test_with_adapters(self):
        mlp = jlp.nnx.MLP(K, F, rngs=nnx.Rngs(0), **BF16)
        before = mlp(X)
        jlp.nnx.add_lora(mlp, rank=4, rngs=nnx.Rngs(1))
        assert type(mlp.up_proj) is jlp.nnx.LoRALinear
        with jlp.autocast(jlp.MXFP8BlockScaling()):
            y, grads = nnx_run(mlp, X)
        assert y.shape == before.shape
        adapters = [v for path, v in grads.items() if "lora_b" in str(path)]
        assert len(adapters) == 3
        assert all(np.abs(np.float32(v.get_value())).max() > 0 for v in adapters)

    def test_with_a_product_of_their_own(self):
        called = []

        def own(*args, **kwargs):
            called.append(args)
            return jax.lax.dot_general(*args, **kwargs)

        mlp = jlp.nnx.MLP(K, F, dot_general=own, rngs=nnx.Rngs(0), **BF16)
        with jlp.autocast(jlp.MXFP8BlockScaling()), pytest.warns(UserWarning, match="dot_general"):
            mlp(X)
        assert len(called) == 3

    def test_loaded_kernels(self):
        mlp = jlp.nnx.MLP(K, F, rngs=nnx.Rngs(0), **BF16)
        jlp.nnx.name_layers(mlp)
        with jlp.autocast(jlp.Int4QAT(group_size=32, exclude=())):
            trained = mlp(X)
        for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            served = jlp.quantize(layer.kernel[...].astype(jnp.bfloat16), jlp.Int4(32), axis=-2)
            layer.kernel.set_value(served)
        assert_same_bytes(mlp(X), trained)


@pytest.mark.slow
def test_kernels_quantised_once():
    mlp = jlp.nnx.MLP(K, F, rngs=nnx.Rngs(0), **BF16)
    with jlp.autocast(jlp.NVFP4BlockScaling()):
        plain = nnx_run(mlp, X)
        with jlp.nnx.quantized_kernels(mlp):
            y, grads = nnx_run(mlp, X)
        assert_same((y, {path: grads[path] for path in plain[1]}), plain)
    mlp = jlp.linen.MLP(F, **BF16)
    with jlp.autocast(jlp.NVFP4BlockScaling()):
        variables = mlp.init(jax.random.key(0), X)
        y, quantized = mlp.apply(variables, X, mutable="quantized")
        assert sorted(quantized["quantized"]) == ["down_proj", "gate_proj", "up_proj"]
        assert_same_bytes(mlp.apply(variables | quantized, X), y)
        assert_same_bytes(mlp.apply(variables, X), y)


@pytest.mark.parametrize("activation", ["gelu", "relu_squared", jnp.tanh])
def test_an_mlp_without_a_gate(activation):
    mlp = jlp.nnx.MLP(K, F, activation=activation, rngs=nnx.Rngs(0), **BF16)
    assert not hasattr(mlp, "gate_proj")
    function = activation if callable(activation) else getattr(jlp, activation)
    with jlp.autocast(jlp.NVFP4BlockScaling()):
        assert_same_bytes(mlp(X), mlp.down_proj(function(mlp.up_proj(X))))


@pytest.mark.slow
def test_explain_sees_the_layers_of_linen_blocks():
    recipe = jlp.Int4QAT(group_size=16)
    for model, names in (
        (jlp.linen.MLP(F, normalization="rms"), {"gate_proj", "up_proj", "down_proj"}),
        (jlp.linen.NormLinear({"query": F, "key": 32}, use_bias=False), {"query", "key"}),
    ):
        variables = model.init(jax.random.key(0), X)
        assert set(jlp.explain(model, recipe, variables, X).formats) == names
        quantized = jlp.quantize_params(model, recipe, variables, X)["params"]
        assert all(isinstance(quantized[name]["kernel"], jlp.QuantizedArray) for name in names)


def test_rules_that_name_one_layer():
    mlp = jlp.nnx.MLP(K, F, rngs=nnx.Rngs(0), **BF16)
    jlp.nnx.name_layers(mlp)
    rules = jlp.PerLayer((("down_proj", None),), default=jlp.NVFP4BlockScaling())
    with jlp.autocast(rules):
        assert_same_bytes(mlp(X), mlp.down_proj(jlp.swiglu(mlp.gate_proj(X), mlp.up_proj(X))))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"activation": "swigloo"}, "needs one of 'geglu', 'gelu'"),
        ({"saved": "4bit"}, "saved='4bit'"),
        ({"normalization": "batch"}, "normalization='batch'"),
        ({"activation": "gelu", "gated": True}, "leave gated= out"),
    ],
    ids=["activation", "saved", "normalization", "gated"],
)
class TestErrors:
    def test_nnx(self, arguments, says):
        with pytest.raises(ValueError, match=f"MLP: .*{says}"):
            jlp.nnx.MLP(K, F, rngs=nnx.Rngs(0), **arguments)

    def test_linen(self, arguments, says):
        with pytest.raises(ValueError, match=f"MLP: .*{says}"):
            jlp.linen.MLP(F, **arguments).init(jax.random.key(0), X)


@pytest.mark.parametrize("name", ["norm", "two words", 3])
def test_a_layer_that_cannot_have_this_name(name):
    with pytest.raises(ValueError, match="NormLinear: out_features has a layer named"):
        jlp.nnx.NormLinear(K, {name: 32}, rngs=nnx.Rngs(0))
