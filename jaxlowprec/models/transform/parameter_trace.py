"""Parameters followed through a traced function: stacked for a scan, concatenated for a product, masked, computed."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jaxlowprec.models.transform import calls
from jaxlowprec.models.transform.products import Product, product_of
from jaxlowprec.models.transform.weights import Weight, Weights, is_matrix, joined, moved
from jaxlowprec.recipes.fields import Use
from jaxlowprec.recipes.roles import MODULE_TYPES, Recipe

_WRITING = ("dynamic_update_slice", "scatter")  # what writes into an array, such as a cache: activations

Choices = Callable[[Weight], list[Any]]
"""The different things that a recipe says of the parameters of a value."""

_DIFFERENT = "joined with parameters of other recipes"


class Origins:
    """The origins of the values of one jaxpr, as far as they can mask or scale a parameter."""

    def __init__(self) -> None:
        self._numbers: set[Any] = set()
        self._spread: set[Any] = set()

    def add(self, eqn: Any) -> None:
        """Notes what an equation makes."""
        if not eqn.invars or len(eqn.outvars) != 1:
            return
        given, result = eqn.invars[0], eqn.outvars[0]
        if eqn.primitive.name == "broadcast_in_dim" and result.aval.size > given.aval.size:
            self._spread.add(result)
            if given.aval.size == 1:
                self._numbers.add(result)
        elif eqn.primitive.name == "convert_element_type":
            for known in (self._numbers, self._spread):
                if not hasattr(given, "val") and given in known:
                    known.add(result)
            if given.aval.dtype == bool:
                self._spread.add(result)

    def is_number(self, atom: Any) -> bool:
        """Whether a value is one number, perhaps repeated."""
        return atom.aval.size == 1 or (not hasattr(atom, "val") and atom in self._numbers)

    def is_factor(self, atom: Any, shape: tuple[int, ...]) -> bool:
        """Whether a value has less in it than an array of this shape that it meets element by element: a number, a
        vector that was repeated, or a mask."""
        if (given := atom.aval.shape) != shape:
            return not given or (
                len(given) == len(shape) and all(n in (1, m) for n, m in zip(given, shape, strict=True))
            )
        return atom.aval.dtype == bool or (not hasattr(atom, "val") and atom in self._spread)


def joined_by(eqn: Any, weights: list[Weight | None], origins: Origins, choices: Choices) -> Weight | None:
    """The parameter that an equation joins its operands to, or masks; None if it does not."""
    name = eqn.primitive.name
    if name == "select_n":
        return _selected(eqn, weights, origins)
    if name not in ("stack", "concatenate"):
        return None
    parts = [w for w in weights if w is not None and not (w.loaded or w.ends or w.computed)]
    if len(parts) < len(weights) or not all(is_matrix(v.aval) for v in eqn.invars):
        return None
    axis = eqn.params["axis" if name == "stack" else "dimension"]
    one = joined([dataclasses.replace(part, cuts=None) for part in parts])
    whole_parts = name == "stack" or all(v.aval.shape[0] == 1 for v in eqn.invars)
    if axis or not whole_parts:
        return one
    one = dataclasses.replace(one, parts=tuple(parts))
    said = [choices(part) for part in parts]
    begins = [n for n in range(1, len(said)) if said[n] != said[n - 1]]
    return dataclasses.replace(one, cuts=(0, *begins, len(said)))


def _selected(eqn: Any, weights: list[Weight | None], origins: Origins) -> Weight | None:
    """A parameter some of whose elements are replaced by a number or another parameter's."""
    cases = list(zip(eqn.invars[1:], weights[1:], strict=True))
    parts = [w for _, w in cases if w is not None]
    plain = all(w is not None or origins.is_number(v) for v, w in cases)
    if not parts or not plain or any(w.loaded or w.ends or w.computed for w in parts):
        return None
    return joined(parts) if is_matrix(eqn.outvars[0].aval) else None


def computed(eqn: Any, weights: list[Weight | None], origins: Origins) -> Weight | None:
    """The weight that an equation computes from parameters only, such as one times a mask; None for other equations."""
    if len(eqn.outvars) != 1 or not is_matrix(result := eqn.outvars[0].aval) or eqn.primitive.name.startswith(_WRITING):
        return None
    shape, parts = result.shape, []
    for variable, weight in zip(eqn.invars, weights, strict=True):
        if weight is not None and variable.aval.shape == shape:
            parts.append(weight)
        elif not origins.is_factor(variable, shape):
            return None
    if not parts:
        return None
    by = next((part.computed for part in parts if part.computed), eqn.primitive.name)
    parts = [dataclasses.replace(part, cuts=None, ends=None, cast=False, loaded=False, computed=by) for part in parts]
    return dataclasses.replace(joined(parts), computed=by)


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
    """The way of parameters from a jaxpr's arguments to its results.

    Attributes:
        results: the parameters that its results are.
        changes: whether any of its products follows a recipe.
        steps: its equations that take parameters and lead to its results or to a product that follows a recipe, or that
            take loaded ones; by their numbers.
    """

    results: Weights
    changes: bool
    steps: dict[int, Step]


class ParameterTrace:
    """Follows parameters through a function's jaxpr; each inner jaxpr is looked at once for the same parameters.

    Attributes:
        recipe: the recipe, or the rules; None: high precision.
        uses: what layers are for, by their names, as far as it is known.
        products: every product by a parameter, in the order of the trace.
        by_equation: the same by the ids of their equations.
        lost: maps a parameter's number to the first primitive that it was given to and not followed through; of a
            loaded one, to the first that takes its array.
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
        followed = {v: weight for v, weight in found.items() if weight is not None}
        read = {v for v in jaxpr.outvars if not _is_literal(v)} & followed.keys()
        for number in reversed([*steps]):
            eqn = jaxpr.eqns[number]
            taken = {v for v in eqn.invars if not _is_literal(v)} & followed.keys()
            if steps[number].changes or any(followed[v].loaded for v in taken) or not read.isdisjoint(eqn.outvars):
                read |= taken
            else:
                del steps[number]
        return Flow(results, any(step.changes for step in steps.values()), steps)

    def _step(self, eqn: Any, given: list[Weight | None], origins: Origins) -> Step:
        nothing: Weights = (None,) * len(eqn.outvars)
        if (product := product_of(eqn, given)) is not None:
            if not product.reason and product.weight.parts and len(self.choices(product.weight)) > 1:
                product = dataclasses.replace(product, reason=_DIFFERENT, avoidable=True)
            self.products.append(product)
            self.by_equation[id(eqn)].append(product)
            has_recipe = product.weight.loaded or self.recipe_at(product.weight.name) is not None
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
