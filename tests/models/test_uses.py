"""Routers and heads stay in high precision by default: by their shapes and uses, where their names cannot tell."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import jaxlowprec as jlp
from tests.helpers import random_array

VOCABULARY, D, FF, EXPERTS = 96, 32, 96, 8  # an MLP as wide as the vocabulary
KEEP = jlp.PerLayer((), jlp.MXFP8BlockScaling(), exclude=jlp.DEFAULT_EXCLUDE)
TOKENS = np.arange(16)


def matrix(*shape):
    return random_array(shape, "float32", sum(shape))


def quantised(explained):
    return {path for path, fmt in explained.formats.items() if fmt is not None}


def decoder(choose, run, names=("gate", "words")):
    """A function of a mixture of experts and a gated MLP: `gate` is the name of the router and of the MLP's gate."""
    gate, words = names

    def layer(x, p):
        scores = x @ p["router_of"][gate]
        x = x + choose(scores)[:, :1] * jnp.tanh(x)
        return x + (jax.nn.silu(x @ p["mlp"][gate]) * (x @ p["mlp"]["up"])) @ p["mlp"]["down"]

    def loss(p, tokens):
        x = run(layer, p["tok"][tokens], p["layers"])
        logits = (x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True))) @ p[words]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], 1).mean()

    one = {
        "router_of": {gate: matrix(D, EXPERTS)},
        "mlp": {gate: matrix(D, FF), "up": matrix(D, FF), "down": matrix(FF, D)},
    }
    params = {"tok": matrix(VOCABULARY, D), words: matrix(D, VOCABULARY)}
    return loss, params, one


def unrolled(layer, x, layers):
    for p in layers:
        x = jax.checkpoint(layer)(x, p)
    return x


def scanned(layer, x, layers):
    return lax.scan(lambda x, p: (jax.jit(layer)(x, p), None), x, layers)[0]


CHOICES = {
    "top-k of a softmax": lambda scores: lax.top_k(jax.nn.softmax(scores), 2)[0],
    "top-k of sigmoids and a bias": lambda scores: lax.top_k(jax.nn.sigmoid(scores) + jnp.arange(EXPERTS) / 9, 2)[0],
    "argmax": lambda scores: jnp.argmax(scores, -1)[:, None].astype(jnp.float32),
    "softmax": jax.nn.softmax,
}


