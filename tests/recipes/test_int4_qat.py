"""Quantisation-aware training: which layers follow the recipe, and what linear computes for them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from tests.helpers import FLOATS, assert_same_bytes, format_name, random_array
from tests.products import kept

FORMATS = (
    jlp.Int4(32),
    jlp.Int4(16, symmetric=False),
    jlp.Int4(64, scale_dtype="float16"),
    jlp.NVFP4(),
    jlp.MXFP4(),
    jlp.MXFP8(),
    jlp.Float8Block(),
)
INT4 = jlp.Int4QAT(group_size=32)
each_format = pytest.mark.parametrize("fmt", FORMATS, ids=format_name)
ROUNDING = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 5e-3}


def operands(shape=(24, 64, 48), dtype="bfloat16", kernel_dtype="float32"):
    """X [T, K], kernel [K, N], the gradient of the result [T, N]."""
    t, k, n = shape
    return random_array((t, k), dtype, 0), random_array((k, n), kernel_dtype, 1), random_array((t, n), dtype, 2)


def product(a, b):
    """a @ b in float64."""
    return np.asarray(a).astype(np.float64) @ np.asarray(b).astype(np.float64)


def assert_near(actual, expected, tolerance):
    actual, expected = (np.asarray(a).astype(np.float64) for a in (actual, expected))
    assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected)


class TestPolicy:
    @pytest.mark.parametrize(
        "name",
        [
            *("", "layers/0/mlp/up", "Dense_0", "model.layers.3.mlp.gate_proj", "mlp/gate_up_proj", "attention/out"),
            *(
                "multihead/query",
                "headroom",
                "blocks_1/qkv",
                "ffw/w_gate",
                "moe/we_gate",
                "mlp_gate",
                "attention/output",
            ),
        ],
    )
    def test_by_default_a_layer_follows(self, name):
        assert INT4.applies_to(name)

    @pytest.mark.parametrize(
        "name",
        [
            *("lm_head", "model/head", "score_head", "embed_tokens", "Embed_0", "wte", "transformer/wpe"),
            *("norm1", "LayerNorm_0", "ln_f", "blocks/0/ln1x/ln_2", "moe/router", "mlp/gate", "model.mlp.gate"),
            *(
                "mlp/shared_expert_gate",
                "router_weights",
                "moe_gate",
                "logits",
                "logitdense",
                "classifier",
                "final_logits",
            ),
        ],
    )
    def test_by_default_a_layer_does_not(self, name):
        assert not INT4.applies_to(name)

    def test_exclude_comes_after_include(self):
        recipe = jlp.Int4QAT(32, include=("mlp/", "out$"), exclude=("down",))
        names = ["mlp/up", "mlp/down", "attention/out", "attention/outer", "mlp"]
        assert [recipe.applies_to(n) for n in names] == [True, False, True, False, False]
        assert jlp.Int4QAT(32, exclude=()).applies_to("lm_head")
        assert not jlp.Int4QAT(32, include=()).applies_to("mlp")

    @pytest.mark.parametrize("call", ["linear", "dot_general", "einsum"])
    def test_a_layer_left_out_is_computed_without_a_recipe(self, call):
        x, w, dy = operands()
        functions = {
            "linear": lambda x, w, **o: jlp.linear(x, w, **o),
            "dot_general": lambda x, w, **o: jlp.dot_general(x, w, (((1,), (0,)), ((), ())), **o),
            "einsum": lambda x, w, **o: jlp.einsum("tk,kn->tn", x, w, **o),
        }

        @functools.partial(jax.jit, static_argnames=("name", "recipe"))
        def step(name="", recipe=jlp.FROM_CONTEXT):
            y, pullback = jax.vjp(lambda x, w: functions[call](x, w, name=name, recipe=recipe), x, w)
            return y, *pullback(dy.astype(y.dtype))

        with jlp.autocast(INT4):
            router, up = step("router"), step("up")
        plain = step(recipe=None)
        assert_same_bytes(router, plain)
        assert np.any(np.asarray(up[0]) != np.asarray(plain[0]))

    def test_a_kernel_that_is_left_out_is_not_quantised(self):
        with pytest.raises(ValueError, match="keeps the weight of layer 'router' in high precision"):
            jlp.quantize_kernel(jnp.ones((64, 32)), INT4, name="router")


def served(w, fmt):
    """The master weight as WeightQAT quantises it; Int4 rounds by itself."""
    return w if isinstance(fmt, jlp.Int4) else np.asarray(w).astype(jnp.bfloat16).astype(w.dtype)


class TestForward:
    @pytest.mark.sampled(7)
    @each_format
    @pytest.mark.parametrize(("dtype", "tokens"), [("bfloat16", 40), ("float32", 1)])
    def test_is_the_product_that_serves(self, fmt, dtype, tokens):
        x, w, _ = operands((tokens, 64, 48), dtype)
        bias, recipe = random_array((48,), "float32", 3), jlp.WeightQAT(fmt)
        q = jlp.quantize(served(w, fmt), fmt, axis=-2)
        expected = jlp.scaled_matmul(x, q.mT, bias, preferred_element_type=dtype)

        def train(x, w, bias):
            return jlp.linear(x, w, bias, recipe=recipe)

        @jax.jit
        def every_way(x, w, bias, q):
            return train(x, w, bias), jax.vjp(train, x, w, bias)[0], jlp.linear(x, q, bias)

        assert_same_bytes(train(x, w, bias), expected)
        assert_same_bytes(jlp.linear(x, q, bias), expected)
        assert_same_bytes(every_way(x, w, bias, q), (expected,) * 3)

    @each_format
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_is_near_the_product_with_the_fake_quantised_weight(self, fmt, dtype):
        x, w, _ = operands(dtype=dtype)
        y = jlp.linear(x, w, recipe=jlp.WeightQAT(fmt))
        expected = product(x, jlp.fake_quantize(served(w, fmt), fmt, axis=-2))
        assert y.dtype == x.dtype
        assert_near(y, expected, ROUNDING[dtype])

    def test_int4qat_is_that_for_its_format(self):
        x, w, _ = operands()
        for recipe in (INT4, jlp.Int4QAT(16, symmetric=False, scale_dtype="float16")):
            y = jlp.linear(x, w, recipe=recipe)
            assert_same_bytes(y, jlp.linear(x, w, recipe=jlp.WeightQAT(recipe.weight_format)))

    def test_leading_axes_are_tokens(self):
        x, w, _ = operands()
        y = jlp.linear(x.reshape(2, 3, 4, 64), w, recipe=INT4)
        assert_same_bytes(y.reshape(24, 48), jlp.linear(x, w, recipe=INT4))

    @pytest.mark.sampled(7)
    @each_format
    @pytest.mark.parametrize("served", ["bfloat16", "float16"])
    def test_a_master_weight_is_rounded_to_what_is_deployed(self, fmt, served):
        if isinstance(fmt, jlp.Int4):
            fmt = dataclasses.replace(fmt, scale_dtype=served)
        x, w, _ = operands()
        recipe, rounded = jlp.WeightQAT(fmt, dtype=served), w.astype(served)
        assert jnp.any(rounded != w)
        y = jlp.linear(x, w, recipe=recipe)
        assert_same_bytes(y, jlp.linear(x, rounded, recipe=recipe))
        assert_same_bytes(jax.jit(lambda w: jlp.linear(x, w, recipe=recipe))(w), y)
        assert_same_bytes(y, jlp.linear(x, jlp.quantize_kernel(w, recipe).columnwise))

    def test_a_master_weight_is_served_as_it_is_where_asked_for(self):
        x, w, _ = operands()
        y = jlp.linear(x, w, recipe=jlp.WeightQAT(jlp.NVFP4(), dtype=None))
        assert_same_bytes(y, jlp.linear(x, jlp.quantize(w, jlp.NVFP4(), axis=-2)))
        with pytest.raises(ValueError, match='WeightQAT: dtype=\'float32\'; needs "bfloat16", "float16" or None'):
            jlp.WeightQAT(jlp.NVFP4(), dtype="float32")


@functools.partial(jax.jit, static_argnames="recipe")
def gradients(recipe, x, w, dy):
    return jax.vjp(lambda x, w: jlp.linear(x, w, recipe=recipe), x, w)[1](dy)


class TestBackward:
    def gradients(self, recipe, x, w, dy):
        return jax.device_get(gradients(recipe, x, w, dy))

    @pytest.mark.sampled(7)
    @each_format
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_dgrad_is_the_product_with_the_fake_quantised_weight(self, fmt, dtype):
        x, w, dy = operands(dtype=dtype)
        dx, _ = self.gradients(jlp.WeightQAT(fmt), x, w, dy)
        w = served(w, fmt)
        weight = jlp.quantize(w, fmt, axis=-2).dequantize(dtype)
        assert_same_bytes(weight, jlp.fake_quantize(w, fmt, axis=-2).astype(dtype))
        assert dx.dtype == x.dtype
        assert_near(dx, product(dy, weight.T), ROUNDING[dtype])

    @each_format
    def test_wgrad_does_not_depend_on_the_format(self, fmt):
        x, w, dy = operands()
        dw = self.gradients(jlp.WeightQAT(fmt), x, w, dy)[1]
        assert_same_bytes(dw, self.gradients(INT4, x, w, dy)[1])

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("kernel_dtype", FLOATS)
    def test_wgrad_reaches_the_master_weight_unchanged(self, dtype, kernel_dtype):
        x, w, dy = operands(dtype=dtype, kernel_dtype=kernel_dtype)
        dw = self.gradients(INT4, x, w, dy)[1]
        assert dw.dtype == w.dtype
        assert_near(dw, product(x.T, dy), ROUNDING[kernel_dtype])

    @pytest.mark.parametrize("kernel_dtype", ["bfloat16", "float16"])
    def test_clipped_wgrad_has_the_dtype_of_the_kernel_too(self, kernel_dtype):
        x, w, _ = operands(kernel_dtype=kernel_dtype)
        recipe = jlp.Int4QAT(group_size=16, symmetric=False, ste="clipped")
        for loss in (
            lambda w: jlp.linear(x, w, recipe=recipe).sum(),
            lambda w: jlp.grouped_matmul(x, w[None], jnp.array([len(x)]), recipe=recipe).sum(),
        ):
            assert jax.eval_shape(jax.grad(loss), w).dtype == w.dtype

    def test_wgrad_is_that_of_a_linear_without_a_recipe(self):
        x, w, dy = operands(dtype="float32")
        assert_near(self.gradients(INT4, x, w, dy)[1], self.gradients(None, x, w, dy)[1], 1e-6)

    def test_wgrad_of_a_float32_master_is_not_rounded_to_bfloat16(self):
        dw = self.gradients(INT4, *operands())[1]
        assert np.mean(dw == dw.astype(jnp.bfloat16)) < 0.1

    @pytest.mark.parametrize(
        "fmt", [jlp.Int4(16, symmetric=False), jlp.MXFP4(scale_rule="floor"), jlp.Int4(32)], ids=format_name
    )
    def test_clipped_is_masked_where_fake_quantize_masks(self, fmt):
        x, w, dy = operands()
        w = np.round(np.asarray(w) * 16) / 16 + np.float32((fmt.element == "int4") * 0.4)  # ties; groups off centre
        mask = np.asarray(jax.jit(jax.grad(lambda w: jlp.fake_quantize(w, fmt, axis=-2, ste="clipped").sum()))(w))
        assert np.any(mask == 0) == (fmt != jlp.Int4(32))
        dx, dw = self.gradients(jlp.WeightQAT(fmt), x, w, dy)
        clipped = self.gradients(jlp.WeightQAT(fmt, ste="clipped"), x, w, dy)
        assert_same_bytes(clipped, (dx, np.where(mask == 0, np.float32(0), dw)))

    def test_the_bias_gets_the_sum_of_the_gradient(self):
        x, w, dy = operands()
        bias = jnp.zeros(48, jnp.bfloat16)

        @jax.jit
        def both(bias, dy):
            db = jax.vjp(lambda b: jlp.linear(x, w, b, recipe=INT4), bias)[1](dy)[0]
            return db, dy.sum(0, dtype=jnp.float32).astype(jnp.bfloat16)

        assert_same_bytes(*both(bias, dy))

    def test_there_is_no_second_derivative(self):
        x, w, _ = operands()

        def slope(x):
            return jax.grad(lambda x: jlp.linear(x, w, recipe=INT4).astype(jnp.float32).sum())(x).astype(jnp.float32)

        with pytest.raises(NotImplementedError, match="no second derivative under a recipe"):
            jax.eval_shape(jax.grad(lambda x: slope(x).sum()), x)

    @pytest.mark.parametrize("ste", ["identity", "clipped"])
    def test_the_weight_is_kept_quantised(self, ste):
        x, w, _ = operands()
        recipe = jlp.Int4QAT(32, ste=ste)
        leaves = kept(lambda x, w: jlp.linear(x @ x.T @ x, w + 1, recipe=recipe), x, w)
        found = [leaf.shape for leaf in leaves if leaf.dtype == jnp.uint8]
        assert found == [(48, 32)]
        masters = [leaf for leaf in leaves if leaf.shape == w.shape and leaf.dtype == w.dtype]
        assert len(masters) == (ste == "clipped")

    def test_a_checkpoint_policy_can_keep_just_that(self):
        x, w, dy = operands()

        def network(x, w):
            return jlp.linear(jnp.sin(x), w, recipe=INT4)

        names = jax.checkpoint_policies.save_only_these_names(*jlp.CHECKPOINT_NAMES)
        for policy, codes in ((names, [(48, 32)]), (jax.checkpoint_policies.nothing_saveable, [])):
            saved = jax.checkpoint(network, policy=policy)
            assert [leaf.shape for leaf in kept(saved, x, w) if leaf.dtype == jnp.uint8] == codes
            assert_same_bytes(jax.vjp(saved, x, w)[1](dy), jax.vjp(network, x, w)[1](dy))


class TestTransforms:
    def test_vmap_is_a_loop(self):
        xs = random_array((3, 24, 64))
        ws, dys = random_array((3, 64, 48), "float32", 1), random_array((3, 24, 48), "bfloat16", 2)

        def step(x, w, dy):
            y, pullback = jax.vjp(lambda x, w: jlp.linear(x, w, recipe=INT4), x, w)
            return y, *pullback(dy)

        one = jax.jit(step)
        looped = [one(*each) for each in zip(*jax.device_get((xs, ws, dys)), strict=True)]
        y, dx, dw = jax.jit(jax.vmap(step))(xs, ws, dys)
        assert_same_bytes(y, jnp.stack([each[0] for each in looped]))
        for batched, i in ((dx, 1), (dw, 2)):
            assert_near(batched, jnp.stack([each[i] for each in looped]), 1e-2 if i == 1 else 1e-6)

    def test_scan_is_a_loop(self):
        x, weights = random_array((8, 64)), random_array((3, 64, 64), "float32", 1)
        scanned = jax.lax.scan(lambda x, w: (jlp.linear(x, w, recipe=INT4), None), x, weights)[0]
        for w in weights:
            x = jlp.linear(x, w, recipe=INT4)
        assert_same_bytes(scanned, x)

    def test_shapes_need_no_numbers(self):
        x, w, _ = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands())
        out = jax.eval_shape(lambda x, w: jlp.linear(x, w, recipe=INT4), x, w)
        assert (out.shape, out.dtype) == ((24, 48), jnp.bfloat16)

    def test_another_recipe_is_another_trace(self):
        x, w, _ = operands()
        traces = []

        @jax.jit
        def call(x, w):
            traces.append(jlp.current_recipe())
            return jlp.linear(x, w)

        recipes = [INT4, jlp.Int4QAT(64), jlp.Int4QAT(32, symmetric=False), jlp.Int4QAT(32, exclude=(".*",)), INT4]
        results = []
        for recipe in recipes:
            with jlp.autocast(recipe):
                results.append(call(x, w))
        assert traces == recipes[:-1]
        assert_same_bytes(results[0], results[-1])
        assert_same_bytes(results[3], call(x, w))
        for other in results[1:4]:
            assert jnp.any(other != results[0])

    def test_equal_layers_are_traced_once_under_any_name(self):
        x, w, _ = operands((24, 64, 64))
        names = [f"layers/{i}/up" for i in range(4)]

        def network(x, w, names):
            for name in names:
                x = jlp.linear(x, w, recipe=INT4, name=name)
            return x

        text = jax.jit(network, static_argnums=2).lower(x, w, tuple(names)).as_text()
        assert text.count("func.func private @_matmul") == 1


class TestGeneralProducts:
    experts = random_array((4, 64, 48), "float32", 1)
    tokens = random_array((4, 24, 64))

    def test_experts_are_batch_axes(self):
        dims = (((2,), (1,)), ((0,), (0,)))
        tokens, experts = self.tokens, self.experts

        @jax.jit
        def every_way():
            q = jlp.quantize(experts, INT4.weight_format, axis=-2)
            return (
                jlp.dot_general(tokens, experts, dims, recipe=INT4),
                jnp.stack([jlp.linear(tokens[i], experts[i], recipe=INT4) for i in range(len(experts))]),
                jlp.einsum("etk,ekn->etn", tokens, experts, recipe=INT4),
                jlp.dot_general(tokens, q, dims),
                jlp.einsum("etk,ekn->nte", tokens, q).T,
            )

        y, *others = every_way()
        assert_same_bytes(others, [y] * 4)

    def test_a_transposed_kernel_is_quantised_along_contraction(self):
        x, w, dy = operands()

        @jax.jit
        def both(x, w, dy):
            y, pullback = jax.vjp(lambda x, w: jlp.linear(x, w, recipe=INT4), x, w)
            dx, dw = pullback(dy)
            transposed = (((1,), (1,)), ((), ()))
            turned, pullback = jax.vjp(lambda x, w: jlp.dot_general(x, w, transposed, recipe=INT4), x, w.T)
            return (turned, *pullback(dy)), (y, dx, dw.T)

        assert_same_bytes(*both(x, w, dy))

    def test_a_float32_master_meets_bfloat16_activations(self):
        y = jlp.dot_general(self.tokens[0], self.experts[0], (((1,), (0,)), ((), ())), recipe=INT4)
        assert y.dtype == jnp.bfloat16


class TestReuse:
    """A kernel quantised once for several microbatches."""

    def test_is_equal_and_the_master_weight_gets_its_gradient(self):
        x, w, dy = operands()
        quantized = jlp.quantize_kernel(w, INT4)
        assert quantized.rowwise is None and quantized.weight_only and quantized.shape == w.shape

        @jax.jit
        def step(x, w, dy, once):
            y, pullback = jax.vjp(lambda x, w: jlp.linear(x, w, recipe=INT4, quantized_kernel=once), x, w)
            return y, *pullback(dy)

        assert_same_bytes(step(x, w, dy, quantized), step(x, w, dy, None))

    @pytest.mark.parametrize(
        ("made_for", "used_with"),
        [(INT4, jlp.Int4QAT(64)), (INT4, jlp.NVFP4BlockScaling()), (jlp.MXFP8BlockScaling(), INT4)]
        + [
            (jlp.MXFP8BlockScaling(), jlp.WeightQAT(jlp.MXFP8())),
            (jlp.WeightQAT(jlp.MXFP8()), jlp.MXFP8BlockScaling()),
        ],
        ids=["group", "no qat", "qat", "qat of the same format", "no qat of the same format"],
    )
    def test_only_for_the_recipe_it_was_made_for(self, made_for, used_with):
        x, w, _ = operands()
        with pytest.raises(ValueError, match="quantise it again under this recipe"):
            jlp.linear(x, w, recipe=used_with, quantized_kernel=jlp.quantize_kernel(w, made_for))

    def test_not_without_a_recipe(self):
        x, w, _ = operands()
        with pytest.raises(ValueError, match="without a recipe that quantises"):
            jlp.linear(x, w, recipe=None, quantized_kernel=jlp.quantize_kernel(w, INT4))


class TestWholeGroups:
    message = r"layer 'mlp/up' has a kernel of shape \(48, 32\), K = 48, which is not a multiple of the group of 32"

    def test_k_must_be_a_multiple_of_the_group(self):
        x, w = jnp.ones((8, 48)), jnp.ones((48, 32))
        for call in (jlp.linear, lambda x, w, **o: jlp.einsum("tk,kn->tn", x, w, **o)):
            with pytest.raises(ValueError, match=self.message):
                call(x, w, recipe=INT4, name="mlp/up")
        with pytest.raises(ValueError, match=self.message):
            jlp.quantize_kernel(w, INT4, name="mlp/up")

    def test_unless_the_format_pads(self):
        x, w, _ = operands((8, 48, 32))
        recipe = jlp.WeightQAT(jlp.Int4(32, pad=True))
        filled = [np.pad(x, ((0, 0), (0, 16))), np.pad(w, ((0, 16), (0, 0)))]
        assert_same_bytes(jlp.linear(x, w, recipe=recipe), jlp.linear(*filled, recipe=INT4))
