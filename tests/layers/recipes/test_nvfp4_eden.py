"""`NVFP4Eden`: the roles of its table, the products that it makes, and how much less noise wgrad has."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, random_array

DEFAULT, RECIPE = jlp.NVFP4BlockScaling(), jlp.NVFP4Eden()
CHOSEN = jlp.NVFP4(scale_rule="four_over_six_mse")
KEY = jax.random.key(3)
X, W, DY = random_array((256, 128)), random_array((128, 96), "float32", 1), random_array((256, 96), seed=2)


def step(recipe, key=KEY, x=X, w=W, dy=DY):
    y, pullback = jax.vjp(lambda x, w: jlp.linear(x, w, recipe=recipe, key=key), x, w)
    return (y, *pullback(dy))


def relative_square(found, exact):
    return float(jnp.sum(jnp.square(found - exact)) / jnp.sum(jnp.square(exact)))


class TestRoles:
    def test_are_those_of_the_table(self):
        roles = RECIPE.roles()
        weight = jlp.Role(jlp.NVFP4((16, 16), "four_over_six_mse"))
        operand = jlp.Role(CHOSEN, "eden", jlp.Hadamard(128, "drawn"))
        assert roles.operands("fprop") == (jlp.Role(CHOSEN), weight)
        assert roles.operands("dgrad") == (jlp.Role(jlp.NVFP4(), "stochastic"), weight)
        assert roles.operands("wgrad") == (operand, operand)

    @pytest.mark.parametrize("rule", ["six", "four_over_six", "four_over_six_mse", "search"])
    @pytest.mark.parametrize("size", [16, 32, 64, 128])
    def test_fields_are_followed(self, rule, size):
        recipe = jlp.NVFP4Eden(True, rule, size, "fixed", "dequantized")
        operand = jlp.Role(jlp.NVFP4(scale_rule=rule), "eden", jlp.Hadamard(size))
        assert recipe.roles().operands("wgrad") == (operand, operand)
        assert recipe.roles().weight.format == recipe.roles().input.format == jlp.NVFP4(scale_rule=rule)
        assert recipe.roles().operands("dgrad", recipe.backward_override) == "dequantized"

    @pytest.mark.parametrize(
        ("field", "value", "error", "needs"),
        [
            ("disable_2d_quantization", 1, TypeError, "needs True or False"),
            ("scale_rule", "best", ValueError, 'needs "six" or "four_over_six" or'),
            ("rotation", 256, ValueError, "needs 16 or 32 or 64 or 128"),
            ("rotation", True, ValueError, "needs 16"),
            ("signs", None, ValueError, 'needs "drawn" or "fixed"'),
            ("backward_override", "bf16", ValueError, 'needs None or "high_precision" or "dequantized"'),
            ("forward_override", "dequantized", ValueError, 'needs None or "high_precision"'),
        ],
    )
    def test_bad_fields(self, field, value, error, needs):
        with pytest.raises(error, match=f"NVFP4Eden: {field}=.*; {needs}"):
            jlp.NVFP4Eden(**{field: value})

    def test_both_overrides_would_quantise_nothing(self):
        with pytest.raises(ValueError, match="NVFP4Eden: forward_override='high_precision' and backward_override="):
            jlp.NVFP4Eden(forward_override="high_precision", backward_override="dequantized")


class TestProducts:
    def test_forward_reads_operands_of_chosen_scales(self):
        x, w = jlp.quantize(X, CHOSEN), jlp.quantize(W, jlp.NVFP4((16, 16), "four_over_six_mse"), axis=-2)
        assert_same_bytes(step(RECIPE)[0], jlp.scaled_matmul(x, w.mT, out_dtype=X.dtype))

    def test_dgrad_is_the_default_recipes_but_for_the_weight(self):
        plain = dataclasses.replace(RECIPE, scale_rule="six")
        assert_same_bytes(step(plain)[:2], step(DEFAULT)[:2])
        assert (step(RECIPE)[1] != step(DEFAULT)[1]).any()

    def test_wgrad_rotates_by_signs_of_the_key(self):
        roles = RECIPE.roles()
        operands = {"input": {"fprop": CHOSEN, "wgrad": roles.wgrad[0]}, "weight": roles.weight}
        operands["grad_output"] = {"dgrad": roles.gradient, "wgrad": roles.wgrad[1]}
        assert_same_bytes(step(RECIPE), step(jlp.Custom(lambda role: operands[role.tensor_type])))
        other, fixed = step(RECIPE, jax.random.key(4)), step(jlp.NVFP4Eden(signs="fixed"))
        assert all((a[2] != b[2]).any() for a, b in itertools.combinations([step(RECIPE), other, fixed], 2))

    def test_wgrad_has_six_tenths_of_the_noise(self):
        x, dy = (jax.random.normal(jax.random.key(i), (4096, 64)) for i in range(2))
        w = jnp.zeros((64, 64))
        exact = jnp.matmul(x.T, dy, precision="highest")
        errors = {recipe: relative_square(step(recipe, KEY, x, w, dy)[2], exact) for recipe in (DEFAULT, RECIPE)}
        assert 0.55 < errors[RECIPE] / errors[DEFAULT] < 0.65

    def test_its_mean_is_the_gradient(self):
        exact = jnp.matmul(jnp.float32(X).T, jnp.float32(DY), precision="highest")
        keys = jax.random.split(jax.random.key(0), 64)
        draws = jax.jit(jax.vmap(lambda key: step(RECIPE, key)[2], axis_size=64))(keys)
        one, mean = relative_square(draws[0], exact), relative_square(draws.mean(0), exact)
        assert 0.7 < 64 * mean / one < 1.5

    def test_a_new_key_compiles_nothing(self):
        compiled = jax.jit(lambda key: step(RECIPE, key))
        results = [compiled(jax.random.key(seed))[2] for seed in range(3)]
        assert compiled._cache_size() == 1 and (results[0] != results[1]).any()

    def test_the_forward_pass_in_high_precision(self):
        found = step(jlp.NVFP4Eden(forward_override="high_precision"))
        assert_same_bytes(found[0], step(jlp.NVFP4BlockScaling(forward_override="high_precision"))[0])
        assert_same_bytes(found[1:], step(RECIPE)[1:])


class TestLayers:
    @pytest.mark.parametrize("signs", ["drawn", "fixed"])
    def test_of_linen_and_nnx(self, signs):
        recipe, options = jlp.NVFP4Eden(signs=signs), {"use_bias": False, "dtype": jnp.bfloat16}
        dense = jlp.linen.Dense(96, recipe=recipe, **options)
        linear = jlp.nnx.Linear(128, 96, recipe=recipe, rngs=nnx.Rngs(0), **options)
        linear.kernel[...] = W
        expected = jlp.linear(X, W, recipe=recipe)
        assert_same_bytes([dense.apply({"params": {"kernel": W}}, X), linear(X)], [expected, expected])

    def test_of_experts_have_fixed_signs(self):
        w, sizes = jnp.stack([W, -W]), jnp.array([100, 156], jnp.int32)

        def gradient(recipe):
            loss = lambda w: jlp.grouped_matmul(X, w, sizes, None, recipe, KEY).astype(jnp.float32).var()  # noqa: E731
            return jax.grad(loss)(w)

        with pytest.raises(ValueError, match="rows in groups take only NVFP4's rotation of size 16 with fixed signs"):
            gradient(RECIPE)
        experts = jlp.NVFP4Eden(rotation=16, signs="fixed")
        assert 0 < relative_square(gradient(experts), gradient(None)) < 0.1
