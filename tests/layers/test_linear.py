"""linear: what each of its three GEMMs computes, what it keeps for the backward pass, and its errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from tests.helpers import FLOATS, assert_same_bytes, often, random_array
from tests.layers.fused.layers import EXACT, traced_calls
from tests.products import assert_is_product, decoded, kept, native_calls

FULL = jlp.NVFP4BlockScaling()
RECIPES = [
    FULL,
    jlp.NVFP4BlockScaling(disable_rht=True),
    jlp.NVFP4BlockScaling(disable_stochastic_rounding=True),
    jlp.NVFP4BlockScaling(disable_2d_quantization=True),
]
NAMES = ("full", "no-rht", "no-sr", "no-2d")
SHAPES = [(32, 64, 48), (33, 50, 21), (1, 16, 1), (40, 7, 130)]
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def operands(shape=(32, 64, 48), dtype="bfloat16", kernel_dtype="float32"):
    """X [T, K], kernel [K, N], the gradient of the result [T, N]."""
    t, k, n = shape
    return random_array((t, k), dtype, 0), random_array((k, n), kernel_dtype, 1), random_array((t, n), dtype, 2)


@functools.partial(jax.jit, static_argnames=("recipe", "name"))
def results(recipe, x, w, dy, **options):
    """The product and both gradients, in one program for all values of a shape."""
    y, pullback = jax.vjp(lambda x, w: jlp.linear(x, w, recipe=recipe, **options), x, w)
    return y, *pullback(dy)


def gradients(recipe, x, w, dy, **options):
    return jax.device_get(results(recipe, x, w, dy, **options)[1:])


class TestForward:
    @pytest.mark.sampled(7)
    @each_recipe
    @each_shape
    def test_is_the_gemm_of_the_quantised_operands(self, shape, recipe):
        x, w, _ = operands(shape)
        bias = random_array(shape[2:], "float32", 3)

        @jax.jit
        def both(x, w, bias):
            xq, wq = (
                jlp.quantize(x, recipe.roles().input.format),
                jlp.quantize(w, recipe.roles().weight.format, axis=-2),
            )
            found, expected = [], []
            for b in (None, bias):
                found.append(jlp.linear(x, w, b, recipe=recipe))
                found.append(jax.vjp(lambda x, b=b: jlp.linear(x, w, b, recipe=recipe), x)[0])  # differentiated
                expected += [jlp.scaled_matmul(xq, wq.mT, b, preferred_element_type=x.dtype)] * 2
            return found, expected

        assert_same_bytes(*both(x, w, bias))

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_has_the_dtype_of_x(self, dtype):
        x, w, _ = operands(dtype=dtype)
        assert jax.eval_shape(functools.partial(jlp.linear, recipe=FULL), x, w).dtype == x.dtype

    def test_leading_axes_are_tokens(self):
        x, w, dy = jax.device_get(operands((24, 64, 48)))
        y, dx, dw = jax.device_get(results(FULL, x.reshape(2, 3, 4, 64), w, dy.reshape(2, 3, 4, 48)))
        assert_same_bytes((y.reshape(24, 48), dx.reshape(24, 64), dw), results(FULL, x, w, dy))
        vector, matrix = (jax.jit(functools.partial(jlp.linear, recipe=FULL))(rows, w) for rows in (x[0], x[:1]))
        assert_same_bytes(vector, np.asarray(matrix)[0])

    def test_no_tokens_give_no_rows_and_zero_gradients(self):
        x, w, dy = operands((0, 64, 48))
        bias = np.ones(48, np.float32)

        @jax.jit
        def step(x, w, bias, dy):
            y, pullback = jax.vjp(lambda *a: jlp.linear(*a, recipe=FULL), x, w, bias)
            return y, *pullback(dy)

        y, dx, dw, db = jax.device_get(step(x, w, bias, dy))
        assert y.shape == (0, 48)
        assert dx.shape == x.shape
        assert not np.any(dw) and not np.any(db)

    def test_nan_in_x_is_not_lost(self):
        x, w, dy = operands()
        bad = np.array(x)
        bad[3, 5] = np.nan
        y, _, dw = jax.device_get(results(FULL, bad, w, dy))
        assert np.all(np.isnan(np.float32(y))) and np.all(np.isnan(dw))


class TestGradients:
    """Against the float64 product of what the operands decode to."""

    @pytest.mark.sampled(7)
    @each_recipe
    @each_shape
    def test_are_the_gemms_of_the_quantised_operands(self, shape, recipe):
        x, w, dy = operands(shape)
        key = jax.random.key(5)
        dx, dw = gradients(recipe, x, w, dy, key=key)
        rotation, rounding = recipe.roles().gradient.hadamard or False, recipe.roles().gradient.rounding
        words = key if rounding == "stochastic" else None

        @jax.jit
        def quantised(x, w, dy):
            dy_row, dy_column = jlp.quantize_both(
                dy, jlp.NVFP4(), hadamard_columnwise=rotation, rounding=rounding, key=words
            )
            x_column = jlp.quantize(x, jlp.NVFP4(), axis=-2, hadamard=rotation)
            return dy_row, dy_column, x_column, jlp.quantize(w, recipe.roles().weight.format, axis=-1)

        dy_row, dy_column, x_column, w_row = quantised(x, w, dy)
        assert_is_product(dx, decoded(dy_row), decoded(w_row).T)
        assert_is_product(dw, decoded(x_column).T, decoded(dy_column))

    @pytest.mark.parametrize("bias_dtype", FLOATS)
    @pytest.mark.parametrize("kernel_dtype", FLOATS)
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_have_the_dtypes_of_what_they_are_gradients_of(self, dtype, kernel_dtype, bias_dtype):
        shapes = zip(((16, 32), (32, 16), (16,), (16, 16)), (dtype, kernel_dtype, bias_dtype, dtype), strict=True)
        x, w, bias, dy = (jax.ShapeDtypeStruct(*given) for given in shapes)

        def step(*given):
            return jax.vjp(lambda *a: jlp.linear(*a, recipe=FULL), *given[:3])[1](given[3])

        grads = jax.eval_shape(step, x, w, bias, dy)
        assert [g.dtype for g in grads] == [x.dtype, w.dtype, bias.dtype]

    def test_a_float32_kernel_gets_an_unrounded_gradient(self):
        x, w, dy = operands()
        dw = gradients(FULL, x, w, dy)[1]
        assert np.mean(dw == dw.astype(jnp.bfloat16).astype(np.float32)) < 0.1

    def test_a_bias_gets_the_sum_of_the_unquantised_gradient(self):
        x, w, dy = operands()

        @jax.jit
        def of_biases(biases):
            return [jax.vjp(lambda b: jlp.linear(x, w, b, recipe=FULL), bias)[1](dy)[0] for bias in biases]

        exact = np.asarray(dy).astype(np.float64).sum(0)
        for db in of_biases([np.zeros(48, jnp.dtype(dtype)) for dtype in FLOATS]):
            rtol = float(jnp.finfo(db.dtype).eps)
            np.testing.assert_allclose(np.asarray(db, np.float64), exact, rtol=rtol, atol=1e-5)

    def test_the_rotation_cancels_in_wgrad(self):
        numbers = np.random.default_rng(0)
        x, dy = (numbers.standard_normal((256, 32)).astype(jnp.bfloat16) for _ in range(2))
        exact = np.asarray(x, np.float64).T @ np.asarray(dy, np.float64)
        for rht in (False, True):
            recipe = jlp.NVFP4BlockScaling(disable_rht=not rht, disable_stochastic_rounding=True)
            dw = np.asarray(gradients(recipe, x, np.ones((32, 32), np.float32), dy)[1], np.float64)
            assert np.linalg.norm(dw - exact) < 0.2 * np.linalg.norm(exact)

    @pytest.mark.parametrize("argument", [0, 1, 2])
    def test_grad_of_grad_says_that_there_is_none(self, argument):
        x, w, _ = operands((16, 32, 16), "float32")

        def inner(x, w, weight_of_loss):
            return jax.grad(lambda w: (weight_of_loss * jlp.linear(x, w, recipe=FULL) ** 2).sum())(w).sum()

        with pytest.raises(NotImplementedError, match="linear: there is no second derivative .*recipe=None"):
            jax.eval_shape(jax.grad(inner, argument), x, w, 1.0)

    def test_forward_mode_is_refused(self):
        x, w, _ = operands((16, 32, 16))
        with pytest.raises(TypeError, match="custom_vjp"):
            jax.jvp(lambda w: jlp.linear(x, w, recipe=FULL), (w,), (w,))


class TestRandomBits:
    def grads(self, x, w, dy, **options):
        return gradients(FULL, x, w, dy, **options)

    def test_without_a_key_are_deterministic(self):
        assert_same_bytes(self.grads(*operands()), self.grads(*operands()))

    def test_without_a_key_depend_on_the_layers_name(self):
        assert np.any(self.grads(*operands())[0] != self.grads(*operands(), name="layer 2")[0])

    def first_rows(self, gradients_of_y, **options):
        """The first row of dgrad for gradients that agree in their first row."""
        x, w, _ = jax.device_get(operands())
        return [self.grads(x[: len(dy)], w, dy, **options)[0][0] for dy in gradients_of_y]

    def test_without_a_key_depend_on_the_gradients_amax(self):
        amax = np.max(np.abs(np.asarray(operands()[2])))
        # Twice the amax halves every block scale exactly: in other rows only the random bits can differ.
        pair = [np.array(operands()[2]) for _ in range(2)]
        pair[0][-1, -1], pair[1][-1, -1] = amax, 2 * amax
        assert_same_bytes(*self.first_rows(pair, key=jax.random.key(0)))
        keyless = self.first_rows(pair)
        assert jnp.any(keyless[0] != keyless[1])

    def test_without_a_key_depend_on_the_gradients_shape(self):
        dy = np.array(operands()[2])
        dy[0, 0] = np.max(np.abs(dy))
        assert_same_bytes(*self.first_rows([dy, dy[:16]], key=jax.random.key(0)))
        keyless = self.first_rows([dy, dy[:16]])
        assert jnp.any(keyless[0] != keyless[1])

    def test_a_key_decides_them(self):
        a, b, again = (self.grads(*operands(), key=jax.random.key(seed)) for seed in (0, 1, 0))
        assert_same_bytes(a, again)
        assert np.any(a[0] != b[0]) and np.any(a[1] != b[1])
        assert_same_bytes(a, self.grads(*operands(), key=jax.random.PRNGKey(0)))

    def test_the_key_does_not_touch_the_forward_pass(self):
        given = operands()
        assert_same_bytes(results(FULL, *given, key=jax.random.key(1))[0], results(FULL, *given)[0])

    def test_many_keys_average_to_the_gradient_of_the_unrounded(self):
        """Dgrad with a positive weight of equal elements: the mean over draws approaches the row sums of dy."""
        x, w = np.asarray(random_array((16, 16), "float32")), np.ones((16, 64), np.float32)
        dy = np.random.default_rng(3).uniform(0.1, 1, (16, 64)).astype(jnp.bfloat16).astype(np.float32)
        keys = [np.array([0, seed], np.uint32) for seed in range(200)]
        draws = np.stack([np.asarray(results(FULL, x, w, dy, key=key)[1])[:, 0] for key in keys])
        exact = np.asarray(dy, np.float64).sum(1)
        error = draws.mean(0) - exact
        # Saturation takes at most 0.3 % (numerics.md 11); the rest is noise of the mean.
        assert np.all(np.abs(error) < 0.003 * exact + 5 * draws.std(0) / np.sqrt(len(draws)))
        assert np.all(draws.std(0) > 0)


class TestResiduals:
    def nbytes(self, leaves):
        return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)

    def test_saved_activations_take_at_most_a_third_of_the_input(self):
        x, w, _ = operands((512, 256, 64))
        f = functools.partial(jlp.linear, recipe=FULL)
        saved = self.nbytes(kept(f, np.concatenate([x, x]), w)) - self.nbytes(kept(f, x, w))
        assert 0 < saved <= 0.35 * x.nbytes

    def test_nothing_is_kept_unquantised(self):
        x, w, _ = operands((512, 256, 64))
        big = [leaf for leaf in kept(functools.partial(jlp.linear, recipe=FULL), x, w) if leaf.size > 1024]
        assert {leaf.dtype.name for leaf in big} == {"uint8"}

    def network(self, x, weights):
        for w in weights:
            x = jax.nn.gelu(jlp.linear(x, w, recipe=FULL))
        return x.astype(jnp.float32).sum()

    @pytest.fixture
    def network_operands(self):
        return random_array((32, 64)), [np.asarray(random_array((64, 64), "float32", seed)) / 8 for seed in (1, 2)]

    @functools.cached_property
    def without_a_policy(self):
        return jax.jit(jax.grad(self.network, argnums=(0, 1)), compiler_options=EXACT)

    @pytest.mark.parametrize("policy", often(["names"], ["names", "input", "nothing", "everything"]))
    def test_a_checkpoint_policy_does_not_change_gradients(self, network_operands, policy):
        actual = jax.jit(jax.grad(self.checkpointed(policy), argnums=(0, 1)), compiler_options=EXACT)
        assert_same_bytes(actual(*network_operands), self.without_a_policy(*network_operands))

    def checkpointed(self, policy):
        policies = jax.checkpoint_policies
        return jax.checkpoint(
            self.network,
            policy={
                "names": policies.save_only_these_names(*jlp.CHECKPOINT_NAMES),
                "input": policies.save_only_these_names(jlp.CHECKPOINT_NAMES[0]),
                "nothing": policies.nothing_saveable,
                "everything": policies.everything_saveable,
            }[policy],
        )

    def test_checkpoint_names_keep_only_quantised_operands(self, network_operands):
        def codes(policy):
            leaves = kept(self.checkpointed(policy), *network_operands)
            return sorted(leaf.shape for leaf in leaves if leaf.dtype == jnp.uint8)

        x_column, w_row = [(64, 16), (64, 2)], [(64, 32), (4, 4)]  # codes and scales
        assert codes("nothing") == []
        assert codes("input") == sorted(x_column * 2)
        assert codes("names") == sorted((x_column + w_row) * 2)

    def test_what_the_checkpoint_names_keep_is_not_computed_again(self):
        x, weights = random_array((32, 64)), random_array((2, 64, 64), "float32", 1)

        def calls(policy):
            layer = jax.checkpoint(lambda x, w: (jlp.linear(x, w, recipe=FULL), None), policy=policy)

            def loss(x, weights):
                return jax.lax.scan(layer, x, weights)[0].astype(jnp.float32).sum()

            return native_calls(jax.value_and_grad(loss, argnums=(0, 1)), x, weights).total()

        policies = jax.checkpoint_policies
        kept, recomputed = calls(policies.everything_saveable), calls(policies.nothing_saveable)
        assert calls(policies.save_only_these_names(*jlp.CHECKPOINT_NAMES)) == kept
        assert kept < calls(policies.save_only_these_names(jlp.CHECKPOINT_NAMES[0])) < recomputed


class TestQuantizedKernel:
    @pytest.mark.parametrize("recipe", often([FULL, RECIPES[3]], RECIPES), ids=NAMES)
    def test_reuse_gives_the_bytes_of_quantising_again(self, recipe):
        x, w, dy = operands()
        reused = results(recipe, x, w, dy, quantized_kernel=jlp.quantize_kernel(w, recipe))
        assert_same_bytes(reused, results(recipe, x, w, dy))
        assert reused[2].dtype == w.dtype

    def test_microbatches_reach_the_master_weight(self):
        x, w, dy = operands()

        def loss(w, reuse):
            quantized = jlp.quantize_kernel(w, FULL) if reuse else None
            parts = [jlp.linear(part, w, recipe=FULL, quantized_kernel=quantized) for part in jnp.split(x, 2)]
            return (jnp.concatenate(parts).astype(jnp.float32) * dy).sum()

        found, expected = jax.jit(lambda w: (jax.grad(loss)(w, True), jax.grad(loss)(w, False)))(w)
        assert_same_bytes(found, expected)
        assert np.any(np.asarray(found))

    def test_alone_serves_inference(self):
        x, w, dy = operands()
        with jlp.autocast(FULL):
            quantized = jlp.quantize_kernel(w)

            @jax.jit
            def step(x, quantized, dy):
                y, pullback = jax.vjp(lambda x: jlp.linear(x, None, quantized_kernel=quantized), x)
                return y, *pullback(dy)

            found = step(x, quantized, dy)
        assert_same_bytes(found, results(FULL, x, w, dy)[:2])

    def test_is_not_quantised_again(self):
        x, w, _ = operands()
        quantized = jlp.quantize_kernel(w, FULL)
        plain = traced_calls(lambda x, w: jlp.linear(x, w, recipe=FULL), x, w)
        reused = traced_calls(lambda x, w, q: jlp.linear(x, w, recipe=FULL, quantized_kernel=q), x, w, quantized)
        assert (plain["jaxlowprec_quantize"], reused["jaxlowprec_quantize"]) == (2, 1)

    def test_stands_for_the_kernels_value_of_then(self):
        x, w, dy = operands()
        quantized = jlp.quantize_kernel(w, FULL)
        found = results(FULL, x, 2 * np.asarray(w), dy, quantized_kernel=quantized)
        assert_same_bytes(found, results(FULL, x, w, dy))

    def test_is_a_pytree_that_goes_through_jit_and_scan(self):
        x, w, _ = operands((16, 32, 32))
        both = np.stack([w, 2 * np.asarray(w)])
        quantized = jlp.quantize_kernel(both, FULL)

        def layer(x, q):
            return jlp.linear(x, None, recipe=FULL, quantized_kernel=q), None

        linear = jax.jit(functools.partial(jlp.linear, recipe=FULL))
        expected = linear(linear(x, both[0]), both[1])
        assert_same_bytes(jax.jit(lambda x, q: jax.lax.scan(layer, x, q)[0])(x, quantized), expected)


class TestHighPrecision:
    """recipe=None is XLA's own product, bit for bit."""

    @pytest.mark.parametrize("kernel_dtype", FLOATS)
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_forward_and_gradients(self, dtype, kernel_dtype):
        x, w, dy = operands((33, 50, 21), dtype, kernel_dtype)
        bias = random_array((21,), "float32", 3)

        def plain(x, w, b):
            return jax.lax.dot(x, w.astype(x.dtype)) + b.astype(x.dtype)

        def step(function):
            y, pullback = jax.vjp(function, x, w, bias)
            return y, pullback(dy)

        ours = functools.partial(jlp.linear, recipe=None)
        assert_same_bytes(*(jax.jit(functools.partial(step, function))() for function in (ours, plain)))

    def test_is_the_default_outside_of_a_context_and_wins_inside(self):
        x, w, _ = operands(kernel_dtype="bfloat16")
        assert_same_bytes(jlp.linear(x, w), x @ w)
        with jlp.autocast(FULL):
            assert_same_bytes(jlp.linear(x, w, recipe=None), x @ w)


