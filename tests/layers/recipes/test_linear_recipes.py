"""linear under every recipe: its three GEMMs, overrides of the backward pass, kept residuals, pairs without a GEMM."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec import MXFP8, Float8Block, Float8Tensor, Role
from tests.helpers import assert_same_bytes, often, random_array
from tests.layers.fused.layers import traced_calls
from tests.low_precision import ALL, BASE, RECIPES, encode_scales, mxfp4_weight, state_for, without_state
from tests.products import (
    assert_is_product,
    decoded,
    kept,
    native_calls,
    quantizations_and_gradients,
    sum_error,
)

KEY = jax.random.key(5)
each_recipe = pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
each_base = pytest.mark.parametrize("recipe", BASE.values(), ids=BASE)
OVERRIDABLE = {name: recipe for name, recipe in BASE.items() if recipe.delayed is None}


def operands(shape=(136, 200, 40)):
    """X [T, K] bfloat16, kernel [K, N] float32, the gradient of the result [T, N]."""
    t, k, n = shape
    return random_array((t, k)), random_array((k, n), "float32", 1), random_array((t, n), seed=2)


def linear(x, w, *more, recipe, state=None, **options):
    return without_state(jlp.linear(x, w, *more, recipe=recipe, state=state, **options), state)


@functools.partial(jax.jit, static_argnames="recipe")
def run(recipe, x, w, dy, **options):
    """y, dx and dw."""
    f = functools.partial(linear, recipe=recipe, state=state_for(recipe), **options)
    y, pullback = jax.vjp(f, x, w)
    return y, *pullback(dy)


@functools.partial(jax.jit, static_argnames="recipe")
def quantised(recipe, x, w, dy):
    """Operands of the three GEMMs by their roles: pairs for fprop, dgrad and wgrad, each contraction-last."""
    roles, encode = recipe.roles(), encode_scales(recipe, state_for(recipe))
    gradient = roles.gradient
    rotation = gradient.hadamard or False
    key = KEY if gradient.rounding == "stochastic" else None
    x_options, w_options, dy_options = ({"encode_scale": encode[t]} for t in ("input", "kernel", "output_grad"))
    x_row = jlp.quantize(x, roles.input.format, axis=-1, **x_options)
    x_column = jlp.quantize(x, roles.input.format, axis=-2, hadamard=roles.input.hadamard or False, **x_options)
    w_row, w_column = (jlp.quantize(w, roles.weight.format, axis=axis, **w_options) for axis in (-1, -2))
    dy_row = jlp.quantize(
        dy, gradient.format, axis=-1, hadamard=False, rounding=gradient.rounding, key=key, **dy_options
    )
    dy_column = jlp.quantize(
        dy, gradient.format, axis=-2, hadamard=rotation, rounding=gradient.rounding, key=key, **dy_options
    )
    return (x_row, w_column.mT), (dy_row, w_row), (x_column.mT, dy_column.mT)


@jax.jit
def multiplied(pairs, like):
    return [
        jlp.scaled_matmul(a, b, preferred_element_type=result.dtype) for (a, b), result in zip(pairs, like, strict=True)
    ]


class TestGemms:
    def check(self, recipe, shape):
        x, w, dy = operands(shape)
        results, pairs = run(recipe, x, w, dy, key=KEY), quantised(recipe, x, w, dy)
        assert_same_bytes(results, multiplied(pairs, (x, x, w)))
        for actual, (a, b) in zip(results, pairs, strict=True):
            sizes = (a.shape[0], a.shape[1], b.shape[0])
            assert_is_product(actual, decoded(a), decoded(b).T, sum_error((a.format, b.format), sizes))

    @pytest.mark.sampled(7)
    @each_recipe
    def test_are_those_of_the_operands_quantised_by_their_roles(self, recipe):
        self.check(recipe, (136, 200, 40))

    @each_base
    def test_of_a_single_row_and_column(self, recipe):
        self.check(recipe, (1, 16, 1))

    @each_base
    def test_approximate_high_precision(self, recipe):
        """A code of E4M3 is off by at most 2^-4 of its value, of E5M2 by 2^-3; on normal numbers half of it or less."""
        numbers = np.random.default_rng(0)
        x, w, dy = (numbers.standard_normal(s, np.float32) for s in [(64, 256), (256, 32), (64, 32)])
        for a, e in zip(run(recipe, x, w, dy), (x @ w, dy @ w.T, x.T @ dy), strict=True):
            assert np.linalg.norm(a - e) < 0.07 * np.linalg.norm(e)

    @each_base
    @pytest.mark.parametrize(
        "dtypes", [("float32", "bfloat16", "float16"), ("float16", "float32", "bfloat16")], ids=str
    )
    def test_gradients_keep_their_dtypes(self, recipe, dtypes):
        shapes = zip(((16, 32), (32, 16), (16,), (16, 16)), (*dtypes, dtypes[0]), strict=True)
        x, w, bias, dy = (jax.ShapeDtypeStruct(*given) for given in shapes)
        f = functools.partial(linear, recipe=recipe, state=state_for(recipe))
        y, pullback = jax.eval_shape(lambda *a: jax.vjp(f, *a), x, w, bias)
        gradients = jax.eval_shape(lambda *a: jax.vjp(f, *a[:-1])[1](a[-1]), x, w, bias, dy)
        assert [a.dtype for a in (y, *gradients)] == [x.dtype, *dtypes]
        assert jax.tree.leaves(pullback)

    @each_base
    def test_a_bias_is_added_once_and_gets_the_unquantised_gradient(self, recipe):
        x, w, dy = operands((32, 64, 48))
        bias = random_array((48,), "float32", 3)
        f = functools.partial(linear, recipe=recipe, state=state_for(recipe))

        @jax.jit
        def both(x, w, dy, bias):
            y, pullback = jax.vjp(lambda b: f(x, w, b), bias)
            (a, b), *_ = quantised(recipe, x, w, dy)
            return y, pullback(dy)[0], jlp.scaled_matmul(a, b, bias, preferred_element_type=x.dtype)

        y, of_bias, expected = both(x, w, dy, bias)
        assert_same_bytes(y, expected)
        exact = np.asarray(dy).astype(np.float64).sum(0)
        np.testing.assert_allclose(of_bias, exact, rtol=1e-6, atol=1e-5)

    def test_hybrid_gradients_keep_what_e4m3_loses(self):
        x = w = np.ones((32, 32), np.float32)
        dy = np.full((32, 32), 2.0**-20, np.float32)
        dy[0] = 1  # below E4M3's range where the amax fills it, within E5M2's
        lost, seen = (
            run(jlp.Float8CurrentScaling(fp8_format=f, use_power_2_scales=True), x, w, dy)[1]
            for f in ("E4M3", "HYBRID")
        )
        np.testing.assert_array_equal(np.asarray(lost)[1:], 0)
        np.testing.assert_array_equal(np.asarray(seen)[1:], 32 * 2.0**-20)

    @each_base
    def test_nan_in_x_is_not_lost(self, recipe):
        x, w, dy = operands((16, 32, 16))
        spoiled = np.array(x)
        spoiled[3, 5] = np.nan
        y, _, dw = (np.float32(leaf) for leaf in run(recipe, spoiled, w, dy))
        assert np.all(np.isnan(y[3])) and np.all(np.isnan(dw[5]))


class TestBackwardOverride:
    x, w, dy = operands()

    @pytest.mark.parametrize("name", OVERRIDABLE)
    @pytest.mark.parametrize("override", ["high_precision", "dequantized"])
    def test_backward_gemms_are_in_high_precision(self, name, override):
        plain = OVERRIDABLE[name]
        recipe = type(plain)(backward_override=override)
        y, dx, dw = run(recipe, self.x, self.w, self.dy)
        assert_same_bytes(y, jax.jit(functools.partial(linear, recipe=plain))(self.x, self.w))
        x, w = self.x, np.asarray(self.w).astype(self.dy.dtype)
        if override == "dequantized":
            (x_row, w_column), *_ = quantised(plain, self.x, self.w, self.dy)
            x, w = x_row.dequantize(self.dy.dtype), np.asarray(w_column.dequantize(self.dy.dtype)).T
        assert (dx.dtype, dw.dtype) == (self.x.dtype, self.w.dtype)
        x, w, dy = (np.asarray(v).astype(np.float64) for v in (x, w, self.dy))
        assert_is_product(dx, dy, w.T)
        assert_is_product(dw, x.T, dy)

    @pytest.mark.parametrize("name", OVERRIDABLE)
    def test_no_backward_gemm_is_quantised(self, name):
        def calls(override):
            recipe = type(OVERRIDABLE[name])(backward_override=override)
            return traced_calls(functools.partial(run, recipe), self.x, self.w, self.dy)["jaxlowprec_scaled_matmul"]

        assert [calls(o) for o in (None, "high_precision", "dequantized")] == [3, 1, 1]

    @pytest.mark.parametrize("override", ["high_precision", "dequantized"])
    def test_a_quantised_kernel_alone_serves(self, override):
        recipe = jlp.MXFP8BlockScaling(backward_override=override, enable_2d_quantization=True)
        quantized = jlp.quantize_kernel(self.w, recipe)

        @jax.jit
        def step(x, w, dy, quantized):
            y, pullback = jax.vjp(lambda x: jlp.linear(x, None, recipe=recipe, quantized_kernel=quantized), x)
            return y, pullback(dy)[0], linear(x, w, recipe=recipe)

        y, dx, expected = step(self.x, self.w, self.dy, quantized)
        assert_same_bytes(y, expected)
        assert_is_product(dx, np.asarray(self.dy).astype(np.float64), decoded(quantized.columnwise).T)


class TestForwardOverride:
    x, w, dy = operands()
    plain = jlp.NVFP4BlockScaling()
    recipe = jlp.NVFP4BlockScaling(forward_override="high_precision")

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_only_fprop_is_in_high_precision(self, dtype):
        x, dy = (np.asarray(v).astype(jnp.dtype(dtype)) for v in (self.x, self.dy))
        y, *gradients = run(self.recipe, x, self.w, dy, key=KEY)
        assert y.dtype == x.dtype
        assert_is_product(y, *(np.asarray(v).astype(np.float64) for v in (x, np.asarray(self.w).astype(x.dtype))))
        assert_same_bytes(gradients, run(self.plain, x, self.w, dy, key=KEY)[1:])

    def test_an_evaluation_calls_no_kernel_and_a_step_two_gemms(self):
        calls = native_calls(functools.partial(run, self.recipe), self.x, self.w, self.dy)
        assert (calls["jaxlowprec_quantize"], calls["jaxlowprec_scaled_matmul"]) == (3, 2)
        assert not native_calls(functools.partial(jlp.linear, recipe=self.recipe), self.x, self.w)

    def test_the_backward_pass_keeps_what_it_keeps_of_the_recipe(self):
        x, w, _ = operands((512, 256, 384))
        sizes = [
            sorted((leaf.size, leaf.dtype.name) for leaf in kept(functools.partial(jlp.linear, recipe=recipe), x, w))
            for recipe in (self.plain, self.recipe)
        ]
        assert sizes[0] == sizes[1]

    def test_is_a_change_of_recipe_that_compiles_once(self):
        traced = []

        @jax.jit
        def step(x, w):
            traced.append(jlp.current_recipe())
            return jax.grad(lambda w: jlp.linear(x, w).astype(jnp.float32).sum())(w)

        for recipe in (self.plain, self.plain, self.recipe, self.recipe, self.plain):
            with jlp.autocast(recipe):
                step.eval_shape(self.x, self.w)
        assert traced == [self.plain, self.recipe]


class TestResiduals:
    x, w, _ = operands((512, 256, 384))

    def big(self, recipe):
        """(elements, dtype) of what is kept, but for scales and states."""
        f = functools.partial(linear, recipe=recipe, state=state_for(recipe))
        return sorted((leaf.size, leaf.dtype.name) for leaf in kept(f, self.x, self.w) if leaf.size > 1 << 14)

    @pytest.mark.parametrize("recipe", BASE.values(), ids=BASE)
    def test_nothing_is_kept_unquantised(self, recipe):
        codes = "uint8"
        assert self.big(recipe) == sorted([(self.x.size, codes), (self.w.size, codes)])

    def test_packed_codes_are_kept_packed(self):
        codes = [(self.x.size, "uint8"), (self.w.size // 2, "uint8")]
        assert self.big(jlp.Custom(mxfp4_weight)) == sorted(codes)

    @pytest.mark.parametrize("cls", [type(r) for r in OVERRIDABLE.values()], ids=OVERRIDABLE)
    def test_of_an_overridden_backward_pass(self, cls):
        dequantized = [(self.x.size, "uint8"), (self.w.size, "uint8")]
        original = [(self.x.size, "bfloat16"), (self.w.size, "float32")]
        assert self.big(cls(backward_override="dequantized")) == sorted(dequantized)
        assert self.big(cls(backward_override="high_precision")) == sorted(original)

    @pytest.mark.parametrize("recipe", [BASE["mxfp8"], pytest.param(BASE["fp8_delayed"], marks=pytest.mark.slow)])
    def test_checkpoint_names_save_quantising_again(self, recipe):
        x, weights = random_array((32, 64)), np.asarray(random_array((2, 64, 64), "float32", 1)) / 8
        state = state_for(recipe)
        layer = functools.partial(linear, recipe=recipe, state=state)
        run = functools.partial(quantizations_and_gradients, layer, x, weights)
        policies = jax.checkpoint_policies
        named = policies.save_only_these_names(*jlp.CHECKPOINT_NAMES)
        (all_calls, expected), (names_calls, actual), (nothing_calls, recomputed) = map(
            run, (policies.everything_saveable, named, policies.nothing_saveable)
        )
        assert_same_bytes((actual, recomputed), (expected, expected))
        assert all_calls == names_calls < nothing_calls


def only(tensor, recipe=None):
    """MXFP8 for all operands but one."""
    return jlp.Custom(lambda role: None if role.tensor_type == tensor else jlp.MXFP8(), **(recipe or {}))


class TestCustom:
    x, w, dy = operands((32, 64, 48))
    full = jlp.MXFP8BlockScaling()

    @pytest.mark.parametrize(
        ("tensor", "high_precision"),
        [("input", {"y", "dw"}), ("weight", {"y", "dx"}), ("grad_output", {"dx", "dw"})],
    )
    def test_an_operand_in_high_precision_keeps_just_its_gemms_there(self, tensor, high_precision):
        recipe = only(tensor)
        actual = dict(zip(("y", "dx", "dw"), run(recipe, self.x, self.w, self.dy), strict=True))
        quantized = dict(zip(actual, run(self.full, self.x, self.w, self.dy), strict=True))
        of_w = np.asarray(self.w).astype(jnp.bfloat16)
        x, w, dy = (np.asarray(v).astype(np.float64) for v in (self.x, of_w, self.dy))
        exact = {"y": (x, w), "dx": (dy, w.T), "dw": (x.T, dy)}
        for name, result in actual.items():
            assert result.dtype == quantized[name].dtype
            if name in high_precision:
                assert_is_product(result, *exact[name])
            else:
                assert_same_bytes(result, quantized[name])
        calls = native_calls(functools.partial(run, recipe), self.x, self.w, self.dy)
        assert calls["jaxlowprec_scaled_matmul"] == 1
        assert calls["jaxlowprec_quantize"] == 2  # the two operands of that GEMM, each in one direction

    def test_all_in_high_precision_calls_no_kernel(self):
        recipe, bias = jlp.Custom(lambda role: None), random_array((48,), "float32", 3)
        y = jax.jit(functools.partial(jlp.linear, recipe=recipe))(self.x, self.w, bias)
        exact = np.asarray(self.x).astype(np.float64) @ np.asarray(self.w).astype(jnp.bfloat16).astype(np.float64)
        np.testing.assert_allclose(np.asarray(y, np.float64), exact + np.asarray(bias), rtol=2.0**-8, atol=1e-5)
        assert not native_calls(functools.partial(run, recipe), self.x, self.w, self.dy)

    def test_dequantized_reads_what_the_forward_pass_saw(self):
        """The weight in high precision keeps fprop there: it saw the original input."""
        recipe = only("weight", {"backward_override": "dequantized"})
        dw = run(recipe, self.x, self.w, self.dy)[2]
        assert_is_product(dw, np.asarray(self.x).astype(np.float64).T, np.asarray(self.dy).astype(np.float64))

    @pytest.mark.parametrize(
        ("formats", "differentiated", "message"),
        [
            (
                {"weight": Float8Block()},
                False,
                "MXFP8 E4M3 1x32 and rhs is Float8Block E4M3 1x128; there is no GEMM of",
            ),
            ({"input": MXFP8("e5m2"), "weight": MXFP8("e5m2")}, False, "no GEMM takes E5M2 x E5M2"),
            ({"weight": MXFP8("e5m2"), "grad_output": MXFP8("e5m2")}, True, "no GEMM takes E5M2 x E5M2"),
            ({"grad_output": Float8Tensor()}, True, "there is no GEMM of formats scaled differently"),
            (dict.fromkeys(("input", "weight"), Float8Block(block=(128, 128))), False, "no GEMM takes that"),
            (
                {"weight": Role(MXFP8(), hadamard=jlp.Hadamard())},
                False,
                "the rotation of a weight belongs to dgrad alone",
            ),
            ({"input": Role(MXFP8(), hadamard=jlp.Hadamard())}, False, "a rotation cancels only if both operands"),
        ],
    )
    def test_a_pair_without_a_gemm_raises_when_traced(self, formats, differentiated, message):
        recipe = jlp.Custom(lambda role: formats.get(role.tensor_type, MXFP8()))
        f = functools.partial(jlp.linear, recipe=recipe)

        def gradient(x, w):
            return jax.vjp(f, x, w)[1](self.dy)

        with pytest.raises((ValueError, NotImplementedError), match=message):
            jax.eval_shape(gradient, self.x, self.w)
        if differentiated:
            assert jax.eval_shape(f, self.x, self.w).shape == self.dy.shape
        else:
            with pytest.raises((ValueError, NotImplementedError), match=message):
                jax.eval_shape(f, self.x, self.w)


class TestSlices:
    """x [batch, time, K] is taken in slices where they hold whole blocks, else as tokens: the numbers are the same."""

    def check(self, recipe, time):
        x, w, dy = (
            random_array((3, time, 64)),
            random_array((64, 48), "float32", 1),
            random_array((3, time, 48), seed=2),
        )
        x, dy = np.asarray(x), np.asarray(dy)
        y, dx, dw = jax.device_get(run(recipe, x, w, dy, key=KEY))
        tokens_y, tokens_dx, tokens_dw = run(recipe, x.reshape(-1, 64), w, dy.reshape(-1, 48), key=KEY)
        assert_same_bytes((y.reshape(-1, 48), dx.reshape(-1, 64)), (tokens_y, tokens_dx))
        if recipe.backward_override is None:
            assert_same_bytes(dw, tokens_dw)
        else:  # XLA's sum over two axes
            np.testing.assert_allclose(dw, tokens_dw, rtol=1e-5, atol=1e-5 * np.abs(tokens_dw).max())

    @pytest.mark.parametrize(
        "recipe",
        often([BASE["mxfp8"], BASE["fp8_block"], BASE["fp8_delayed"]], [*BASE.values(), RECIPES["nvfp4"]]),
        ids=lambda recipe: type(recipe).__name__,
    )
    @pytest.mark.parametrize("time", often([40], [128, 40]))
    def test_numbers_are_those_of_tokens(self, recipe, time):
        self.check(recipe, time)

    @pytest.mark.slow
    @pytest.mark.parametrize("override", ["high_precision", "dequantized"])
    @pytest.mark.parametrize("recipe", OVERRIDABLE.values(), ids=OVERRIDABLE)
    def test_under_an_override_too(self, recipe, override):
        self.check(dataclasses.replace(recipe, backward_override=override), 128)
