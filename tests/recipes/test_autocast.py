"""autocast: a scoped recipe, each thread's own, part of jit's cache key, captured in the forward pass."""

import threading

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, random_array

FULL = jlp.NVFP4BlockScaling()
PLAIN = jlp.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)


def test_there_is_no_recipe_outside_of_any_context():
    assert jlp.current_recipe() is None


def test_contexts_nest_and_are_restored():
    with jlp.autocast(FULL):
        assert jlp.current_recipe() is FULL
        with jlp.autocast(PLAIN):
            assert jlp.current_recipe() is PLAIN
            with jlp.autocast(enabled=False):
                assert jlp.current_recipe() is None
                with jlp.autocast(FULL):
                    assert jlp.current_recipe() is FULL
                assert jlp.current_recipe() is None
            assert jlp.current_recipe() is PLAIN
        assert jlp.current_recipe() is FULL
    assert jlp.current_recipe() is None


def test_disabled_means_no_recipe_even_if_one_is_passed():
    with jlp.autocast(FULL), jlp.autocast(PLAIN, enabled=False):
        assert jlp.current_recipe() is None


def test_the_outer_recipe_is_back_after_an_exception():
    with jlp.autocast(FULL):
        with pytest.raises(RuntimeError, match="inside"), jlp.autocast(PLAIN):
            raise RuntimeError("inside")
        assert jlp.current_recipe() is FULL
    with pytest.raises(RuntimeError, match="inside"), jlp.autocast(FULL):
        raise RuntimeError("inside")
    assert jlp.current_recipe() is None


def test_threads_do_not_see_each_others_recipe():
    seen, inside, checked = {}, threading.Event(), threading.Event()

    def other():
        seen["before"] = jlp.current_recipe()
        with jlp.autocast(PLAIN):
            inside.set()
            checked.wait(30)
            seen["inside"] = jlp.current_recipe()

    with jlp.autocast(FULL):
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(30)
        assert jlp.current_recipe() is FULL
        checked.set()
        thread.join()
    assert seen == {"before": None, "inside": PLAIN}


class TestJit:
    def traced(self):
        """A jitted function and the recipes it was traced under."""
        recipes = []

        @jax.jit
        def f(x):
            recipes.append(jlp.current_recipe())
            return x + 1

        return f, recipes

    def test_another_recipe_traces_anew_and_returning_hits_the_cache(self):
        f, recipes = self.traced()
        f(1.0)
        for _ in range(3):
            with jlp.autocast(FULL):
                f(1.0)
            with jlp.autocast(PLAIN):
                f(1.0)
            with jlp.autocast(enabled=False):
                f(1.0)
            f(1.0)
        assert recipes == [None, FULL, PLAIN]

    def test_an_equal_recipe_hits_the_cache(self):
        f, recipes = self.traced()
        for _ in range(2):
            with jlp.autocast(jlp.NVFP4BlockScaling(disable_rht=True)):
                f(1.0)
        assert len(recipes) == 1

    def test_another_thread_gets_its_own_compilation(self):
        f, recipes = self.traced()
        with jlp.autocast(FULL):
            f(1.0)
            thread = threading.Thread(target=f, args=(1.0,))
            thread.start()
            thread.join()
            f(1.0)
        assert recipes == [FULL, None]

    def test_a_linear_follows_the_context_of_its_call(self):
        x, w = random_array((8, 32)), random_array((32, 16), seed=1)
        f = jax.jit(lambda x, w: jlp.linear(x, w))
        plain = f(x, w)
        with jlp.autocast(FULL):
            quantized = f(x, w)
        assert_same_bytes(plain, x @ w)
        assert_same_bytes(quantized, jlp.linear(x, w, recipe=FULL))
        assert jnp.any(plain != quantized)
        assert_same_bytes(f(x, w), plain)


