"""recipe_schedule: the recipe as a pure function of the step, and a training step compiled once for each phase."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, random_array

NVFP4, MXFP8 = jlp.NVFP4BlockScaling(), jlp.MXFP8BlockScaling()
FORWARD = jlp.NVFP4BlockScaling(forward_override="high_precision")
DELAYED = jlp.DelayedScaling(amax_history_len=4)


class TestSteps:
    schedule = jlp.recipe_schedule({0: NVFP4, 5: MXFP8, 8: None})

    def test_have_the_recipe_of_their_phase(self):
        assert [self.schedule.at(step) for step in range(10)] == [NVFP4] * 5 + [MXFP8] * 3 + [None] * 2
        assert self.schedule.at(np.int64(7)) == MXFP8 and self.schedule.at(10**9) is None

    def test_know_the_next_change(self):
        assert [self.schedule.next_change(step) for step in range(9)] == [5] * 5 + [8] * 3 + [None]

    def test_may_be_shares_of_all_steps(self):
        by_share = jlp.recipe_schedule({0: NVFP4, 0.5: MXFP8, 0.8: None}, total_steps=10)
        assert by_share == self.schedule and hash(by_share) == hash(self.schedule)
        assert jlp.recipe_schedule({0.0: NVFP4, 0.29: MXFP8}, total_steps=100).next_change(0) == 29

    def test_of_one_recipe_never_change(self):
        assert jlp.recipe_schedule({0: NVFP4}).next_change(0) is None

    def test_where_nothing_changes_no_phase_begins(self):
        schedule = jlp.recipe_schedule({0: NVFP4, 3: jlp.NVFP4BlockScaling(), 6: MXFP8})
        assert schedule == jlp.recipe_schedule({0: NVFP4, 6: MXFP8})

    def test_survive_pickling(self):
        assert pickle.loads(pickle.dumps(self.schedule)) == self.schedule

    def test_are_printed_as_a_table(self):
        assert str(jlp.recipe_schedule({0: NVFP4, 800: FORWARD, 900: None})).splitlines() == [
            "from step   recipe",
            "        0   NVFP4BlockScaling",
            "      800   NVFP4BlockScaling(forward_override='high_precision')",
            "      900   high precision",
        ]


class TestTraining:
    """A step of SGD on a layer, jitted once."""

    x, w = random_array((32, 64)), random_array((64, 32), "float32", 1) / 8

    def run(self, schedule, steps, w, first=0):
        """The weight after the steps, and the recipes that the step was traced under."""
        traced = []

        @jax.jit
        def step(w):
            traced.append(jlp.current_recipe())
            gradient = jax.grad(lambda w: jnp.square(jlp.linear(self.x, w, name="up").astype(jnp.float32)).mean())(w)
            return w - gradient

        for number in range(first, steps):
            recipe = schedule.at(number)
            with jlp.autocast(recipe, enabled=recipe is not None):
                w = step(w)
        return w, traced

    def test_compiles_once_for_each_recipe(self):
        schedule = jlp.recipe_schedule({0: NVFP4, 3: FORWARD, 5: None, 7: NVFP4})
        assert self.run(schedule, 9, self.w)[1] == [NVFP4, FORWARD, None]

    @pytest.mark.parametrize("stopped", [2, 3, 5])
    def test_goes_on_from_any_step(self, stopped):
        schedule = jlp.recipe_schedule({0: NVFP4, 3: FORWARD})
        expected, _ = self.run(schedule, 6, self.w)
        halfway, _ = self.run(schedule, stopped, self.w)
        resumed, traced = self.run(schedule, 6, halfway, stopped)
        assert_same_bytes(resumed, expected)
        assert traced == ([NVFP4, FORWARD] if stopped < 3 else [FORWARD])

    def test_phases_may_have_rules_by_layer(self):
        rules = [jlp.PerLayer(((".*head", None),), default=recipe) for recipe in (NVFP4, FORWARD)]
        by_layer = jlp.recipe_schedule({0: rules[0], 3: rules[1]})
        assert_same_bytes(
            self.run(by_layer, 5, self.w)[0], self.run(jlp.recipe_schedule({0: NVFP4, 3: FORWARD}), 5, self.w)[0]
        )

    def test_a_layers_own_recipe_may_be_a_static_argument(self):
        schedule, traced = jlp.recipe_schedule({0: NVFP4, 2: MXFP8}), []

        @functools.partial(jax.jit, static_argnames="recipe")
        def layer(x, w, recipe):
            traced.append(recipe)
            return jlp.linear(x, w, recipe=recipe)

        found = [layer(self.x, self.w, schedule.at(step)) for step in range(4)]
        assert traced == [NVFP4, MXFP8]
        assert_same_bytes(found[3], jlp.linear(self.x, self.w, recipe=MXFP8))

    def test_delayed_scaling_may_come_first(self):
        with jlp.autocast(DELAYED):
            model = jlp.nnx.Linear(64, 32, rngs=nnx.Rngs(0))
        schedule = jlp.recipe_schedule({0: DELAYED, 2: NVFP4, 4: None})
        for step in range(5):
            recipe = schedule.at(step)
            with jlp.autocast(recipe, enabled=recipe is not None):
                assert jnp.isfinite(model(self.x)).all()


class TestMistakes:
    @pytest.mark.parametrize(
        ("phases", "error", "message"),
        [
            ({}, TypeError, "phases={}; needs a dict from first steps to recipes"),
            (NVFP4, TypeError, "phases=NVFP4BlockScaling.*; needs a dict"),
            ([(0, NVFP4)], TypeError, r"phases=\[\(0, .*; needs a dict"),
            ({0: NVFP4, "800": MXFP8}, TypeError, "a phase begins at '800'; needs a step, or with total_steps a share"),
            ({0: NVFP4, True: MXFP8}, TypeError, "a phase begins at True; needs a step"),
            ({0: NVFP4, 800.0: MXFP8}, ValueError, "a phase begins at 800.0; needs a step, or with total_steps"),
            ({0: NVFP4, 0.8: MXFP8}, ValueError, "a phase begins at 0.8; needs a step, or with total_steps a share"),
            ({0: NVFP4, -1: MXFP8}, ValueError, "a phase begins at -1; needs a step"),
            (
                {0: NVFP4, 9: MXFP8, 5: None},
                ValueError,
                r"phases begin at steps \[0, 9, 5\]; needs first steps that rise",
            ),
            ({5: NVFP4}, ValueError, r"phases begin at steps \[5\]; needs first steps that rise from 0"),
            ({0: NVFP4, 5: "mxfp8"}, TypeError, "the phase from step 5 has 'mxfp8'; needs a recipe such as"),
            ({0: jlp.NVFP4()}, TypeError, "the phase from step 0 has NVFP4.*; needs a recipe such as"),
            (
                {0: NVFP4, 5: DELAYED},
                ValueError,
                "the phase from step 5 has DelayedScaling.*; begin with it, or use Fl",
            ),
            ({0: DELAYED, 5: None, 9: DELAYED}, ValueError, "the phase from step 9 has DelayedScaling"),
            ({0: DELAYED, 5: jlp.DelayedScaling()}, ValueError, "the phase from step 5 has DelayedScaling"),
        ],
    )
    def test_are_named(self, phases, error, message):
        with pytest.raises(error, match=f"recipe_schedule: {message}"):
            jlp.recipe_schedule(phases)

    @pytest.mark.parametrize(
        ("phases", "total", "error", "message"),
        [
            ({0: NVFP4, 0.8: MXFP8}, 0, ValueError, "total_steps=0; needs an int from 1 on"),
            ({0: NVFP4, 0.8: MXFP8}, 10.0, TypeError, "total_steps=10.0; needs an int from 1 on"),
            (
                {0: NVFP4, 1.0: MXFP8},
                10,
                ValueError,
                "a phase begins at 1.0; needs a step, or with total_steps a share",
            ),
            ({0: NVFP4, float("nan"): MXFP8}, 10, ValueError, "a phase begins at nan"),
            ({0: NVFP4, 10: MXFP8}, 10, ValueError, "a phase begins at step 10 of 10 steps; needs an earlier"),
            ({0: NVFP4, 0.01: MXFP8}, 10, ValueError, r"phases begin at steps \[0, 0\]"),
        ],
    )
    def test_of_shares_are_named(self, phases, total, error, message):
        with pytest.raises(error, match=f"recipe_schedule: {message}"):
            jlp.recipe_schedule(phases, total_steps=total)

    @pytest.mark.parametrize(
        ("step", "error"), [(-1, ValueError), (3.0, TypeError), ("3", TypeError), (None, TypeError)]
    )
    def test_of_a_step_are_named(self, step, error):
        with pytest.raises(error, match="RecipeSchedule: step="):
            jlp.recipe_schedule({0: NVFP4}).at(step)

    def test_a_traced_step_is_refused(self):
        """The recipe is part of the program, which is compiled before the step is known."""
        with pytest.raises(TypeError, match="RecipeSchedule: step=.*; needs an int from 0 on"):
            jax.jit(lambda step: jlp.recipe_schedule({0: NVFP4, 5: MXFP8}).at(step) is None)(3)

    def test_a_schedule_is_no_recipe(self):
        with pytest.raises(TypeError, match="autocast: recipe=RecipeSchedule.*; needs a recipe"):
            jlp.autocast(jlp.recipe_schedule({0: NVFP4}))
