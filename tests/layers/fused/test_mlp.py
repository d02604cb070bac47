"""mlp: the bits of linears, the activation and linear, whatever its backward pass keeps; and what 8 bits change."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxlowprec as jlp
from jaxlowprec.models.lora import Adapter, LoRAKernel
from jaxlowprec.recipes.transformer_engine import Calibrating
from tests.helpers import assert_same_bytes, often, random_array
from tests.layers.fused.layers import (
    ACTIVATIONS,
    CASES,
    EVERY,
    EXACT,
    KEY,
    MLP,
    NO_QUANTISED_INPUT,
    SAVED,
    composed_mlp,
    mlp_operands,
    relative_error,
    states_for,
    step,
)

NVFP4, MXFP8 = jlp.NVFP4BlockScaling(), jlp.MXFP8BlockScaling()
OFTEN = ("nvfp4", "fp8_delayed", "int4_qat", "decoded nvfp4", "down by itself", "bf16")
# Something is not quantised: the MLP is made of separate layers, and its last one keeps what it has read.
COMPOSED = (*NO_QUANTISED_INPUT, "by layer", "down in high precision")
LAYERED = ("by layer", "down by itself", "down in high precision", "no wgrad", "high precision forward")
EXACTLY = ("quantized", "recompute")  # with the bits of separate layers
each_exact = pytest.mark.parametrize("saved", EXACTLY)


def name_of(activation):
    return activation if isinstance(activation, str) else activation.__name__


def tanh_times(gate, up):
    return jnp.tanh(gate) * up


@functools.cache
def expected_of(recipe, activation="swiglu"):
    """Operands, options and the composed MLP's step, which several ways to save are compared with."""
    gated = activation in ("swiglu", "geglu", tanh_times)
    given = mlp_operands((2, 16, 64), 96, 64, gated=gated)
    x, kernels, biases, dy = given
    options = {
        "biases": biases,
        "names": MLP if gated else MLP[1:],
        "key": KEY,
        "recipe": EVERY[recipe],
        "activation": activation,
        "states": states_for(EVERY[recipe], len(kernels)),
    }
    return (x, kernels, dy), options, step(composed_mlp, x, kernels, dy, **options)


@pytest.mark.sampled(5)
@each_exact
@pytest.mark.parametrize("recipe", often(OFTEN, CASES))
def test_bits_are_those_of_layers(recipe, saved):
    given, options, expected = expected_of(recipe)
    assert_same_bytes(step(jlp.mlp, *given, **options, saved=saved), expected)


@pytest.mark.sampled(3)
@each_exact
@pytest.mark.parametrize("recipe", often(["fp8_current"], ["nvfp4", "fp8_current", "fp8_delayed", "int4_qat", "bf16"]))
@pytest.mark.parametrize("activation", [*list(ACTIVATIONS)[1:], jnp.tanh, tanh_times], ids=name_of)
def test_any_activation(recipe, activation, saved):
    given, options, expected = expected_of(recipe, activation)
    assert_same_bytes(step(jlp.mlp, *given, **options, saved=saved), expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("shape", "hidden", "dtype"),
    [((64,), 96, "bfloat16"), ((5, 33), 17, "float32"), ((2, 3, 7, 40), 24, "float16"), ((3, 16, 64), 1, "bfloat16")],
    ids=str,
)
@pytest.mark.parametrize("saved", often(["recompute"], SAVED))
@pytest.mark.parametrize("recipe", often(["fp8_current"], ["nvfp4", "mxfp8", "fp8_current", "nvfp4_qat"]))
def test_any_shape_and_dtype(recipe, saved, shape, hidden, dtype):
    x, kernels, biases, dy = mlp_operands(shape, hidden, 19, dtype=dtype)
    options = {"biases": biases, "recipe": EVERY[recipe], "states": states_for(EVERY[recipe], 3)}
    results = step(jlp.mlp, x, kernels, dy, **options, saved=saved)
    expected = step(composed_mlp, x, kernels, dy, **options)
    assert_same_bytes(results[0], expected[0])
    if saved != "8bit":
        assert_same_bytes(results, expected)
    else:
        assert jax.tree.map(jnp.shape, results) == jax.tree.map(jnp.shape, expected)
        assert [a.dtype for a in jax.tree.leaves(results)] == [e.dtype for e in jax.tree.leaves(expected)]


