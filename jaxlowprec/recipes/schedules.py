"""Schedules: the recipe of a training run as a pure function of the step."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from jaxlowprec.arguments import as_int, shown, whole_number
from jaxlowprec.recipes.composed import check_rule, named
from jaxlowprec.recipes.roles import Recipe

_WHO = "recipe_schedule"


@dataclasses.dataclass(frozen=True)
class RecipeSchedule:
    """The recipe of each step of a run; `recipe_schedule` makes it.

    It has no state: a run that is resumed at any step goes on with that step's recipe.

    Attributes:
        phases: pairs of a first step and the recipe from there on, None for high precision; the first ones are steps 0
            and rising, and neighbours have different recipes.
    """

    phases: tuple[tuple[int, Recipe | None], ...]

    def at(self, step: int) -> Recipe | None:
        """The recipe of a step, counted from 0; None for high precision.

        Raises:
            TypeError: step is no int; under jit it would be a traced value, but a recipe is part of the program.
            ValueError: step is negative.
        """
        return self.phases[self._phase(step)][1]

    def next_change(self, step: int) -> int | None:
        """The first step after this one that has another recipe; None: there is none."""
        following = self._phase(step) + 1
        return self.phases[following][0] if following < len(self.phases) else None

    def _phase(self, step: int) -> int:
        step = whole_number("RecipeSchedule", "step", step, least=0, most=2**63)
        return bisect.bisect_right([first for first, _ in self.phases], step) - 1

    def __str__(self) -> str:
        rows = [("from step", "recipe"), *((str(first), named(recipe)) for first, recipe in self.phases)]
        width = max(len(first) for first, _ in rows)
        return "\n".join(f"{first:>{width}}   {recipe}" for first, recipe in rows)


def recipe_schedule(phases: Mapping[int | float, Recipe | None], *, total_steps: int | None = None) -> RecipeSchedule:
    """The recipe as a function of the step, for runs that change it on the way.

    A recipe is part of jit's cache key. So a jitted step that is called under `autocast(schedule.at(step))`, or is
    given it as a static argument, is compiled once for each recipe and not more, and a phase that comes back compiles
    nothing.

    Arguments:
        phases: a dict from each phase's first step to its recipe, `PerLayer` too, or None for high precision. The first
            phase begins at 0. A first step is an int; or a float below 1, for that share of `total_steps`, rounded to
            the nearest step.
        total_steps: how many steps the run has, needed for shares. A phase that would begin later is an error.

    Returns:
        A `RecipeSchedule`, hashable and without state.

    Raises:
        TypeError: phases is no dict, a first step is no number, or a recipe is no recipe.
        ValueError: the first steps do not rise from 0, a share has no `total_steps`, or a phase begins after the end.
            Or `DelayedScaling` begins after other phases, when its amax histories would be empty, or changes its
            fields.

    >>> import jaxlowprec as jlp
    >>> nvfp4 = jlp.NVFP4BlockScaling()
    >>> forward = jlp.NVFP4BlockScaling(forward_override="high_precision")
    >>> schedule = jlp.recipe_schedule({0: nvfp4, 0.8: forward}, total_steps=1000)
    >>> print(schedule)
    from step   recipe
            0   NVFP4BlockScaling
          800   NVFP4BlockScaling(forward_override='high_precision')
    >>> schedule.at(799) == nvfp4, schedule.at(800) == forward, schedule.next_change(0), schedule.next_change(800)
    (True, True, 800, None)
    """
    if not isinstance(phases, Mapping) or not phases:
        raise TypeError(
            f"{_WHO}: phases={shown(phases)}; needs a dict from first steps to recipes, such as "
            "{0: NVFP4BlockScaling(), 800: None}"
        )
    if total_steps is not None:
        total_steps = whole_number(_WHO, "total_steps", total_steps, least=1, most=2**63)
    found = [(_first_step(given, total_steps), recipe) for given, recipe in phases.items()]
    for first, recipe in found:
        check_rule(_WHO, f"the phase from step {first}", recipe)
    firsts = [first for first, _ in found]
    if firsts[0] != 0 or any(a >= b for a, b in itertools.pairwise(firsts)):
        raise ValueError(f"{_WHO}: phases begin at steps {shown(firsts)}; needs first steps that rise from 0")
    _check_delayed(found)
    changes = [found[0], *(after for before, after in itertools.pairwise(found) if after[1] != before[1])]
    return RecipeSchedule(tuple(changes))


def _first_step(given: Any, total: int | None) -> int:
    """The first step of a phase that was given as a step or as a share of all steps."""
    needs = f"{_WHO}: a phase begins at {shown(given)}; needs a step, or with total_steps a share below 1"
    if isinstance(given, float):
        if total is None or not 0 <= given < 1:
            raise ValueError(needs)
        return round(given * total)
    try:
        step = as_int(given)
    except TypeError:
        raise TypeError(needs) from None
    if step < 0:
        raise ValueError(needs)
    if total is not None and step >= total:
        raise ValueError(f"{_WHO}: a phase begins at step {shown(step)} of {total} steps; needs an earlier step")
    return step


def _check_delayed(phases: list[tuple[int, Recipe | None]]) -> None:
    """Raises ValueError if a phase needs amax histories that the phase before it did not keep."""
    for (_, before), (first, after) in itertools.pairwise(phases):
        kept = None if before is None else before.delayed
        if after is not None and after.delayed is not None and after.delayed != kept:
            raise ValueError(
                f"{_WHO}: the phase from step {first} has {after.delayed}, whose amax histories the phase before does "
                "not keep; begin with it, or use Float8CurrentScaling, which needs none"
            )
