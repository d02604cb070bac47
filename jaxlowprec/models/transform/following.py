"""A pass over a jaxpr that finds which of its values are parameters and which of its products a recipe changes."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxlowprec.models.transform import calls
from jaxlowprec.models.transform.joining import Origins, computed, joined_by
from jaxlowprec.models.transform.products import Product, product_of
from jaxlowprec.models.transform.weights import Weight, Weights, is_matrix, moved
from jaxlowprec.recipes.roles import MODULE_TYPES, Recipe
from jaxlowprec.recipes.uses import Use

_DIFFERENT = "joined with parameters of other recipes"


@dataclasses.dataclass(frozen=True)
class Step:
    """An equation that has parameters among its operands.

    Attributes:
        results: the parameters that its results are.
        changes: whether it is, or contains, a product that follows a recipe.
        product: the product that it is, if it follows a recipe.
    """

    results: Weights
    changes: bool = False
    product: Product | None = None


@dataclasses.dataclass(frozen=True)
class Flow:
    """What becomes of the parameters among a jaxpr's arguments.

    Attributes:
        results: the parameters that its results are.
        changes: whether any of its products follows a recipe.
        steps: its equations that have parameters among their operands, by their numbers.
    """

    results: Weights
    changes: bool
    steps: dict[int, Step]


class Following:
    """Follows parameters through a function's jaxpr; each inner jaxpr is looked at once for the same parameters.

    Attributes:
        recipe: the recipe, or the rules; None: high precision.
        uses: what layers are for, by their names, as far as it is known.
        products: every product by a parameter, in the order of the trace.
        by_equation: the same by the ids of their equations.
        lost: maps a parameter's number to the first primitive that it was given to and not followed through; of a
            packed one, to the first that takes its array.
    """

    def __init__(self, recipe: Recipe | None, uses: Mapping[str, Use] = MappingProxyType({})):
        self.recipe, self.uses = recipe, uses
        self.products: list[Product] = []
        self.by_equation: dict[int, list[Product]] = collections.defaultdict(list)
        self.lost: dict[int, str] = {}
        self._flows: dict[tuple[int, Weights], tuple[Any, Flow]] = {}

    def recipe_at(self, name: str) -> Recipe | None:
        """The recipe of the layer of a name."""
        return None if self.recipe is None else self.recipe.within(name, self.uses.get(name, Use.UNKNOWN))

    def choices(self, weight: Weight) -> list[Any]:
        """The different things that the recipe says of a value's single parameters: one if it treats them alike."""
        found: list[Any] = []
        for single in weight.singles:
            recipe = self.recipe_at(single.name)
            kinds = () if recipe is None else (recipe.roles(kind, single.name) for kind in MODULE_TYPES)
            choice = recipe, *kinds
            if choice not in found:
                found.append(choice)
        return found

    def through(self, jaxpr: Any, weights: Weights) -> Flow:
        """The flow through an open jaxpr whose arguments are these."""
        key = id(jaxpr), weights
        if key not in self._flows:
            self._flows[key] = jaxpr, self._walked(jaxpr, weights)  # with the jaxpr, so that its id stays its own
        return self._flows[key][1]

    def _walked(self, jaxpr: Any, weights: Weights) -> Flow:
        found: dict[Any, Weight | None] = dict(zip(jaxpr.invars, weights, strict=True))
        steps, origins = {}, Origins()
        for number, eqn in enumerate(jaxpr.eqns):
            given = [None if _is_literal(v) else found.get(v) for v in eqn.invars]
            if any(given):
                steps[number] = step = self._step(eqn, given, origins)
                found |= zip(eqn.outvars, step.results, strict=True)
            origins.add(eqn)
        results = tuple(None if _is_literal(v) else found.get(v) for v in jaxpr.outvars)
        return Flow(results, any(step.changes for step in steps.values()), steps)

    def _step(self, eqn: Any, given: list[Weight | None], origins: Origins) -> Step:
        nothing: Weights = (None,) * len(eqn.outvars)
        if (product := product_of(eqn, given)) is not None:
            if not product.reason and len(self.choices(product.weight)) > 1:
                product = dataclasses.replace(product, reason=_DIFFERENT, avoidable=True)
            self.products.append(product)
            self.by_equation[id(eqn)].append(product)
            has_recipe = product.weight.packed or self.recipe_at(product.weight.name) is not None
            follows = has_recipe and not product.reason
            return Step(nothing, follows, product if follows else None)
        if (call := calls.of(eqn)) is not None:
            accepted = call.accepted(given)
            for weight, followed in zip(given, accepted, strict=True):
                if weight is not None and followed is None:
                    self.lost.setdefault(weight.leaf, eqn.primitive.name)
            return Step(*call.flow(self.through, accepted))
        results = tuple(moved(eqn, given) or nothing)
        if not any(results):
            one = joined_by(eqn, given, origins, self.choices) or computed(eqn, given, origins)
            results = nothing if one is None else (one,)
        kept = {single.leaf for weight in results if weight is not None for single in weight.singles}
        for variable, weight in zip(eqn.invars, given, strict=True):
            for single in weight.singles if weight is not None and is_matrix(variable.aval) else ():
                if single.leaf not in kept:
                    self.lost.setdefault(single.leaf, eqn.primitive.name)
        return Step(results)


def _is_literal(atom: Any) -> bool:
    return hasattr(atom, "val")