class TestFunctions:
    @pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
    @pytest.mark.parametrize("run", [unrolled, scanned])
    def test_routers_and_heads_are_known_by_their_uses(self, choose, run):
        loss, params, one = decoder(choose, run)
        stacked = run is scanned
        layers = jax.tree.map(lambda leaf: np.stack([leaf] * 2), one) if stacked else [one]
        found = jlp.explain(jlp.quantize_matmuls(loss, KEEP), jlp.FROM_CONTEXT, params | {"layers": layers}, TOKENS)
        block = "layers" if stacked else "layers/0"
        assert quantised(found) == {f"{block}/mlp/{name}" for name in ("gate", "up", "down")}
        notes = {layer.path: layer.note for layer in found.layers}
        assert notes[f"{block}/mlp/gate"] == "no router by its shape or use"
        assert notes["words"] == "left out by the recipe, a head by its shape or use"

    def test_what_contracts_as_many_features_as_words_is_no_head(self):
        """The trace does not see that `down` feeds the head: the norm's einsum has the features in front."""
        params = {"tok": matrix(VOCABULARY, D), "up": matrix(D, VOCABULARY), "down": matrix(VOCABULARY, D)}

        def loss(p, tokens):
            x = jax.nn.silu(p["tok"][tokens] @ p["up"]) @ p["down"]
            return (jnp.einsum("td,d->td", x, p["scale"]) @ p["words"]).sum()

        params |= {"scale": matrix(D), "words": matrix(D, VOCABULARY)}
        found = jlp.explain(jlp.quantize_matmuls(loss, KEEP), jlp.FROM_CONTEXT, params, TOKENS)
        assert quantised(found) == {"up", "down"}

    def test_heads_as_wide_as_the_vocabulary_are_no_head(self):
        """Nothing contracts the last axis of values; their weight [heads, d, D] is no matrix, but contracts D."""
        params = {"tok": matrix(D, D), "v": np.stack([matrix(8, D)] * 2), "words": matrix(D, D)}

        def loss(p, tokens):
            x = p["tok"][tokens]
            values = jnp.einsum("td,hkd->thk", x, p["v"]).repeat(D // 16, -1).reshape(x.shape)
            return jax.nn.logsumexp((x + values) @ p["words"], -1).sum()

        found = jlp.explain(jlp.quantize_matmuls(loss, KEEP), jlp.FROM_CONTEXT, params, TOKENS)
        assert quantised(found) == {"v"}

    def test_a_router_of_any_name_is_known_by_its_top_k(self):
        loss, params, one = decoder(CHOICES["top-k of a softmax"], unrolled, ("chooser", "words"))
        found = jlp.explain(jlp.quantize_matmuls(loss, KEEP), jlp.FROM_CONTEXT, params | {"layers": [one]}, TOKENS)
        assert "layers/0/mlp/chooser" in quantised(found) and "layers/0/router_of/chooser" not in quantised(found)

    @pytest.mark.parametrize("name", ["output", "fc", "decoder"])
    def test_a_head_of_such_a_name_is_known_by_its_softmax(self, name):
        params = {name: matrix(D, 10), "block": {name: matrix(D, D)}}

        def loss(p, x):
            return -jax.nn.log_softmax(jnp.tanh(x @ p["block"][name]) @ p[name])[:, 0].mean()

        assert quantised(jlp.explain(loss, KEEP, params, matrix(16, D))) == {f"block/{name}"}

    @pytest.mark.parametrize("rules", [jlp.MXFP8BlockScaling(), jlp.PerLayer((), jlp.MXFP8BlockScaling())])
    def test_a_recipe_that_keeps_none_asks_for_no_use(self, rules):
        loss, params, one = decoder(CHOICES["argmax"], unrolled)
        found = jlp.explain(loss, rules, params | {"layers": [one]}, TOKENS)
        assert {"words", "layers/0/router_of/gate", "layers/0/mlp/gate"} <= quantised(found)

    def test_a_gate_is_trained_for_serving(self):
        """Of a recipe whose own patterns leave `gate` out."""
        params, x = {"mlp": {"gate": matrix(D, FF), "down": matrix(FF, D)}}, matrix(16, D)
        loss = lambda p, x: jnp.tanh(x @ p["mlp"]["gate"]) @ p["mlp"]["down"]  # noqa: E731
        found = jlp.quantize_matmuls(loss, jlp.Int4QAT(32))(params, x)
        every = jlp.quantize_matmuls(loss, jlp.Int4QAT(32, exclude=()))(params, x)
        assert (found == every).all()


class Gated(nnx.Module):
    def __init__(self, width, rngs):
        self.gate, self.up = nnx.Linear(D, width, rngs=rngs), nnx.Linear(D, width, rngs=rngs)
        self.down = nnx.Linear(width, D, rngs=rngs)


class Mixture(nnx.Module):
    def __init__(self, rngs):
        self.gate, self.mlps = nnx.Linear(D, EXPERTS, rngs=rngs), nnx.List([Gated(16, rngs), Gated(FF, rngs)])
        self.embed, self.fc = nnx.Embed(VOCABULARY, D, rngs=rngs), nnx.Linear(D, VOCABULARY, rngs=rngs)
        self.blocks = nnx.List([nnx.Dict(fc=nnx.Linear(D, VOCABULARY, rngs=rngs))])


def test_nnx_convert_decides_by_shape():
    model = jlp.nnx.convert(Mixture(nnx.Rngs(0)), KEEP)
    expected = {f"mlps/{i}/{name}" for i in range(2) for name in ("gate", "up", "down")} | {"blocks/0/fc"}
    assert quantised(jlp.explain(model)) == expected
    assert quantised(jlp.explain(jlp.nnx.convert(Mixture(nnx.Rngs(0)), jlp.Int4QAT(16)))) == expected


class LinenMixture(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, D, name="embed")(tokens)
        scores = nn.Dense(EXPERTS, name="gate")(x)
        x = nn.Dense(FF, name="block_0_fc")(x) + scores.sum()
        x = nn.Dense(FF, name="moe_gate")(x)
        return nn.Dense(VOCABULARY, name="fc")(nn.Dense(D, name="down")(Wide(name="mlp")(x)))


class Wide(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2 * FF, name="gate")(x)


def test_linen_convert_decides_by_shape():
    for rules in (KEEP, jlp.Int4QAT(16)):
        model = jlp.linen.convert(LinenMixture(), rules)
        variables = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
        found = jlp.explain(model, jlp.FROM_CONTEXT, variables, TOKENS)
        assert quantised(found) == {"block_0_fc", "down", "mlp/gate"}, str(found)
        assert {layer.path: layer.note for layer in found.layers}["fc"] == "left out by the recipe"
