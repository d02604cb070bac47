"""quantize_params of functions: parameters in few bits with which the quantised function gives the bits of training."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, random_array

RECIPES = {"int4": jlp.Int4QAT(group_size=16), "nvfp4": jlp.WeightQAT(jlp.NVFP4())}
X = random_array((8, 32), "float32")


def weight(*shape):
    return random_array(shape, "float32", sum(shape))


# function, shape of the parameter, the axis that it is quantised along
SERVED = {
    "last": (lambda w, x: x @ w.T, (48, 32), -1),
    "second last": (lambda w, x: x @ w, (32, 48), -2),
    "left operand": (lambda w, x: w @ x.T, (48, 32), -1),
    "turned twice": (lambda w, x: jax.jit(lambda w: x @ w.T)(w.T), (32, 48), -2),
    "cast": (lambda w, x: x.astype("bfloat16") @ w.astype("bfloat16"), (32, 48), -2),
    "batch": (lambda w, x: jnp.einsum("td,edf->etf", x, w), (3, 32, 24), None),
    "one batch axis": (lambda w, x: jnp.einsum("etd,edf->etf", jnp.stack([x, 2 * x]), w), (2, 32, 24), -2),
    "batch, last": (lambda w, x: jnp.einsum("etd,efd->etf", jnp.stack([x, 2 * x]), w), (2, 24, 32), -1),
    "scan": (lambda w, x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0], (3, 32, 32), -2),
    "scan, last": (lambda w, x: lax.scan(lambda x, w: (jnp.tanh(x @ w.T), None), x, w)[0], (3, 32, 32), -1),
    "remat": (lambda w, x: jax.checkpoint(lambda w: jnp.tanh(x @ w))(w), (32, 48), -2),
    "twice": (lambda w, x: x @ w + (2 * x) @ w, (32, 48), -2),
    "experts": (lambda w, x: lax.ragged_dot(x, w, jnp.array([3, 0, 5])), (3, 32, 24), -2),
    "heads": (lambda w, x: jnp.einsum("td,dnh->tnh", x, w), (32, 4, 8), None),
    "square": (lambda w, x: jnp.einsum("td,dnh->tnh", x, w), (32, 32, 8), None),
    "interleaved": (lambda w, x: jnp.einsum("td,ndh->tnh", x, w), (4, 32, 8), None),
    "two axes": (lambda w, x: jnp.einsum("tnh,nhd->td", x.reshape(8, 4, 8), w), (4, 8, 24), None),
    "both axes": (lambda w, x: x @ w @ w.T, (32, 48), "different axes, -2 and -1"),
    "tied": (lambda w, x: x @ w.T + w[:8].sum(), (48, 32), "uses it in"),
    "looked up": (lambda w, x: w[jnp.arange(8)] @ w.T, (48, 32), "uses it in gather"),
    "returned": (lambda w, x: (x @ w, w), (32, 48), "uses it in its result"),
    "reshaped": (lambda w, x: x @ w.reshape(32, 96), (32, 2, 48), "uses it in reshape"),
    "branch": (lambda w, x: lax.cond(x[0, 0] > 0, lambda w: x @ w, lambda w: -x @ w, w), (32, 48), "uses it in cond"),
    "scaled": (lambda w, x: x @ (w * 0.5), (32, 48), "computed from the parameter by mul"),
}
GOOD = {name for name, (_, _, axis) in SERVED.items() if axis in (-1, -2)}


def whole(params, x):
    """All functions that can be served, in one program."""
    return {name: SERVED[name][0](w, x) for name, w in params.items()}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("adapted", [False, True], ids=["arrays", "adapters"])
def test_the_parameters_give_the_bits_of_training(recipe, adapted):
    params = {name: weight(*SERVED[name][1]) for name in sorted(GOOD)}
    if adapted:
        adapters = jlp.lora.init(jax.random.key(0), params, rank=2, dtype="float32", exclude=("experts",))
        adapters = jax.tree.map(lambda leaf: random_array(leaf.shape, "float32", leaf.size) / 8, adapters)
        params = jlp.lora.apply(params, adapters)
    quantized = jlp.quantize_matmuls(whole, recipe)
    served = jlp.quantize_params(quantized, jlp.FROM_CONTEXT, params, X)
    for name, leaf in served.items():
        kernel = leaf.kernel if isinstance(leaf, jlp.lora.LoRAKernel) else leaf
        assert (kernel.shape, kernel.axis, kernel.format) == (*SERVED[name][1:], recipe.weight_format), name
    run = jax.jit(quantized)
    trained = run(params, X)
    assert_same_bytes(run(served, X), trained)
    without = jlp.quantize_matmuls(whole, None)
    assert_same_bytes(jax.jit(without)(served, X), trained)
    if not adapted:
        dense = jax.jit(whole)(params, X)
        assert all(np.any(np.asarray(dense[name]) != np.asarray(trained[name])) for name in dense)


@pytest.mark.parametrize("name", sorted(SERVED.keys() - GOOD))
def test_what_cannot_be_served_is_an_error_that_names_it(name):
    function, shape, said = SERVED[name]
    said = said or "one of its products contracts neither its last axis nor its second last one"
    with pytest.raises(ValueError, match=rf"the parameter 'up' of shape \({shape[0]}, .*{said}.*exclude="):
        every = dataclasses.replace(RECIPES["int4"], exclude=())  # a table that is looked up and multiplied, too
        jlp.quantize_params(lambda p, x: function(p["up"], x), every, {"up": weight(*shape)}, X)


class TestWhichParameters:
    params = {"up": {"kernel": weight(32, 32), "bias": weight(32)}, "head": weight(32, 16)}

    @staticmethod
    def function(params, x):
        return jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"]) @ params["head"]

    def test_those_that_the_recipe_chooses(self):
        served = jlp.quantize_params(self.function, RECIPES["int4"], self.params, X)
        assert isinstance(served["up"]["kernel"], jlp.QuantizedArray)
        assert served["head"] is self.params["head"] and served["up"]["bias"] is self.params["up"]["bias"]
        explanation = jlp.explain(self.function, None, served, X)
        assert f"  {served['up']['kernel'].format}  -      -         loaded" in str(explanation)
        rows = {row.path: row for row in explanation.layers}
        assert (rows["up"].note, rows["head"].note) == ("loaded", "no recipe")

    @pytest.mark.parametrize(("params", "by_name"), [*itertools.product(["weights", 1], [False, True])])
    def test_they_are_the_argument_that_quantize_matmuls_was_told(self, params, by_name):
        quantized = jlp.quantize_matmuls(lambda x, weights: self.function(weights, x), RECIPES["int4"], params=params)
        given = ((X,), {"weights": self.params}) if by_name else ((X, self.params), {})
        served = jlp.quantize_params(quantized, jlp.FROM_CONTEXT, *given[0], **given[1])
        assert isinstance(served["up"]["kernel"], jlp.QuantizedArray)

    def test_of_several_arguments_they_are_a_tuple(self):
        quantized = jlp.quantize_matmuls(lambda a, b, x: x @ a @ b, RECIPES["int4"], params=(1, 0))
        b, a = jlp.quantize_params(quantized, jlp.FROM_CONTEXT, weight(32, 16), weight(16, 48), X)
        assert (a.shape, b.shape) == ((32, 16), (16, 48))

    def test_a_stack_whose_ends_stay_in_high_precision_is_refused(self):
        rules = jlp.PerLayer.keep_ends(RECIPES["int4"], first=1, last=1, block="up")
        function = SERVED["scan"][0]
        with pytest.raises(ValueError, match="'up' .* the first and last layers of its stack stay in high precision"):
            jlp.quantize_params(lambda p, x: function(p["up"], x), rules, {"up": weight(3, 32, 32)}, X)

    @pytest.mark.parametrize("join", [jnp.stack, lambda parts: jnp.concatenate(parts, 1)])
    def test_parameters_that_the_function_joins_are_refused(self, join):
        def function(p, x):
            whole = join([p["a"], p["b"]])
            return jnp.einsum("tk,ekn->etn", x, whole) if whole.ndim == 3 else x @ whole

        params = {"a": weight(32, 16), "b": weight(32, 16)}
        with pytest.raises(ValueError, match="parameter 'a' .* the function also uses it in (stack|concatenate)"):
            jlp.quantize_params(function, RECIPES["int4"], params, X)

    def test_groups_that_do_not_divide_are_refused(self):
        with pytest.raises(ValueError, match="layer 'up' .* K = 32, which is not a multiple of the group of 64"):
            jlp.quantize_params(self.function, jlp.Int4QAT(64), self.params, X)

    def test_without_a_recipe_of_training_there_are_none(self):
        for recipe in (None, jlp.NVFP4BlockScaling(), jlp.Int4QAT(16, exclude=("",))):
            with pytest.raises(ValueError, match="no layer follows a recipe of quantisation-aware training"):
                jlp.quantize_params(self.function, recipe, self.params, X)

    def test_a_callable_model_needs_arguments(self):
        with pytest.raises(TypeError, match="quantize_params: .*partial.* without arguments; needs"):
            jlp.quantize_params(functools.partial(jnp.dot, jnp.ones((32, 32))), jlp.Int4QAT())

    def test_a_module_is_passed_itself(self):
        linear = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
        with pytest.raises(TypeError, match="parameters are an NNX module; pass the module itself"):
            jlp.quantize_params(lambda model, x: model(x), RECIPES["int4"], linear, X)


def test_a_quantised_parameter_keeps_its_axis():
    """[D, N, H], quantised along N, in a product that contracts D; N is as long as D."""
    q = jlp.quantize(weight(32, 32, 8), jlp.NVFP4(), axis=-2)
    heads = SERVED["square"][0]
    y = jax.jit(jlp.quantize_matmuls(heads, None))(q, X)
    np.testing.assert_allclose(y, heads(q.dequantize(), X), rtol=1e-4, atol=1e-4)
