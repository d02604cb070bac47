"""Tied heads: the product of Embed.attend follows the recipe in converted models as it does by quantize_matmuls."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jaxlowprec as jlp
from tests.flax.libraries import filled, numbers
from tests.helpers import assert_same_bytes

TOKENS = jnp.arange(8).reshape(2, 4) * 3 % 32
NVFP4 = jlp.NVFP4BlockScaling()


class LinenLM(nn.Module):
    """The head is the embedding's table; positions are only looked up."""

    dtype: str = "float32"

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(32, 16, name="tokens", dtype=self.dtype)
        x = embed(tokens) + nn.Embed(4, 16, name="positions", dtype=self.dtype)(jnp.arange(4))
        return embed.attend(nn.Dense(16, name="mlp", use_bias=False, dtype=self.dtype)(x))


class NnxLM(nnx.Module):
    def __init__(self, rngs, dtype="float32"):
        self.tokens = nnx.Embed(32, 16, rngs=rngs, dtype=dtype)
        self.positions = nnx.Embed(4, 16, rngs=rngs, dtype=dtype)
        self.mlp = nnx.Linear(16, 16, use_bias=False, rngs=rngs, dtype=dtype)

    def __call__(self, tokens):
        return self.tokens.attend(self.mlp(self.tokens(tokens) + self.positions(jnp.arange(4))))


class Linen:
    def __init__(self, dtype="float32"):
        self.module = LinenLM(dtype)
        shapes = jax.eval_shape(self.module.init, jax.random.key(0), TOKENS)["params"]
        self.params = numbers(shapes)

    def function(self, params):
        return self.module.apply({"params": params}, TOKENS)

    def converted(self, rules):
        module = jlp.linen.convert(self.module, rules)
        return lambda params: module.apply({"params": params}, TOKENS)

    def explained(self, rules, recipe=jlp.FROM_CONTEXT):
        module = self.module if rules is None else jlp.linen.convert(self.module, rules)
        return jlp.explain(module, recipe, {"params": self.params}, TOKENS)

    def served(self, rules):
        module = jlp.linen.convert(self.module, rules)
        return jlp.quantize_params(module, jlp.FROM_CONTEXT, {"params": self.params}, TOKENS)["params"]


class Nnx:
    def __init__(self, dtype="float32"):
        self.graph, self.state = nnx.split(filled(lambda: NnxLM(nnx.Rngs(0), dtype)))
        self.params = nnx.to_pure_dict(self.state)

    def module(self, params, rules):
        state = jax.tree.map(lambda leaf: leaf, self.state)
        nnx.replace_by_pure_dict(state, params)
        module = nnx.merge(self.graph, state)
        return module if rules is None else jlp.nnx.convert(module, rules)

    def function(self, params):
        return self.module(params, None)(TOKENS)

    def converted(self, rules):
        return lambda params: self.module(params, rules)(TOKENS)

    def explained(self, rules, recipe=jlp.FROM_CONTEXT):
        return jlp.explain(self.module(self.params, rules), recipe)

    def served(self, rules):
        return jlp.quantize_params(self.module(self.params, rules))


@pytest.fixture(scope="module", params=[Linen, Nnx])
def library(request):
    return request.param


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_convert_and_quantize_matmuls_give_the_same_bits(library, dtype):
    model = library(dtype)
    by_function = jlp.quantize_matmuls(model.function, NVFP4)

    @jax.jit
    def results(params):
        def of(function):
            return jax.value_and_grad(lambda p: function(p).astype("float32").std())(params)

        return of(model.converted(NVFP4)), of(by_function), of(model.function)

    converted, expected, plain = results(model.params)
    assert_same_bytes(converted, expected)
    assert np.any(np.asarray(converted[0]) != np.asarray(plain[0]))


@pytest.mark.parametrize(
    "rules",
    [
        jlp.PerLayer((("tokens", None),), default=NVFP4),
        jlp.PerLayer((("tokens", jlp.MXFP8BlockScaling()),), default=None),
        jlp.Int4QAT(16, exclude=("tokens",)),
    ],
    ids=["left out", "chosen", "excluded"],
)
def test_rules_name_it_by_the_embeddings_path(library, rules):
    model = library()
    by_function = jlp.quantize_matmuls(model.function, rules)
    assert_same_bytes(*jax.jit(lambda p: (model.converted(rules)(p), by_function(p)))(model.params))
    rows = {row.path: row.roles for row in jlp.explain(by_function, jlp.FROM_CONTEXT, model.params).layers}
    assert {row.path: row.roles for row in model.explained(rules).layers}["tokens"] == rows["tokens"]


