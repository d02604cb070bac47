"""Says when a recipe did nothing: no layer followed it, one of its rules matched no layer, or it quantises no GEMM."""

from __future__ import annotations

import collections
import difflib
import math
import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from jaxlowprec.recipes.composed import PerLayer
from jaxlowprec.recipes.fields import is_chosen
from jaxlowprec.recipes.qat import DEFAULT_EXCLUDE
from jaxlowprec.recipes.roles import GEMMS, BackwardOverride, Recipe, Roles

_NEAREST = 3
_USE_LAYERS = "Use this library's layers, or jaxlowprec.quantize_matmuls for any function"
_seen: dict[Recipe, set[str]] = collections.defaultdict(set)
"""The names of the layers that have asked for the recipe of a scope, since the process began: a function that is found
in jit's cache was traced under the same recipe before."""
_said: set[tuple[Recipe, str]] = set()


def saw(recipe: Recipe, names: Iterable[str]) -> None:
    """Notes that layers of these names have asked for a scope's recipe."""
    _seen[recipe].update(names)


def of_scope(recipe: Recipe) -> list[str]:
    """Complaints about the parts of a scope's recipe that no layer used."""
    names = _seen.get(recipe, set())
    return complaints(recipe, names, names)


def complaints(recipe: Recipe, names: Iterable[str], products: Iterable[str], remedy: str = _USE_LAYERS) -> list[str]:
    """Complaints about a recipe that reached no layer, or some of whose patterns match none.

    Arguments:
        names: of every layer that there is.
        products: of those among them whose parameter is in a matrix product.
        remedy: what to do where none followed it.
    """
    names, products, title = sorted(set(names)), set(products), type(recipe).__name__
    found = []
    if not any(recipe.within(name) is not None for name in products):
        there = f"; the layers are {listed(names)}" if names else ""
        found.append(f"no layer followed {title}, which changed nothing{there}. {remedy}")
    if isinstance(recipe, PerLayer) and names:
        for pattern in recipe.unmatched(names):
            nearest = difflib.get_close_matches(pattern, names, _NEAREST, 0.3) or names
            found.append(f"the rule {pattern!r} of {title} matches no layer; the nearest names are {listed(nearest)}")
        for pattern in set(recipe.unmatched(products)) - set(recipe.unmatched(names)):
            if recipe.quantises(pattern):
                matched = [name for name in names if re.fullmatch(pattern, name)]
                found.append(f"the rule {pattern!r} of {title} is for {listed(matched)}, in no matrix product")
    return found


def of_roles(roles: Roles, backward_override: BackwardOverride) -> list[str]:
    """A complaint if a recipe quantises some of a layer's tensors and no GEMM reads them; else none."""
    quantized = [tensor for tensor in ("input", "weight", "gradient") if roles.forms(tensor) != (None, None)]
    if not quantized or any(isinstance(roles.operands(gemm, backward_override), tuple) for gemm in GEMMS):
        return []
    return [
        f"the recipe quantises the {' and the '.join(quantized)} but no GEMM, which needs both of its operands "
        "quantised; so everything is computed in high precision"
    ]


class ConversionReach(NamedTuple):
    """The layers and matrices of a model, by whether a conversion reached them.

    Attributes:
        names: of all layers that it could have converted.
        followed: of those that follow a recipe.
        left: of those that stay Flax's although the recipe is for them, each with the reason.
        own: the shapes of matrices in modules that are none of Flax's layers, by their paths.
        tables: of layers whose rows are looked up, which are in no matrix product.
    """

    names: Collection[str]
    followed: Collection[str]
    left: Mapping[str, str]
    own: Mapping[str, tuple[int, ...]]
    tables: Collection[str] = ()


def of_conversion(recipe: Recipe | None, reached: ConversionReach, nothing: str) -> list[str]:
    """Complaints about layers that a conversion left; the last line counts matrices and names the largest of these.

    Arguments:
        recipe: None if layers follow that of their context.
        nothing: says that there was no layer to convert.
    """
    names, followed, left, own, tables = reached
    found = []
    if left:
        found.append(f"these layers stay Flax's: {', '.join(f'{name!r} ({reason})' for name, reason in left.items())}")
    if recipe is not None:
        own = {name: shape for name, shape in own.items() if recipe.within(name) is not None}
        found += complaints(recipe, names, followed)
    elif not followed:
        found.append(f"{nothing}; see jaxlowprec.quantize_matmuls")
    shapes = {name: shape for name, shape in own.items() if is_chosen(name, (".*",), DEFAULT_EXCLUDE)}
    if shapes:
        quantised, layers = (sum(name not in tables for name in those) for those in (followed, names))
        largest = sorted(shapes, key=lambda name: -math.prod(shapes[name]))
        found.append(
            f"{quantised} of {layers + len(shapes)} matrices are quantised; left: "
            f"{some([f'{name!r} {list(shapes[name])}' for name in largest])}, which are parameters of modules that are "
            "none of Flax's layers; jaxlowprec.quantize_matmuls reaches products by any parameter"
        )
    return found


def listed(names: Iterable[str]) -> str:
    """The first of these names, quoted, and how many more there are."""
    return some([repr(name) for name in names])


def some(texts: list[str]) -> str:
    """The first of these texts, and how many more there are."""
    more = f" and {len(texts) - _NEAREST} more" if len(texts) > _NEAREST else ""
    return ", ".join(texts[:_NEAREST]) + more


def warn_once(who: str, recipe: Recipe, messages: Iterable[str], depth: int) -> None:
    """Warns of each of these, once for a recipe, at the line of the caller that many functions up."""
    for message in messages:
        if (recipe, message) not in _said:
            _said.add((recipe, message))
            warnings.warn(f"{who}: {message}", stacklevel=2 + depth)
