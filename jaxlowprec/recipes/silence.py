"""Says when a recipe did nothing: no layer followed it, or one of its rules matched no layer."""

from __future__ import annotations

import collections
import difflib
import math
import re
import warnings
from collections.abc import Iterable, Mapping

from jaxlowprec.recipes.fields import is_chosen
from jaxlowprec.recipes.per_layer import PerLayer
from jaxlowprec.recipes.qat import DEFAULT_EXCLUDE
from jaxlowprec.recipes.roles import Recipe

_NEAREST = 3
_seen: dict[Recipe, set[str]] = collections.defaultdict(set)
"""The names of the layers that have asked for the recipe of a scope, since the process began: a function that is found
in jit's cache was traced under the same recipe before."""
_said: set[tuple[Recipe, str]] = set()


def saw(recipe: Recipe, names: Iterable[str]) -> None:
    """Notes that layers of these names have asked for a scope's recipe."""
    _seen[recipe].update(names)


def of_scope(recipe: Recipe) -> list[str]:
    """What the layers that asked for a scope's recipe left unused."""
    names = _seen.get(recipe, set())
    return complaints(recipe, names, names)


def complaints(recipe: Recipe, names: Iterable[str], products: Iterable[str]) -> list[str]:
    """What a recipe did not reach.

    Arguments:
        names: of every layer that there is.
        products: of those among them whose parameter is in a matrix product.
    """
    names, products, title = sorted(set(names)), set(products), type(recipe).__name__
    found = []
    if not any(recipe.within(name) is not None for name in products):
        there = f"; the layers are {listed(names)}" if names else ""
        found.append(
            f"no layer followed {title}: everything was computed in high precision{there}. Use this library's layers, "
            "or jaxlowprec.quantize_matmuls for any function"
        )
    if isinstance(recipe, PerLayer) and names:
        for pattern in recipe.unmatched(names):
            nearest = difflib.get_close_matches(pattern, names, _NEAREST, 0.3) or names
            found.append(f"the rule {pattern!r} of {title} matches no layer; the nearest names are {listed(nearest)}")
        for pattern in set(recipe.unmatched(products)) - set(recipe.unmatched(names)):
            if recipe.quantises(pattern):
                matched = [name for name in names if re.fullmatch(pattern, name)]
                found.append(f"the rule {pattern!r} of {title} is for {listed(matched)}, in no matrix product")
    return found


def closing_line(followed: int, layers: int, own: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What a conversion ends with if it does not reach every matrix of a model.

    Arguments:
        followed: the number of layers that follow a recipe.
        layers: the number of all layers.
        own: the matrices of modules that are none of Flax's layers, by their paths.
    """
    shapes = {name: shape for name, shape in own.items() if is_chosen(name, (".*",), DEFAULT_EXCLUDE)}
    if not shapes:
        return []
    largest = sorted(shapes, key=lambda name: -math.prod(shapes[name]))
    named = ", ".join(f"{name!r} {list(shapes[name])}" for name in largest[:_NEAREST])
    more = f" and {len(largest) - _NEAREST} more" if len(largest) > _NEAREST else ""
    return [
        f"{followed} of {layers + len(shapes)} matrices are quantised; left: {named}{more}, which are parameters of "
        "modules that are none of Flax's layers; jaxlowprec.quantize_matmuls reaches products by any parameter"
    ]


def listed(names: list[str]) -> str:
    """The first of these names, quoted, and how many more there are."""
    shown = ", ".join(map(repr, names[:_NEAREST]))
    return f"{shown} and {len(names) - _NEAREST} more" if len(names) > _NEAREST else shown


def warn_once(who: str, recipe: Recipe, messages: Iterable[str], depth: int) -> None:
    """Warns of each of these, once for a recipe, at the line of the caller that many functions up."""
    for message in messages:
        if (recipe, message) not in _said:
            _said.add((recipe, message))
            warnings.warn(f"{who}: {message}", stacklevel=2 + depth)