def test_explain_says_what_each_embedding_is(library):
    model = library()
    tied = "looked up, and multiplied as the tied head " + ("(attend)" if library is Linen else "if attend is called")
    rows = {row.path: row for row in model.explained(NVFP4).layers}
    assert rows["tokens"].note == tied
    assert rows["tokens"].roles == rows["mlp"].roles
    assert rows["positions"].note == ("looked up" if library is Linen else tied)
    plain = {row.path: row for row in model.explained(None, NVFP4).layers}
    assert plain["tokens"].note == f"{tied}: no jaxlowprec layer"
    assert plain["tokens"].roles.weight is None


def test_a_tied_table_is_not_served_in_few_bits_by_linen():
    """Its rows are looked up in high precision: the served model would have other ones."""
    with pytest.raises(ValueError, match="layer 'tokens' .* looked up in high precision.* leave it out with exclude="):
        Linen().served(jlp.Int4QAT(16, exclude=("positions",)))


@pytest.mark.parametrize("where", ["own rules", "context"])
def test_nnx_serves_tables_as_they_were_trained(where):
    """Calls of attend are not seen, so no table is refused: it stays, and attend follows the recipe without a scope."""
    model, by_context = Nnx(), where == "context"
    recipe = jlp.Int4QAT(16, exclude=(), scale_dtype="float16" if by_context else "bfloat16")
    trained = model.module(model.params, jlp.FROM_CONTEXT if by_context else recipe)
    scope = jlp.autocast(recipe) if by_context else contextlib.nullcontext()
    with scope, pytest.warns(UserWarning, match="the table of 'tokens' stays in high precision"):
        expected = nnx.jit(lambda model: model(TOKENS))(trained)
        served = jlp.quantize_params(trained)
    assert_same_bytes(served.tokens.embedding[...], trained.tokens.embedding[...])
    assert isinstance(served.mlp.kernel.get_value(), jlp.QuantizedArray)
    assert_same_bytes(nnx.jit(lambda model: model(TOKENS))(served), expected)
    assert trained.tokens.recipe is (jlp.FROM_CONTEXT if where == "context" else trained.mlp.recipe)


def test_a_table_beside_a_linear_head_is_served_without_a_word(recwarn):
    """Neither it nor the smaller table of positions can be a head."""
    model = Nnx().module(Nnx().params, None)
    model.head = nnx.Linear(16, 32, use_bias=False, rngs=nnx.Rngs(1))
    jlp.quantize_params(jlp.nnx.convert(model, jlp.Int4QAT(16, exclude=())))
    assert not [w for w in recwarn if "stays in high precision" in str(w.message)]


def test_tables_alone_are_nothing_to_serve():
    with pytest.raises(ValueError, match="no layer follows a recipe of quantisation-aware training"):
        Nnx().served(jlp.Int4QAT(16, exclude=("mlp",)))


def test_a_model_with_an_excluded_table_is_served(library):
    model, rules = library(), jlp.Int4QAT(16, exclude=("tokens", "positions"))
    served = model.served(rules)
    if library is Linen:
        actual = jax.jit(lambda p: jlp.linen.convert(model.module, rules).apply({"params": p}, TOKENS))(served)
    else:
        actual = nnx.jit(lambda model: model(TOKENS))(served)
    assert_same_bytes(actual, jax.jit(model.converted(rules))(model.params))


def test_delayed_scaling_keeps_a_state_for_it():
    recipe = jlp.DelayedScaling(amax_history_len=2)
    module = jlp.linen.convert(LinenLM(), recipe)
    shapes = jax.eval_shape(module.init, jax.random.key(0), TOKENS)
    assert set(shapes["_overwrite_with_gradient"]) == {"tokens", "mlp"}
    model = jlp.nnx.convert(filled(lambda: NnxLM(nnx.Rngs(0))), recipe)

    @nnx.jit
    def gradients(model):
        return nnx.grad(lambda model: model(TOKENS).std())(model)

    found = gradients(model)
    histories = found["tokens"]["_overwrite_with_gradient"], found["positions"]["_overwrite_with_gradient"]
    (used, unused) = (h["kernel_amax_history"].get_value().max() for h in histories)
    assert used == jnp.abs(model.tokens.embedding[...]).max() and unused == 0