class TestStrict:
    RULES = jlp.PerLayer((("head", None), ("block_[0-9]/up", PLAIN)), jlp.MXFP8BlockScaling())

    def linear(self, name):
        return jlp.linear(random_array((8, 32)), random_array((32, 16)), name=name)

    def test_a_recipe_that_no_layer_follows_warns_once(self):
        recipe = jlp.Float8CurrentScaling(fp8_format="E4M3", use_power_2_scales=True)
        with pytest.warns(UserWarning, match="autocast: no layer followed Float8CurrentScaling") as said:
            for _ in range(2):
                with jlp.autocast(recipe):
                    random_array((8, 8)) @ random_array((8, 8))
        assert len(said) == 1 and said[0].filename == __file__

    def test_or_raises(self):
        rules = jlp.PerLayer((("up", None),), self.RULES)
        with pytest.raises(ValueError, match="no layer followed PerLayer"), jlp.autocast(rules, strict=True):
            self.linear("up")

    def test_or_says_nothing(self, recwarn):
        with jlp.autocast(jlp.MXFP8BlockScaling(fp8_format="HYBRID", enable_2d_quantization=True), strict=None):
            pass
        assert not recwarn

    def test_a_rule_without_a_layer_names_the_nearest(self):
        message = "rule 'head' of PerLayer matches no layer; the nearest names are 'block_1/up'"
        with pytest.raises(ValueError, match=message), jlp.autocast(self.RULES, strict=True):
            self.linear("block_1/up")

    def test_a_layer_that_is_made_counts(self):
        """Its state of delayed scaling comes from the scope."""
        with jlp.autocast(jlp.DelayedScaling(amax_history_len=7), strict=True):
            jlp.nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def test_what_another_call_reached_counts(self):
        """A function that jit finds in its cache asks for no recipe."""
        with jlp.autocast(self.RULES, strict=None):
            self.linear("head"), self.linear("block_2/up")
        with jlp.autocast(self.RULES, strict=True):
            pass

    def test_an_exception_goes_on(self):
        with pytest.raises(RuntimeError, match="inside"), jlp.autocast(PLAIN, strict=True):
            raise RuntimeError("inside")

    def test_something_else_is_named(self):
        with pytest.raises(ValueError, match="autocast: strict='yes'; needs"):
            jlp.autocast(FULL, strict="yes")


class TestBackward:
    """The recipe of the forward pass holds for its backward pass, wherever that runs."""

    x, w, dy = random_array((32, 64)), random_array((64, 48), "float32", 1), random_array((32, 48), seed=2)

    def pullback(self, recipe):
        with jlp.autocast(recipe, enabled=recipe is not None):
            return jax.vjp(lambda x, w: jlp.linear(x, w), self.x, self.w)[1]

    def test_run_outside_of_the_context_keeps_the_recipe(self):
        expected = jax.vjp(lambda x, w: jlp.linear(x, w, recipe=FULL), self.x, self.w)[1](self.dy)
        assert_same_bytes(self.pullback(FULL)(self.dy), expected)

    def test_run_within_another_context_keeps_the_recipe(self):
        pullbacks = {recipe: self.pullback(recipe) for recipe in (None, FULL, PLAIN)}
        expected = {recipe: pullback(self.dy) for recipe, pullback in pullbacks.items()}
        assert jnp.any(expected[FULL][1] != expected[PLAIN][1])
        for other in (FULL, PLAIN):
            with jlp.autocast(other):
                for recipe, pullback in pullbacks.items():
                    assert_same_bytes(pullback(self.dy), expected[recipe])

    def test_grad_of_a_function_that_enters_the_context_itself(self):
        def loss(w):
            with jlp.autocast(FULL):
                return (jlp.linear(self.x, w).astype(jnp.float32) * self.dy).sum()

        expected = jax.vjp(lambda w: jlp.linear(self.x, w, recipe=FULL), self.w)[1](self.dy)[0]
        assert_same_bytes(jax.grad(loss)(self.w), expected)
        assert_same_bytes(jax.jit(jax.grad(loss))(self.w), expected)


@pytest.mark.parametrize("recipe", ["nvfp4", jlp.NVFP4BlockScaling, jlp.NVFP4(), 3, True])
@pytest.mark.parametrize("enabled", [True, False])
def test_something_that_is_no_recipe_raises(recipe, enabled):
    with pytest.raises(TypeError, match="autocast: recipe=.*needs a recipe"), jlp.autocast(recipe, enabled=enabled):
        pass
    assert jlp.current_recipe() is None


def test_an_enabled_context_needs_a_recipe():
    with pytest.raises(TypeError, match="or enabled=False"), jlp.autocast():
        pass
