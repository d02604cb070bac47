"""Values in messages, and arguments that used to raise riddles."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.arguments import shown, whole_number

X = jnp.ones((16, 32))
SCALES = jlp.quantize(X, jlp.MXFP8()).scale
RECIPE = jlp.MXFP8BlockScaling()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (10**5000, "an int of 16610 bits"),
        ((-(10**5000),), "(an int of 16610 bits,)"),
        (np.zeros((2, 3), np.int8), "ndarray of int8[2, 3]"),
        ("a\nb", r"'a\nb'"),
        (3, "3"),
        (np.float32(2), "np.float32(2.0)"),
    ],
    ids=["int", "nested", "array", "text", "small", "scalar"],
)
def test_values_are_shown_in_a_line(value, text):
    assert shown(value) == text


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, list(range(10**6)), jnp.ones((1000, 1000)), object()],
    ids=["text", "list", "array", "object"],
)
def test_large_values_are_shown_short(value):
    assert len(shown(value)) < 200


def test_whole_numbers_of_any_kind():
    assert [whole_number("f", "n", n, 0) for n in (3, np.int8(3), np.array(3), jnp.uint8(3))] == [3] * 4
    for value in (3.0, True, np.bool_(True), "3", None, jnp.ones(1)):
        with pytest.raises(TypeError, match=r"^f: n=.*; needs an int from 0 on$"):
            whole_number("f", "n", value, 0)
    with pytest.raises(ValueError, match="^f: n=-1; needs an int from 0 on$"):
        whole_number("f", "n", -1, 0)
    with pytest.raises(ValueError, match="^f: n=an int of 137 bits; needs at most 7$"):
        whole_number("f", "n", 10**41, 0, 7)


LAYERS = {
    "Dense": lambda inputs: jlp.linen.Dense(8, recipe=RECIPE).init(jax.random.key(0), inputs),
    "DenseGeneral": lambda inputs: jlp.linen.DenseGeneral(8, recipe=None).init(jax.random.key(0), inputs),
    "Linear": lambda inputs: jlp.nnx.Linear(32, 8, rngs=nnx.Rngs(0), recipe=RECIPE)(inputs),
    "LinearGeneral": lambda inputs: jlp.nnx.LinearGeneral(32, 8, rngs=nnx.Rngs(0), recipe=None)(inputs),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (2.0, ValueError, "inputs is a scalar; needs [..., features]"),
        ("text", TypeError, "inputs='text'; needs an array"),
        (jlp.quantize(X, jlp.NVFP4()), TypeError, "inputs=QuantizedArray of float32[16, 32]; needs an array"),
        (object(), TypeError, "inputs=<object object at"),
    ],
    ids=["scalar", "text", "quantised", "object"],
)
def test_what_a_layer_is_called_with(layer, inputs, error, message):
    with pytest.raises(error, match=f"^{layer}: {re.escape(message)}"):
        jax.eval_shape(lambda: LAYERS[layer](inputs))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: jlp.layouts.swizzle(SCALES == SCALES), ValueError, "^swizzle: scale has .* bool; needs"),
        (lambda: jlp.layouts.swizzle(X.astype("int4")), ValueError, "^swizzle: scale has .* int4; needs"),
        (lambda: jlp.layouts.gemm_scales(jlp.quantize(X, jlp.Int4(16))), TypeError, "^gemm_scales: fmt=Int4.*; needs"),
        (
            lambda: jlp.layouts.logical_scales(SCALES, jlp.MXFP8(), rows=16, columns=32),
            ValueError,
            "^logical_scales: .* need ",
        ),
        (
            lambda: jlp.layouts.unswizzle(SCALES, rows=16, columns="1"),
            TypeError,
            "^unswizzle: columns='1'; needs an int",
        ),
        (lambda: jlp.moe.RoutingTape.of_layers(np.array(1)), TypeError, "^RoutingTape.of_layers: layers=.*; needs"),
        (lambda: jlp.moe.RoutingTape.afresh(2, 4.0, 2), TypeError, "^RoutingTape.afresh: tokens=4.0; needs an int"),
        (lambda: jlp.moe.dispatch([[0]], 2), TypeError, r"^dispatch: experts=\[\[0\]\]; needs int32"),
        (lambda: jlp.moe.combine(X, X, None), TypeError, "^combine: where=None; needs a Dispatch"),
        (lambda: jlp.delayed_scaling.init_state("x"), TypeError, "^init_state: recipe='x'; needs a DelayedScaling"),
        (lambda: jlp.delayed_scaling.add_gradients({"w": X}, {"w": X[0]}), ValueError, r"^add_gradients: \['w'\] has"),
        (lambda: jlp.delayed_scaling.add_gradients("no", "yes"), TypeError, "^add_gradients: .*needs an array"),
        (lambda: jlp.quantize_params(None, RECIPE), TypeError, "^quantize_params: model is a NoneType; needs"),
        (lambda: jlp.explain(jlp.linen.Dense(8), RECIPE), TypeError, "^explain: a Linen module, then nothing; needs"),
        (lambda: jlp.nnx.name_layers(None), TypeError, "^name_layers: model is a NoneType; needs an NNX module"),
        (lambda: jlp.Hadamard(16, itertools.count(1)), ValueError, r"^Hadamard: signs=count\(.*; needs"),
        (lambda: jlp.linear(X, X.T, name=3, recipe=RECIPE), TypeError, "^linear: name=3; needs a string"),
        (lambda: jlp.linear(X, X.T, key=3, recipe=RECIPE), TypeError, "^linear: key=3; needs a JAX key"),
        (lambda: jlp.einsum("a b", X, X, recipe=RECIPE), ValueError, "^einsum: "),
        (lambda: jlp.traffic.collectives(3), TypeError, "^collectives: compiled=3; needs jax.jit"),
    ],
)
def test_arguments_are_named_by_who_was_called(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_dense_layers_without_an_end_are_refused():
    options = {"num_layers": 2, "k": 2, "num_experts": 4}
    with pytest.raises(TypeError, match=r"^routed_experts: dense_layers=count\(0\); needs the numbers of layers"):
        jlp.moe.RoutingTape.from_routed_experts([], dense_layers=itertools.count(), **options)
    jlp.moe.RoutingTape.from_routed_experts([], dense_layers=np.asarray([1]), **options)
