"""An MLP's activation and its gradients quantised in the pass that makes them: the same bits, and when it is done."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest

import jaxlowprec as jlp
from tests.cuda_without_gpu.claiming_cuda import claiming_cuda, custom_calls
from tests.helpers import assert_same_bytes, often, random_array
from tests.layers.fused.layers import (
    ACTIVATIONS,
    EVERY,
    QUANTIZE,
    SAVED,
    composed_mlp,
    mlp_operands,
    states_for,
    step,
    traced_calls,
)

ACTIVATE, GRADIENT = "jaxlowprec_activation", "jaxlowprec_activation_gradient"
PRODUCERS = (ACTIVATE, f"{ACTIVATE}_quantize", GRADIENT, f"{GRADIENT}_quantize", QUANTIZE)
ONE_PASS = (
    "mxfp8",
    "fp8_block",
    "mxfp4",
    "mxfp8 hybrid 2d",
    "fp8_block input 2d",
    "fp8_block gradient 2d",
    "dequantized backward",
)
MXFP8 = EVERY["mxfp8"]


def operands(gated=True, shape=(2, 32, 64), dtype="bfloat16"):
    x, kernels, _, dy = mlp_operands(shape, 96, 64, gated=gated, dtype=dtype)
    return x, kernels, dy


@pytest.mark.sampled(3)
@pytest.mark.parametrize("saved", ["quantized", "recompute"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("recipe", ONE_PASS)
def test_bits_are_those_of_layers(recipe, activation, saved):
    given = operands(activation in ("swiglu", "geglu"))
    options = {"recipe": EVERY[recipe], "activation": activation}
    assert_same_bytes(step(jlp.mlp, *given, **options, saved=saved), step(composed_mlp, *given, **options))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((5, 33), "float32"), ((2, 3, 7, 40), "float16"), ((64,), "bfloat16")], ids=str
)
@pytest.mark.parametrize("recipe", often(["mxfp8"], ["mxfp8", "fp8_block", "mxfp4"]))
def test_any_shape_and_dtype(recipe, shape, dtype):
    x, kernels, _, dy = mlp_operands(shape, 17, 19, dtype=dtype)
    options = {"recipe": EVERY[recipe]}
    assert_same_bytes(step(jlp.mlp, x, kernels, dy, **options), step(composed_mlp, x, kernels, dy, **options))


@pytest.mark.parametrize("which", ["none", "gate", "gate and up"])
@pytest.mark.parametrize("recipe", ["mxfp8", "dequantized backward"])
def test_kernels_that_do_not_learn(recipe, which):
    """They have no gradient, so that the gradients of their results are not read columnwise."""
    x, kernels, dy = operands()
    quantized = [jlp.quantize_kernel(w, EVERY[recipe]) for w in kernels]
    frozen = {"none": 0, "gate": 1, "gate and up": 2}[which]

    def run(function, kernels, **options):
        def call(x, learning):
            return function(x, [*kernels[:frozen], *learning], recipe=EVERY[recipe], **options)

        y, pullback = jax.vjp(call, x, kernels[frozen:])
        return y, pullback(dy)

    @jax.jit
    def both(quantized):
        given = [*quantized[:frozen], *[None] * 3][:3]
        return run(jlp.mlp, [*[None] * frozen, *kernels[frozen:]], quantized_kernels=given), run(composed_mlp, kernels)

    assert_same_bytes(*both(quantized))


def lowered_for_gpus(function, *args):
    """How often each kernel is in a function's code for NVIDIA GPUs, which has calls of equal shapes once."""
    with claiming_cuda(9.0):
        return collections.Counter(call.target for call in custom_calls(function, *args))


def calls(*, recipe=MXFP8, gradient=True, activation="swiglu", count=traced_calls, **options):
    """How often each kernel is called that makes operands of GEMMs, by what `count` says."""
    x, kernels, dy = operands(activation != "silu")
    function = functools.partial(jlp.mlp, recipe=recipe, activation=activation, **options)

    def run(x, kernels):
        if not gradient:
            return function(x, kernels)
        results = jax.vjp(function, x, kernels, has_aux="states" in options)
        return results[0], results[1](dy)

    found = count(run, x, kernels)
    return tuple(found[name] for name in PRODUCERS)


class TestWhatRuns:
    """In the order of PRODUCERS. Quantised by themselves: x, three kernels, and the gradient of the result."""

    @pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block", "mxfp4"])
    @pytest.mark.parametrize(("saved", "further"), [*zip(SAVED, (0, 2, 0), strict=True)])
    def test_one_pass_each(self, saved, further, recipe):
        assert calls(recipe=EVERY[recipe], saved=saved) == (0, 2, 0, 1, 5 + further)

    @pytest.mark.parametrize("activation", ["swiglu", "silu"])
    @pytest.mark.parametrize("recipe", often(["mxfp8"], ["mxfp8", "fp8_block", "mxfp4"]))
    def test_one_pass_each_on_gpus(self, recipe, activation):
        assert calls(recipe=EVERY[recipe], activation=activation, count=lowered_for_gpus)[:4] == (0, 2, 0, 1)

    def test_one_operand(self):
        assert calls(activation="silu") == (0, 2, 0, 1, 4)

    def test_without_a_gradient(self):
        assert calls(gradient=False) == (0, 1, 0, 0, 4)

    def test_the_gradient_of_a_bias_is_a_sum_in_high_precision(self):
        of_hidden = random_array((96,), "float32")
        assert calls(biases=[of_hidden, None, None]) == (0, 2, 1, 0, 7)
        assert calls(biases=[None, None, random_array((64,), "float32")]) == (0, 2, 0, 1, 5)

    @pytest.mark.parametrize("recipe", ["nvfp4", "fp8_current"])
    def test_a_tensor_scale_needs_the_amax_first(self, recipe):
        assert calls(recipe=EVERY[recipe]) == (2, 0, 1, 0, 9)

    def test_delayed_scaling_records_the_activation(self):
        recipe = EVERY["fp8_delayed"]
        assert calls(recipe=recipe, states=states_for(recipe, 3))[:4] == (2, 0, 1, 0)

    def test_functions_have_no_kernel(self):
        def product(gate, up):
            return jnp.tanh(gate) * up

        assert calls(activation=product) == (0, 0, 0, 0, 9)

    def test_what_gemms_read_in_high_precision_is_stored(self):
        def found(**gemms):
            return calls(recipe=jlp.PerGemm(**dict.fromkeys(("fprop", "dgrad", "wgrad"), MXFP8) | gemms))[:4]

        assert found() == (0, 2, 0, 1)
        assert found(fprop=None) == (1, 1, 0, 1)
        assert found(dgrad=None) == (0, 2, 1, 0)
        assert found(wgrad=None) == (1, 1, 1, 0)
        assert calls(recipe=jlp.MXFP8BlockScaling(backward_override="high_precision"))[:4] == (1, 1, 1, 0)

    def test_random_bits_come_from_the_stored_gradient(self):
        def roles(role):
            is_gradient = role.tensor_type == "grad_output"
            return jlp.Role(jlp.MXFP8(), "stochastic") if is_gradient else jlp.MXFP8()

        assert calls(recipe=jlp.Custom(roles), key=jax.random.key(0))[:4] == (0, 2, 1, 0)