def step_from_8bit(recipe, x, kernels, dy, *, biases, names, key, activation, states):
    """A step whose backward pass reads the hidden layer decoded from MXFP8, of the public functions."""
    last, function = len(kernels) - 1, ACTIVATIONS[activation]
    hidden, of_down = {"recipe": recipe, "names": names[:last]}, {"recipe": recipe, "name": names[last]}

    def run(x, kernels, biases, states, dy):
        def first(x, kernels, biases, states):
            given = {} if states is None else {"states": states}
            found = jlp.linears(x, kernels, biases, key=key, **hidden, **given)
            return found if states is not None else (found, None)

        def second(a, kernel, bias, state):
            given = {} if state is None else {"state": state}
            found = jlp.linear(a, kernel, bias, key=jax.random.fold_in(key, last), **of_down, **given)
            return found if state is not None else (found, None)

        parts = [None if values is None else values[:last] for values in (kernels, biases, states)]
        of_last = [None if values is None else values[last] for values in (kernels, biases, states)]
        operands, first_back, _ = jax.vjp(first, x, *parts, has_aux=True)
        decoded = [jlp.quantize(v, jlp.MXFP8()).dequantize() for v in operands]
        y, exact_back, _ = jax.vjp(second, function(*operands), *of_last, has_aux=True)
        _, back, _ = jax.vjp(second, function(*decoded), *of_last, has_aux=True)
        da, d_down, d_bias, _ = back(dy)
        *exact, d_state = exact_back(dy)
        dx, d_kernels, d_biases, d_states = first_back(tuple(jax.vjp(function, *decoded)[1](da)))
        states = None if states is None else [*d_states, d_state]
        return y, dx, [*d_kernels, d_down], [*d_biases, d_bias], states, exact[1]

    *found, exact_down = jax.jit(run, compiler_options=EXACT)(x, kernels, biases, states, dy)
    return found, exact_down


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("recipe", "activation"),
    often(
        [("nvfp4", "swiglu"), ("fp8_delayed", "swiglu"), ("int4_qat", "swiglu"), ("mxfp8", "gelu")],
        [*((recipe, "swiglu") for recipe in CASES), *(("mxfp8", name) for name in list(ACTIVATIONS)[1:])],
        2,
    ),
)
def test_eight_bits_are_what_the_backward_pass_reads(recipe, activation):
    given, options, exact = expected_of(recipe, activation)
    y, dx, further = step(jlp.mlp, *given, **options, saved="8bit")
    assert_same_bytes(y, exact[0])
    of_layers = {name: value for name, value in options.items() if name != "recipe"}
    expected, exact_down = step_from_8bit(options["recipe"], *given, **of_layers)
    if recipe in COMPOSED:
        expected[2][-1] = exact_down
    assert_same_bytes((y, dx, further[:2]), (expected[0], expected[1], expected[2:4]))
    if options["states"] is not None:
        assert_same_bytes(further[2], expected[4])
    for actual, like in zip(jax.tree.leaves((dx, further[0])), jax.tree.leaves((exact[1], exact[2][0])), strict=True):
        # E4M3 is off by 2^-4 at most. Some codes of quantised gradients move, too, of E5M2 by 2^-2.
        assert relative_error(actual, like) < (0.3 if "fp4" in recipe or recipe in LAYERED else 0.2)


@pytest.mark.sampled(3)
class TestKernels:
    x, kernels, biases, dy = mlp_operands((2, 16, 64), 96, 64)

    @pytest.mark.parametrize("saved", SAVED)
    @pytest.mark.parametrize(
        "recipe", often([MXFP8], [NVFP4, MXFP8, jlp.Int4QAT(group_size=16)]), ids=["nvfp4", "mxfp8", "int4_qat"]
    )
    def test_quantised_once(self, recipe, saved):
        """Alone they give the result and the gradient of x."""
        quantized = [jlp.quantize_kernel(w, recipe) for w in self.kernels]
        options = {"biases": self.biases, "recipe": recipe, "saved": saved}
        expected = step(jlp.mlp, self.x, self.kernels, self.dy, **options)
        given = self.x, self.kernels, self.dy
        assert_same_bytes(step(jlp.mlp, *given, quantized_kernels=quantized, **options), expected)

        @jax.jit
        def alone(x, quantized, dy):
            y, pullback = jax.vjp(lambda x: jlp.mlp(x, [None] * 3, quantized_kernels=quantized, **options), x)
            return y, *pullback(dy)

        assert_same_bytes(alone(self.x, quantized, self.dy), expected[:2])

    @pytest.mark.parametrize("kind", ["loaded", "adapters"])
    @each_exact
    def test_loaded_and_adapted(self, kind, saved):
        def made(i, w):
            if kind == "loaded":
                return jlp.quantize(w, jlp.Int4(16), axis=-2)
            k, n = w.shape
            adapter = Adapter(random_array((k, 4), seed=40 + i), random_array((4, n), seed=50 + i), alpha=8.0)
            return LoRAKernel(w, adapter)

        kernels, recipe = [made(i, w) for i, w in enumerate(self.kernels)], None if kind == "loaded" else MXFP8

        def run(function, **options):
            def dx(x, biases, dy):
                call = functools.partial(function, kernels=kernels, recipe=recipe, **options)
                y, pullback = jax.vjp(lambda x, b: call(x, biases=b), x, biases)
                return y, pullback(dy)

            return jax.jit(dx, compiler_options=EXACT)(self.x, self.biases, self.dy)

        assert_same_bytes(run(jlp.mlp, saved=saved), run(composed_mlp))


@functools.cache
def calibrating():
    recipe = jlp.DelayedScaling(amax_history_len=3)
    x, kernels, _, dy = mlp_operands((40, 64), 96, 64)
    options = {"states": states_for(recipe, 3), "recipe": Calibrating(recipe)}
    return (x, kernels, dy), options, step(composed_mlp, x, kernels, dy, **options)


@pytest.mark.parametrize("saved", SAVED)
def test_calibration_records_for_each_layer(saved):
    given, options, (expected_y, _, expected) = calibrating()
    y, _, further = step(jlp.mlp, *given, **options, saved=saved)
    assert_same_bytes(y, expected_y)
    if saved != "8bit":
        assert_same_bytes(further[2], expected[2])


@pytest.mark.parametrize("saved", often(["recompute"], EXACTLY))
def test_layers_without_keys_have_bits_by_name(saved):
    x, kernels, biases, dy = mlp_operands((40, 64), 96, 64)
    options = {"biases": biases, "names": MLP, "recipe": NVFP4}
    assert_same_bytes(
        step(jlp.mlp, x, kernels, dy, **options, saved=saved), step(composed_mlp, x, kernels, dy, **options)
    )
