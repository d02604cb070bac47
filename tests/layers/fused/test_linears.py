"""linears: the bits of separate linears, with one quantised input, which is kept once."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxlowprec as jlp
from jaxlowprec.models.lora import Adapter, LoRAKernel
from jaxlowprec.recipes.transformer_engine import Calibrating
from tests.helpers import assert_same_bytes, often, random_array
from tests.layers.fused.layers import (
    CASES,
    EVERY,
    EXACT,
    KEY,
    MULTIPLY,
    NAMES,
    NO_QUANTISED_INPUT,
    QUANTIZE,
    arguments,
    nbytes,
    operands,
    separate_linears,
    states_for,
    step,
    traced_calls,
)
from tests.low_precision import without_state
from tests.products import kept

FEATURES = (96, 32, 48)
NVFP4, MXFP8 = jlp.NVFP4BlockScaling(), jlp.MXFP8BlockScaling()
OFTEN = ("nvfp4", "fp8_delayed", "int4_qat", "high precision backward", "by layer")
# Each layer is a call of its own, and JAX adds up their gradients of x.
ALONE = (*NO_QUANTISED_INPUT, "by layer")
DECODED = ("decoded nvfp4", "dequantized backward")


def check(recipe, given, **options):
    """All bits of a training step: those of dx are summed in float32 and rounded once."""
    x, kernels, biases, dys = given
    own = EVERY[recipe] if isinstance(recipe, str) else recipe
    options = {"biases": biases, "recipe": own, **options}
    found = step(jlp.linears, x, kernels, tuple(dys), **options)
    sum_dx = None if recipe in ALONE else summed_dx(recipe, options)
    assert_same_bytes(found, step(separate_linears, x, kernels, tuple(dys), sum_dx=sum_dx, **options))


def dgrad_in_high_precision(recipe, w, dtype):
    """The kernel that it reads; None where dgrad is quantised."""
    if recipe in DECODED:
        return jlp.quantize(w, EVERY[recipe].roles().weight.format, axis=-2).dequantize(dtype)
    return w.astype(dtype) if recipe == "high precision backward" else None


def summed_dx(recipe, options):
    """A function of x, kernels, states and dys: each layer's gradient of x in float32, as a float32 x gets it, added in
    order and rounded once to x's dtype.

    float32 has the numbers of other dtypes, so that x and gradients are quantised to the same bits.
    """
    own = {name: value for name, value in options.items() if name in ("names", "key")}

    def total(x, kernels, states, dys):
        found = []
        for i, (w, dy) in enumerate(zip(kernels, dys, strict=True)):
            more = {"recipe": options["recipe"]} | arguments(i, states=states, **own)
            if (decoded := dgrad_in_high_precision(recipe, w, dys[0].dtype)) is not None:
                w, more = decoded, {"recipe": None}

            def layer(x, w=w, more=more):
                return without_state(jlp.linear(x, w, **more), more.get("state"))

            found += jax.vjp(layer, x.astype(jnp.float32))[1](dy.astype(jnp.float32))
        return functools.reduce(jnp.add, found).astype(x.dtype)

    return total


@pytest.mark.sampled(5)
@pytest.mark.parametrize("recipe", often(OFTEN, CASES))
def test_bits_are_those_of_separate_linears(recipe):
    given = operands((40, 64), FEATURES)
    check(recipe, given, names=NAMES, states=states_for(EVERY[recipe], 3), key=KEY)


@pytest.mark.parametrize("names", often([("a", "b")], [("a", "b"), None]))
def test_layers_without_keys_have_bits_by_name(names):
    check("nvfp4", operands((40, 64), (32, 32)), names=names)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((64,), "bfloat16"),
        ((3, 5), "float16"),
        ((2, 16, 64), "bfloat16"),
        ((2, 7, 33), "float32"),
        ((2, 3, 16, 48), "float16"),
        ((2, 3, 5, 40), "bfloat16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("recipe", often(["fp8_current"], ["nvfp4", "mxfp8", "fp8_current", "fp8_delayed"]))
def test_any_shape_and_dtype(recipe, shape, dtype):
    check(recipe, operands(shape, (24, 1, 17), dtype), key=KEY, states=states_for(EVERY[recipe], 3))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtypes", [("bfloat16", "float16"), ("float32", "bfloat16")], ids=str)
def test_kernels_of_other_dtypes_keep_theirs(dtypes):
    x, kernels, biases, dys = operands((32, 64), (32, 48))
    kernels = [w.astype(dtype) for w, dtype in zip(kernels, dtypes, strict=True)]
    biases = [random_array((n,), dtype, n) for n, dtype in zip((32, 48), reversed(dtypes), strict=True)]
    check("mxfp8", (x, kernels, biases, dys))


def test_one_layer_is_linear():
    x, kernels, _, dys = operands((32, 64), (32,))
    check("nvfp4", (x, kernels, None, dys), key=KEY)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["highest", jax.lax.Precision.DEFAULT], ids=str)
def test_precision_is_that_of_each(precision):
    check("decoded nvfp4", operands((32, 64), (32, 48)), precision=precision)


@pytest.mark.sampled(3)
class TestQuantisedKernels:
    given = operands((2, 16, 64), (32, 48))

    each_recipe = pytest.mark.parametrize(
        "recipe",
        [pytest.param(NVFP4, marks=pytest.mark.slow), MXFP8, jlp.Int4QAT(group_size=16)],
        ids=["nvfp4", "mxfp8", "int4_qat"],
    )

    @each_recipe
    @pytest.mark.parametrize("which", [(True, True), (True, False)], ids=["both", "one"])
    def test_kernels_quantised_once(self, recipe, which):
        x, kernels, biases, dys = self.given
        quantized = [
            jlp.quantize_kernel(w, recipe) if chosen else None for w, chosen in zip(kernels, which, strict=True)
        ]
        options = {"biases": biases, "recipe": recipe}
        results = step(jlp.linears, x, kernels, tuple(dys), quantized_kernels=quantized, **options)
        assert_same_bytes(results, step(jlp.linears, x, kernels, tuple(dys), **options))

    @each_recipe
    def test_without_the_kernels_themselves(self, recipe):
        x, kernels, biases, _ = self.given
        quantized = [jlp.quantize_kernel(w, recipe) for w in kernels]

        @jax.jit
        def both(quantized):
            ys = jlp.linears(x, [None, None], biases, recipe, quantized_kernels=quantized)
            return ys, separate_linears(x, kernels, biases=biases, recipe=recipe)

        assert_same_bytes(*both(quantized))

    def test_their_gradient_of_x_needs_no_kernels(self):
        x, kernels, _, dys = self.given
        quantized = [jlp.quantize_kernel(w, MXFP8) for w in kernels]

        def dx(kernels, quantized):
            call = functools.partial(jlp.linears, kernels=kernels, quantized_kernels=quantized, recipe=MXFP8)
            return jax.vjp(call, x)[1](tuple(dys))

        assert_same_bytes(*jax.jit(lambda q: (dx([None, None], q), dx(kernels, None)))(quantized))

    @pytest.mark.parametrize("recipe", [None, jlp.Int4QAT(group_size=16)], ids=["none", "int4_qat"])
    def test_loaded_kernels(self, recipe):
        x, kernels, biases, dys = self.given
        loaded = [jlp.quantize(w, jlp.Int4(16), axis=-2) for w in kernels]

        def run(function):
            ys, pullback = jax.vjp(lambda x, b: function(x, loaded, biases=b, recipe=recipe), x, biases)
            mixed = [loaded[0], kernels[1]]  # a loaded kernel among those that are trained
            return ys, pullback(tuple(dys)), function(x, mixed, biases=biases, recipe=recipe)

        assert_same_bytes(*jax.jit(lambda: (run(jlp.linears), run(separate_linears)), compiler_options=EXACT)())

    @pytest.mark.parametrize("fmt", [jlp.Int4(16), jlp.NVFP4()], ids=str)
    def test_loaded_kernels_are_one_call(self, fmt):
        x, kernels, _, dys = self.given
        biases = [random_array((w.shape[1],), seed=w.shape[1]) for w in kernels]
        loaded = [jlp.quantize(w, fmt, axis=-2) for w in kernels]

        def calls(function):
            text = jax.jit(lambda x: function(x, loaded, biases=biases)).lower(x).as_text()
            return text.count("@jaxlowprec_weight_only_matmuls("), text.count("@jaxlowprec_weight_only_matmul(")

        assert calls(jlp.linears) == (1, 0) and calls(separate_linears) == (0, 2)

        def step(function):
            ys, pullback = jax.vjp(lambda x, b: function(x, loaded, biases=b), x, biases)
            return ys, pullback(tuple(dys))

        assert_same_bytes(*jax.jit(lambda: (step(jlp.linears), step(separate_linears)), compiler_options=EXACT)())
        gate, up = (jlp.quantize(random_array((64, 48), seed=i), fmt, axis=-2) for i in (1, 2))
        down = jlp.quantize(random_array((48, 64), seed=3), fmt, axis=-2)
        assert calls(lambda x, *_, **__: jlp.mlp(x, [gate, up, down])) == (1, 1)

    def test_kernels_with_adapters(self):
        x, kernels, biases, dys = self.given
        adapters = [
            Adapter(random_array((64, 4), seed=40 + i), random_array((4, n), seed=50 + i), alpha=8.0)
            for i, n in enumerate((32, 48))
        ]

        def run(function):
            def call(x, adapters):
                adapted = [LoRAKernel(w, a) for w, a in zip(kernels, adapters, strict=True)]
                return function(x, adapted, biases=biases, recipe=MXFP8)

            return jax.vjp(call, x, adapters)[1](tuple(dys))

        assert_same_bytes(*(jax.jit(run, static_argnums=0)(f) for f in (jlp.linears, separate_linears)))


def test_calibration_records_for_each_layer():
    recipe = jlp.DelayedScaling(amax_history_len=3)
    x, kernels, _, dys = operands((40, 64), FEATURES)
    states = states_for(recipe, 3)
    options = {"states": states, "recipe": Calibrating(recipe)}
    results, expected = (step(f, x, kernels, tuple(dys), **options) for f in (jlp.linears, separate_linears))
    assert_same_bytes(results, expected)
    assert_same_bytes(results[0], jax.jit(separate_linears)(x, kernels))


class TestOneInput:
    def calls(self, function, recipe):
        """Those of a training step of three layers."""
        x, kernels, _, dys = operands((64, 64), FEATURES)
        states = states_for(recipe, 3)

        def run(x, kernels, dys):
            options = {"recipe": recipe} | ({} if states is None else {"states": states})
            ys, pullback, *_ = jax.vjp(lambda x, w: function(x, w, **options), x, kernels, has_aux=states is not None)
            return ys, pullback(dys)

        return traced_calls(run, x, kernels, tuple(dys))

    @pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "fp8_current"])
    def test_is_quantised_once(self, recipe):
        """Separate layers quantise x, their kernel and their gradient: nine tensors, of which two are x again."""
        shared, separate = (self.calls(f, EVERY[recipe]) for f in (jlp.linears, separate_linears))
        assert (shared[QUANTIZE], separate[QUANTIZE]) == (7, 9)
        assert shared["jaxlowprec_amax"] == separate["jaxlowprec_amax"] * 7 // 9
        assert shared[MULTIPLY] == separate[MULTIPLY] == 9

    def test_is_quantised_for_each_with_delayed_scaling(self):
        """Each layer has a scale of its own."""
        assert self.calls(jlp.linears, EVERY["fp8_delayed"])[QUANTIZE] == 9

    @pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "high precision backward"])
    def test_is_kept_once(self, recipe):
        x, kernels, _, _ = operands((64, 64), FEATURES)
        shared, separate = (
            nbytes(kept(lambda x, w, f=f: f(x, w, recipe=EVERY[recipe]), x, kernels))
            for f in (jlp.linears, separate_linears)
        )
        of_x = {"nvfp4": 64 * 32 + 64 * 4, "mxfp8": 64 * 64 + 64 * 2, "high precision backward": 64 * 64 * 2}
        assert separate - shared == 2 * of_x[recipe]
