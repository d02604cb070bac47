"""convert says which matrices it does not reach: those of modules that are none of Flax's layers."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jaxlowprec as jlp
from tests.helpers import random_array

MXFP8 = jlp.MXFP8BlockScaling()
X = random_array((16, 32), "float32")


class OwnEinsum(nnx.Module):
    """As tunix's, and as those of Flax's examples."""

    def __init__(self, shape):
        self.w = nnx.Param(jnp.ones(shape))


class Experts(nnx.Module):
    def __init__(self, rngs):
        self.q = OwnEinsum((32, 4, 8))
        self.router = nnx.Linear(32, 4, rngs=rngs)
        self.experts = nnx.List([nnx.Dict(up=nnx.Param(jnp.ones((32, 48)))) for _ in range(2)])
        self.norm, self.embed = nnx.LayerNorm(32, rngs=rngs), nnx.Embed(8, 32, rngs=rngs)
        self.conv, self.scale = nnx.Conv(3, 4, (3, 3), rngs=rngs), nnx.Param(jnp.ones((1, 32)))
        self.pos_embed = nnx.Param(jnp.ones((16, 32)))


class OwnConv1D(nn.Module):
    """As that of Hugging Face's GPT-2."""

    features: int

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.ones, (self.features, x.shape[-1]))
        return jax.lax.dot_general(x, kernel.T, (((x.ndim - 1,), (0,)), ((), ())))


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        positions = self.param("positions", nn.with_partitioning(nn.initializers.ones, (None, None)), (16, 32))
        x = nn.LayerNorm()(x + positions)
        for i in range(2):
            x = x + nn.jit(OwnConv1D)(32, name=f"h_{i}")(x)
        return nn.Dense(8, name="head")(x)


class OnlyFlaxs(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x)[None])[0]
        return nn.Dense(8)(nn.RNN(nn.GRUCell(32))(nn.Conv(32, (3,))(x)[None])[0])


def said(recwarn):
    return [str(w.message) for w in recwarn if "matrices are quantised" in str(w.message)]


class TestNnx:
    def test_the_largest_are_named_and_the_way(self):
        with pytest.warns(UserWarning) as found:
            model = jlp.nnx.convert(Experts(nnx.Rngs(0)), MXFP8)
        assert said(found) == [
            "nnx.convert: 1 of 4 matrices are quantised; left: 'experts/0/up' [32, 48], 'experts/1/up' [32, 48], "
            "'q/w' [32, 4, 8], which are parameters of modules that are none of Flax's layers; "
            "jaxlowprec.quantize_matmuls reaches products by any parameter"
        ]
        rows = {layer.path: (layer.kernel, layer.note) for layer in jlp.explain(model).layers}
        own = "its module's own: see jaxlowprec.quantize_matmuls"
        assert rows["q/w"] == ((32, 4, 8), own) and rows["experts/1/up"] == ((32, 48), own)
        assert rows["router"][1] == "" and rows["pos_embed"][1] == own
        assert rows.keys() == {"q/w", "experts/0/up", "experts/1/up", "router", "embed", "conv", "pos_embed"}

    def test_what_the_rules_leave_out_is_not_named(self, recwarn):
        rules = jlp.PerLayer((("(q|experts)/.*", None),), MXFP8)
        jlp.nnx.convert(Experts(nnx.Rngs(0)), rules)
        assert not said(recwarn)

    def test_under_the_scopes_recipe_too(self):
        with pytest.warns(UserWarning, match="1 of 4 matrices"):
            jlp.nnx.convert(Experts(nnx.Rngs(0)))

    def test_a_model_of_flaxs_layers_says_nothing(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            attention = nnx.MultiHeadAttention(2, 32, rngs=nnx.Rngs(0), decode=False)
            jlp.nnx.convert(nnx.Sequential(attention, nnx.LSTMCell(32, 32, rngs=nnx.Rngs(0))), MXFP8)


class TestLinen:
    def test_the_largest_are_named_and_the_way(self):
        model = jlp.linen.convert(Decoder(), MXFP8)
        with pytest.warns(UserWarning) as found:
            variables = model.init(jax.random.key(0), X)
            model.apply(variables, X)
        assert said(found) == [
            "linen.convert: 1 of 4 matrices are quantised; left: 'h_0/kernel' [32, 32], 'h_1/kernel' [32, 32], "
            "'positions' [16, 32], which are parameters of modules that are none of Flax's layers; "
            "jaxlowprec.quantize_matmuls reaches products by any parameter"
        ]
        notes = {layer.path: layer.note for layer in jlp.explain(model, jlp.FROM_CONTEXT, variables, X).layers}
        own = "its module's own: see jaxlowprec.quantize_matmuls"
        assert notes == {"h_0/kernel": own, "h_1/kernel": own, "positions": own, "head": ""}

    def test_a_model_of_flaxs_layers_says_nothing(self):
        model = jlp.linen.convert(OnlyFlaxs(), MXFP8)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            jax.eval_shape(model.init, jax.random.key(0), X)