class TestErrors:
    x, w, _ = operands()

    @pytest.mark.parametrize(
        ("error", "message", "arguments"),
        [
            (TypeError, "linear: recipe='nvfp4'; needs a recipe", {"recipe": "nvfp4"}),
            (ValueError, r"x \(32, 64\) and kernel \(48, 64\): needs x", {"kernel": w.T}),
            (ValueError, "needs x", {"kernel": w[None]}),
            (ValueError, "needs x", {"x": jnp.float32(1)}),
            (ValueError, r"bias has shape \(64,\); needs \(48,\)", {"bias": jnp.ones(64)}),
            (ValueError, "without quantized_kernel=", {"kernel": None}),
            (TypeError, "x has dtype int32", {"x": jnp.ones((32, 64), jnp.int32)}),
            (TypeError, "kernel has dtype complex64", {"kernel": w.astype(jnp.complex64)}),
            (TypeError, "bias has dtype int32", {"bias": jnp.ones(48, jnp.int32)}),
            (TypeError, "key", {"key": 3}),
            (
                ValueError,
                "16x16 for quantised inputs but the recipe wants NVFP4 1x16 for",
                {"quantized_kernel": "other recipe"},
            ),
            (ValueError, r"quantized_kernel has shape \(32, 48\)", {"quantized_kernel": "other shape"}),
            (ValueError, "quantized_kernel= without a recipe", {"quantized_kernel": "same", "recipe": None}),
        ],
    )
    def test_name_the_mistake(self, error, message, arguments):
        kinds = {
            "same": (self.w, RECIPES[0]),
            "other shape": (self.w[:32], RECIPES[0]),
            "other recipe": (self.w, RECIPES[0]),
        }
        chosen = {"x": self.x, "kernel": self.w, "recipe": FULL} | arguments
        if kind := chosen.get("quantized_kernel"):
            chosen["quantized_kernel"] = jlp.quantize_kernel(*kinds[kind])
            if kind == "other recipe":
                chosen["recipe"] = RECIPES[3]
        with pytest.raises(error, match=message):
            jlp.linear(**chosen)

    def test_of_quantize_kernel(self):
        with pytest.raises(ValueError, match="quantize_kernel: no recipe"):
            jlp.quantize_kernel(self.w)
        with pytest.raises(ValueError, match=r"quantize_kernel: kernel has shape \(64,\)"):
            jlp.quantize_kernel(self.w[:, 0], FULL)
        with pytest.raises(TypeError, match="quantize_kernel: recipe=3"):
            jlp.quantize_kernel(self.w, 3)
        with pytest.raises(TypeError, match="kernel has dtype int32"):
            jlp.quantize_kernel(self.w.astype(jnp.int32), FULL)
