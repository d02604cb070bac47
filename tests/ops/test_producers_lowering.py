"""What norms and activations become on NVIDIA GPUs, read off the lowered code: nothing here runs on one."""

import jax
import jax.numpy as jnp
import pytest

import jaxlowprec as jlp
from jaxlowprec.ops.activations.api import ACTIVATIONS, activated, activation_gradients
from jaxlowprec.ops.activations.quantized import quantized_activation, quantized_activation_gradients
from jaxlowprec.ops.activations.reference import NAMED_ACTIVATIONS
from jaxlowprec.ops.amax import Amaxes
from jaxlowprec.ops.norms.op import NormSpec, norm_gradient_op
from jaxlowprec.ops.norms.quantized import quantized_norm
from jaxlowprec.ops.sum_over_rows import sum_over_rows_op
from tests.cuda_without_gpu.claiming_cuda import claiming_cuda, custom_calls

ROWS, ROW, NUMBERS = "2x40x96xbf16", "2x96xf32", "2x40xf32"
CODES = ["2x40x96xf8E4M3FN", "2x40x3xf8E8M0FNU", "2x96x40xf8E4M3FN", "2x96x2xf8E8M0FNU"]  # of MXFP8, both ways


def forward_and_backward(function, *args):
    """The two custom calls of a value and its gradients."""

    def run(*args):
        y, backward = jax.vjp(function, *args)
        return y, backward(y)

    with claiming_cuda(9.0):
        forward, backward = custom_calls(run, *args)
    return forward, backward


def array():
    return jnp.ones((2, 40, 96), jnp.bfloat16)


@pytest.mark.parametrize("name", ["gelu", "silu", "relu_squared"])
def test_activations(name):
    forward, backward = forward_and_backward(getattr(jlp, name), array())
    assert forward.target == "jaxlowprec_activation" and backward.target == "jaxlowprec_activation_gradient"
    assert (forward.operands, forward.results) == ([ROWS], [ROWS])
    assert (backward.operands, backward.results) == ([ROWS] * 2, [ROWS])
    assert f'kind = "{name}"' in forward.attributes and f'kind = "{name}"' in backward.attributes


@pytest.mark.parametrize(("name", "kind"), [("swiglu", "silu"), ("geglu", "gelu")])
def test_gated_activations(name, kind):
    forward, backward = forward_and_backward(getattr(jlp, name), array(), array())
    assert (forward.operands, forward.results) == ([ROWS] * 2, [ROWS])
    assert (backward.operands, backward.results) == ([ROWS] * 3, [ROWS] * 2)
    assert f'kind = "{kind}"' in forward.attributes and f'kind = "{kind}"' in backward.attributes


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("layer", [False, True], ids=["rms", "layer"])
def test_norms(layer, residual):
    """With a residual the sum goes in and out, too, and its gradient in; layer norms save two numbers of a row.

    The gradients of weight and beta come from the same call, as sums over the rows of both matrices, which are merged.
    Its last result is memory for the sums of ten parts of eight rows.
    """
    norm, gamma = (jlp.layer_norm if layer else jlp.rms_norm), jnp.ones(96)
    options = {"residual": array()} if residual else {}
    forward, backward = forward_and_backward(lambda x: norm(x, gamma, **options), array())
    more = 1 + residual
    assert forward.target == "jaxlowprec_norm" and backward.target == "jaxlowprec_norm_gradient"
    assert forward.operands == [ROWS] * more + [ROW]
    assert forward.results == [ROWS] * more + [NUMBERS] * (1 + layer)
    merged, numbers = "80x96xbf16", "80xf32"
    assert backward.operands == [merged] * (2 + residual) + ["96xf32"] + [numbers] * (1 + layer)
    assert backward.results == [merged, "96xf32", "10x1x96xf32"]
    for call in (forward, backward):
        assert f"layer = {str(layer).lower()}" in call.attributes
        assert f"residual = {str(residual).lower()}" in call.attributes


def test_the_gradient_of_beta_is_of_the_same_call():
    with claiming_cuda(9.0):
        backward = jax.grad(lambda *given: jlp.layer_norm(*given).astype(jnp.float32).sum(), (0, 1, 2))
        _, call = custom_calls(backward, array(), jnp.ones(96), jnp.ones(96))
    assert call.results == ["80x96xbf16", "96xf32", "96xf32", "10x2x96xf32"]


