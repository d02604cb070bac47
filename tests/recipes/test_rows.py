"""Eight bits by rows in layers: training multiplies what is served, and the backward pass follows its roles."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.arrays.row_formats import LEAST_SCALE_SERVED
from jaxlowprec.checkpoints import schemes
from jaxlowprec.ops.quantize.random_bits import key_words, slice_words
from tests.flax.libraries import LIBRARIES
from tests.helpers import assert_same_bytes, random_array

RECIPES = {"fp8": jlp.Float8RowScaling(), "int8": jlp.Int8RowScaling()}
NEAREST = {"fp8": jlp.Float8RowScaling(), "int8": jlp.Int8RowScaling(disable_stochastic_rounding=True)}
SERVED = {
    "W8A8": jlp.WeightQAT(jlp.Int8Rows("bfloat16"), activation_format=jlp.Int8Rows()),
    "FP8 dynamic": jlp.WeightQAT(
        jlp.Float8Rows(scale_dtype="bfloat16"), activation_format=jlp.Float8Rows(least_scale=LEAST_SCALE_SERVED)
    ),
    "MXFP4 by MXFP8": jlp.WeightQAT(jlp.MXFP4(scale_rule="even"), activation_format=jlp.MXFP8()),
    "MXFP4 by FP8": jlp.WeightQAT(jlp.MXFP4(scale_rule="even"), activation_format=jlp.Float8Block(power_of_two=False)),
    "W4A8": jlp.WeightQAT(jlp.Int4(32), activation_format=jlp.Int8Rows()),
    "MXFP4 by INT8": jlp.WeightQAT(jlp.MXFP4(), activation_format=jlp.Int8Rows()),
}
by_name = pytest.mark.parametrize("name", RECIPES)
as_served = pytest.mark.parametrize("name", SERVED)


def operands(seed=0):
    return random_array((4, 24, 64), "bfloat16", seed), random_array((64, 96), "float32", seed + 1)


def products(recipe, x, w, dy):
    """The result and both gradients under a recipe."""

    def layer(x, w):
        with jlp.autocast(recipe):
            return jlp.linear(x, w)

    y, back = jax.vjp(layer, x, w)
    return y, *back(dy)


class TestThreeGemms:
    @by_name
    def test_each_is_scaled_along_what_it_does_not_contract(self, name):
        (x, w), recipe = operands(), NEAREST[name]
        dy = random_array((4, 24, 96), "bfloat16", 5)
        found = jax.jit(lambda *args: products(recipe, *args))(x, w, dy)
        roles = recipe.roles()
        (x_row, w_column), (dy_row, w_row), (x_column, dy_column) = (
            [role.format for role in roles.operands(gemm)] for gemm in ("fprop", "dgrad", "wgrad")
        )
        rows, served = x.reshape(96, 64), w.astype(jnp.bfloat16)
        flat = dy.reshape(96, 96)
        y = jlp.scaled_matmul(jlp.quantize(rows, x_row), jlp.quantize(served, w_column, axis=-2).mT)
        dx = jlp.scaled_matmul(jlp.quantize(flat, dy_row), jlp.quantize(served, w_row))
        dw = jlp.scaled_matmul(
            jlp.quantize(rows, x_column, axis=-2).mT,
            jlp.quantize(flat, dy_column, axis=-2).mT,
            preferred_element_type=jnp.float32,
        )
        assert_same_bytes(found, (y.reshape(4, 24, 96), dx.reshape(4, 24, 64), dw))

    @by_name
    def test_wgrad_in_high_precision(self, name):
        (x, w), recipe = operands(), dataclasses.replace(NEAREST[name], high_precision_wgrad=True)
        dy = random_array((4, 24, 96), "bfloat16", 5)
        _, _, dw = products(recipe, x, w, dy)
        exact = np.asarray(x.reshape(96, 64), np.float32).T @ np.asarray(dy.reshape(96, 96), np.float32)
        np.testing.assert_allclose(dw, exact, rtol=1e-4, atol=1e-3)

    def test_gradients_of_integers_are_rounded_stochastically(self):
        (x, w), dy = operands(), random_array((4, 24, 96), "bfloat16", 5)
        random = products(RECIPES["int8"], x, w, dy)
        nearest = products(NEAREST["int8"], x, w, dy)
        assert_same_bytes(random[0], nearest[0])
        assert (random[1] != nearest[1]).any() and (random[2] != nearest[2]).any()

    def test_gradients_have_no_least_scale(self):
        """Lines of tiny gradients would underflow by the least scale of served activations."""
        for recipe in RECIPES.values():
            roles = recipe.roles()
            inputs = {roles.operands("fprop")[0].format}
            others = {role.format for gemm in ("dgrad", "wgrad") for role in roles.operands(gemm)}
            assert all(getattr(fmt, "least_scale", 0) == 0 for fmt in others)
            if isinstance(recipe, jlp.Float8RowScaling):
                assert {fmt.least_scale for fmt in inputs} == {np.float32(LEAST_SCALE_SERVED)}
        x, w = operands()
        dy = random_array((4, 24, 96), "bfloat16", 5) * jnp.bfloat16(2.0**-60)
        _, dx, _ = products(RECIPES["fp8"], x, w, dy)
        exact = np.asarray(dy, np.float32) @ np.asarray(w).T
        np.testing.assert_allclose(np.asarray(dx, np.float32), exact, rtol=0, atol=0.2 * np.abs(exact).max())
        assert (dx != 0).mean() > 0.99


@pytest.mark.parametrize(("name", "scheme"), [("fp8", "fp8_channel"), ("int8", "int8_channel")])
def test_what_is_trained_is_what_is_exported(name, scheme):
    """The scheme stores the codes and scales that fprop has read; read back they give the same result."""
    x, w = operands()
    weight = RECIPES[name].roles().operands("fprop")[1].format
    with jlp.autocast(RECIPES[name]):
        y, kernel = jlp.linear(x, w), jlp.quantize_kernel(w)
    channel = schemes.by_name(scheme)
    stored = channel.store(jax.tree.map(np.asarray, kernel.columnwise.mT))
    loaded = channel.load(stored)
    inputs = RECIPES[name].roles().operands("fprop")[0].format
    serving = jlp.WeightQAT(loaded.format, activation_format=inputs)
    with jlp.autocast(serving):
        assert_same_bytes(jlp.linear(x, loaded.mT), y)
    assert stored["weight_scale"].dtype == jnp.bfloat16 and type(loaded.format) is type(weight)


@pytest.mark.parametrize(("name", "scheme"), [("MXFP4 by FP8", "mxfp4_fp8"), ("W4A8", "w4a8")])
def test_an_exported_weight_is_multiplied_as_it_was_trained(name, scheme):
    """Read back from a checkpoint of four-bit weights by eight-bit activations."""
    (x, w), recipe = operands(), SERVED[name]
    made = schemes.by_name(scheme, **({"group_size": 32} if scheme == "w4a8" else {}))
    kernel = jlp.quantize(w.astype(jnp.bfloat16), recipe.weight_format, axis=-2).mT
    loaded = made.load(made.store(jax.tree.map(np.asarray, kernel)))
    assert loaded.format == recipe.weight_format
    with jlp.autocast(recipe):
        assert_same_bytes(jlp.linear(x, loaded.mT), jlp.linear(x, w))


class TestExperts:
    """Rows in groups: a step is that of the experts, each with its rows alone."""

    SIZES = np.array([20, 0, 45, 1, 20], np.int32)  # and rows of none

    @pytest.mark.parametrize("name", [*RECIPES, *SERVED])
    def test_a_step_is_that_of_each_expert_alone(self, name):
        recipe = {**NEAREST, **SERVED}[name]
        x, w = random_array((96, 64), "bfloat16"), random_array((5, 64, 96), "float32", 1)
        dy = random_array((96, 96), "bfloat16", 5)

        @jax.jit
        def step(x, w, dy, sizes):
            y, back = jax.vjp(lambda x, w: jlp.grouped_matmul(x, w, sizes, recipe=recipe), x, w)
            return y, *back(dy)

        found = step(x, w, dy, self.SIZES)
        expected = [np.zeros(v.shape, v.dtype) for v in found]
        for e, end in enumerate(np.cumsum(self.SIZES)):
            rows = slice(int(end) - int(self.SIZES[e]), int(end))
            if self.SIZES[e]:
                y, back = jax.vjp(functools.partial(jlp.linear, recipe=recipe), x[rows], w[e])
                dx, dw = back(dy[rows])
                expected[0][rows], expected[1][rows], expected[2][e] = y, dx, dw
        if name in RECIPES:
            assert_same_bytes(found, tuple(expected))
        else:  # gradients are products in high precision, added up in XLA's order
            assert_same_bytes(found[0], expected[0])
            for a, b in zip(found, expected, strict=True):
                np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2**-7, atol=0.02)

    @by_name
    def test_random_bits_are_those_of_each_expert_alone(self, name):
        recipe = RECIPES[name]
        x, w = random_array((96, 64), "bfloat16"), random_array((5, 64, 96), "float32", 1)
        dy, key = random_array((96, 96), "bfloat16", 5), jax.random.key(3)
        back = jax.vjp(lambda x, w: jlp.grouped_matmul(x, w, self.SIZES, recipe=recipe, key=key), x, w)[1]
        dx, dw = jax.jit(back)(dy)
        words = slice_words(key_words("test", key, ()), (5,))
        rows = slice(20, 65)
        alone = jax.vjp(lambda x, w: jlp.linear(x, w, recipe=recipe, key=words[2]), x[rows], w[2])[1](dy[rows])
        assert_same_bytes((dx[rows], dw[2]), alone)

    @pytest.mark.parametrize("saved", ["quantized", "recompute"])
    @by_name
    def test_the_fused_mlp_is_its_products(self, name, saved):
        x, shapes = random_array((96, 64), "bfloat16"), [(5, 64, 32), (5, 64, 32), (5, 32, 64)]
        kernels = [random_array(shape, "float32", 1 + i) for i, shape in enumerate(shapes)]
        recipe, sizes = NEAREST[name], jnp.asarray(self.SIZES)

        def separate(x, kernels):
            gate, up = (jlp.grouped_matmul(x, w, sizes, recipe=recipe) for w in kernels[:2])
            return jlp.grouped_matmul(jlp.swiglu(gate, up), kernels[2], sizes, recipe=recipe)

        def fused(x, kernels):
            return jlp.grouped_mlp(x, kernels, sizes, recipe=recipe, saved=saved)

        found, expected = (
            jax.jit(lambda x, w, f=f: (f(x, w), jax.grad(lambda w: f(x, w).astype(jnp.float32).sum())(w)))(x, kernels)
            for f in (fused, separate)
        )
        assert_same_bytes(found, expected)

    @by_name
    @pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)
    def test_a_block_of_experts_learns(self, name, library):
        x = random_array((4, 24, 64), "bfloat16")
        block = library.model(library.maker("MoE", 5, 64, 32, 2, dtype=jnp.bfloat16), x)

        def loss(tree):
            y, _ = block.apply(tree, x)
            return jnp.square(y.astype(jnp.float32)).mean()

        def step(recipe):
            with jlp.autocast(recipe, enabled=recipe is not None):
                return jax.jit(jax.value_and_grad(loss))(block.tree)

        (value, gradients), (exact, wanted) = step(RECIPES[name]), step(None)
        np.testing.assert_allclose(value, exact, rtol=0.05)
        for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
            assert float(jnp.linalg.norm(a - b)) <= 0.2 * float(jnp.linalg.norm(b))

    @as_served
    def test_a_block_for_serving_computes_the_same(self, name):
        trained = jlp.nnx.MoE(5, 64, 32, top_k=2, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
        served, x = jlp.quantize_params(trained, SERVED[name]), random_array((4, 24, 64), "bfloat16")
        with jlp.autocast(SERVED[name]):
            assert_same_bytes(served(x)[0], trained(x)[0])

    def test_loaded_experts_are_multiplied_as_they_serve(self):
        """W8A8: by quantised activations under the recipe, else by activations in high precision."""
        x, w = random_array((96, 64), "bfloat16"), random_array((5, 64, 96), "bfloat16", 1)
        q = jlp.quantize(w, jlp.Int8Rows("bfloat16"), axis=-2)
        sizes = jnp.asarray(self.SIZES)
        recipe = SERVED["W8A8"]
        served = jlp.grouped_matmul(x, q, sizes, recipe=recipe)
        assert_same_bytes(served, jlp.grouped_matmul(x, w.astype(jnp.float32), sizes, recipe=recipe))
        plain, rows = jlp.grouped_matmul(x, q, sizes), slice(20, 65)
        alone = jax.tree.map(lambda leaf: leaf[2], q)
        assert_same_bytes(plain[rows], jlp.linear(x[rows], alone))
        assert (served != plain).any()


class TestAsServed:
    @as_served
    def test_forward_is_the_product_that_serves(self, name):
        (x, w), recipe = operands(), SERVED[name]
        with jlp.autocast(recipe):
            y = jax.jit(jlp.linear)(x, w)
        a = jlp.quantize(x.reshape(96, 64), recipe.activation_format)
        b = jlp.quantize(w.astype(jnp.bfloat16), recipe.weight_format, axis=-2)
        assert_same_bytes(y.reshape(96, 96), jlp.scaled_matmul(a, b.mT))

    @as_served
    def test_gradients_pass_the_rounding_unchanged(self, name):
        (x, w), recipe = operands(), SERVED[name]
        dy = random_array((4, 24, 96), "bfloat16", 5)
        _, dx, dw = products(recipe, x, w, dy)
        decoded = jlp.fake_quantize(w.astype(jnp.bfloat16), recipe.weight_format, axis=-2)
        inputs = jlp.fake_quantize(x.reshape(96, 64), recipe.activation_format)
        flat = np.asarray(dy.reshape(96, 96), np.float32)
        exact = flat @ np.asarray(decoded, np.float32).T, np.asarray(inputs, np.float32).T @ flat
        np.testing.assert_allclose(np.asarray(dx, np.float32).reshape(96, 64), exact[0], rtol=0.02, atol=0.05)
        np.testing.assert_allclose(np.asarray(dw), exact[1], rtol=0.02, atol=0.05)

    @as_served
    def test_a_model_for_serving_computes_the_same(self, name):
        recipe, x = SERVED[name], operands()[0]
        trained = jlp.nnx.Linear(64, 96, rngs=nnx.Rngs(0))
        served = jlp.quantize_params(trained, recipe)
        with jlp.autocast(recipe):
            assert_same_bytes(served(x), trained(x))
            gradients = jax.grad(lambda x: served(x).astype(jnp.float32).sum())(x)
        assert gradients.shape == x.shape and bool(jnp.isfinite(gradients).all())
        assert "loaded" in str(jlp.explain(served, recipe))

    def test_a_loaded_weight_alone_is_for_inputs_in_high_precision(self):
        x, w = operands()
        q = jlp.quantize(w.astype(jnp.bfloat16), jlp.Int8Rows("bfloat16"), axis=-2)
        with jlp.autocast(SERVED["W8A8"]):
            quantised = jlp.linear(x, q)
        assert (quantised != jlp.linear(x, q)).any()


class TestBadInput:
    @pytest.mark.parametrize("make", [jlp.Float8RowScaling, jlp.Int8RowScaling])
    @pytest.mark.parametrize(
        ("field", "value"), [("high_precision_wgrad", 1), ("served_dtype", "int8"), ("backward_override", "none")]
    )
    def test_fields(self, make, field, value):
        with pytest.raises((TypeError, ValueError), match=f"{make.__name__}: {field}="):
            make(**{field: value})

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"activation_format": "int8"}, TypeError, "activation_format='int8'; needs a format"),
            ({"activation_format": jlp.Float8Tensor()}, ValueError, "its scale is that of the tensor"),
            ({"activation_format": jlp.Float8Rows()}, NotImplementedError, "no GEMM of integers with floats"),
            ({"activation_format": jlp.Int8Rows(), "ste": "clipped"}, ValueError, 'needs ste="identity"'),
        ],
    )
    def test_activations_that_do_not_meet_the_weights(self, options, error, message):
        with pytest.raises(error, match=message):
            jlp.WeightQAT(jlp.Int8Rows("bfloat16"), **options)