def test_each_matrix_has_parts_of_its_rows():
    """Rows that are split over devices are merged."""
    spec = NormSpec("rms", 1e-6, False, False)
    x, numbers = jnp.ones((3, 2, 200, 8)), jnp.ones((3, 2, 200))
    with claiming_cuda(9.0):
        (call,) = custom_calls(lambda *args: norm_gradient_op(spec, True)(*args), x, x, jnp.ones((3, 8)), numbers)
    assert call.results == ["3x400x8xf32", "3x8xf32", "3x50x1x8xf32"]


def test_a_quantised_norm_is_not_stored():
    spec = NormSpec("rms", 1e-6, True, False)

    def run(x):
        found = quantized_norm(spec, jlp.MXFP8(), x, jnp.ones(96), x)
        return found[:2], found.total, found.saved

    with claiming_cuda(9.0):
        (call,) = custom_calls(run, array())
    assert call.target == "jaxlowprec_norm_quantize" and call.operands == [ROWS] * 2 + [ROW]
    assert call.results == [ROWS, NUMBERS, *CODES]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_quantised_activation_is_not_stored(name):
    """Nor are the gradients of its operands."""

    def run(x):
        operands = [x] * count
        value = quantized_activation(name, jlp.MXFP8(), operands)
        return value, quantized_activation_gradients(name, jlp.MXFP8(), x, operands)

    count = 1 + NAMED_ACTIVATIONS[name].gated
    with claiming_cuda(9.0):
        forward, backward = custom_calls(run, array())
    assert forward.target == "jaxlowprec_activation_quantize" and forward.operands == [ROWS] * count
    assert backward.target == "jaxlowprec_activation_gradient_quantize" and backward.operands == [ROWS] * (1 + count)
    assert forward.results == CODES and backward.results == CODES * count
    for call in (forward, backward):
        assert f'kind = "{NAMED_ACTIVATIONS[name].name}"' in call.attributes
        assert f"gated = {str(NAMED_ACTIVATIONS[name].gated).lower()}" in call.attributes


@pytest.mark.parametrize("wanted", [Amaxes(), Amaxes(hadamard=jlp.Hadamard()), Amaxes(False, jlp.Hadamard())], ids=str)
def test_amaxes_are_results_of_the_same_call(wanted):
    def run(x):
        y = activated("swiglu", [x, x], wanted)
        return y, activation_gradients("swiglu", x, [x, x], wanted)

    with claiming_cuda(9.0):
        forward, backward = custom_calls(run, array())
    assert forward.results == [ROWS] + ["2xf32"] * wanted.count
    assert backward.results == [ROWS] * 2 + ["2xf32"] * 2 * wanted.count
    for call in (forward, backward):
        assert f"plain = {str(wanted.plain).lower()}" in call.attributes
        assert f"rotated = {str(wanted.hadamard is not None).lower()}" in call.attributes


@pytest.mark.parametrize("wanted", [None, Amaxes()], ids=str)
def test_sums_over_rows_are_results_of_the_same_call(wanted):
    """The last result is memory for the sums of 64 rows each."""

    def run(x):
        return activation_gradients("swiglu", x, [x, x], wanted, row_sums=True)

    with claiming_cuda(9.0):
        (call,) = custom_calls(run, jnp.ones((2, 100, 96), jnp.bfloat16))
    gradients = ["2x100x96xbf16"] * 2
    assert call.results == [*gradients, *["2xf32"] * 2 * (wanted is not None), ROW, ROW, "2x2x2x96xf32"]


def test_a_sum_over_rows():
    with claiming_cuda(9.0):
        (call,) = custom_calls(lambda x: sum_over_rows_op(True)(x), jnp.ones((3, 2, 70, 8)))
    assert call.target == "jaxlowprec_sum_over_rows"
    assert (call.operands, call.results) == (["3x140x8xf32"], ["3x8xf32", "3x3x1x8xf32"])


def test_the_kernel_can_be_demanded_and_refused():
    with claiming_cuda(9.0):
        demanded = custom_calls(lambda x: jlp.silu(x, implementation="ffi"), array())
        refused = custom_calls(lambda x: jlp.silu(x, implementation="reference"), array())
    assert [call.target for call in demanded] == ["jaxlowprec_activation"] and refused == []


def test_without_cuda_all_is_the_reference():
    assert custom_calls(lambda x: jlp.rms_norm(jlp.silu(x), jnp.ones(96)), array()) == []
