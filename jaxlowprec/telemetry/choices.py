"""Layers that follow a recipe chosen while the program runs, for `find_policy`."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxlowprec.recipes.roles import Recipe
from jaxlowprec.telemetry.scopes import Scope


class Choices(Scope):
    """Says which of several recipes each layer follows.

    Attributes:
        first: the recipe of the layers in question. Others stay as they are.
        recipes: what they may follow; None is high precision.
        chosen: by name an index into these, traced or not; None while layers are looked for.
        key: of stochastic rounding, for layers that have none.
        found: by name, multiply-adds of fprop and elements of the weight, of the layers that were called.
    """

    def __init__(
        self,
        first: Recipe,
        recipes: tuple[Recipe | None, ...] = (),
        chosen: Mapping[str, Any] | None = None,
        key: jax.Array | None = None,
    ):
        self.first, self.recipes, self.chosen, self.key = first, recipes, chosen, key
        self.found: dict[str, tuple[int, int]] = {}

    def concerns(self, recipe: Recipe | None, name: str) -> bool:
        """Whether a layer with this recipe is one of those in question."""
        return recipe == self.first and (self.chosen is None or name in self.chosen)

    def note(self, name: str, macs: int, elements: int) -> None:
        """A layer was called."""
        layers = self.place[1] if self.place else 1
        before = self.found.get(name, (0, 0))
        self.found[name] = before[0] + layers * macs, max(before[1], layers * elements)

    def key_of(self, name: str) -> jax.Array | None:
        """A layer's own key."""
        return None if self.key is None else jax.random.fold_in(self.key, zlib.crc32(name.encode()))

    def compute(self, name: str, with_recipe: Callable[[Recipe | None], Callable[..., Any]], *operands: Any) -> Any:
        """What the layer computes under the recipe that is chosen for it."""
        chosen = self.chosen[name] if self.chosen is not None else 0
        if isinstance(chosen, int):
            return with_recipe(self.recipes[chosen])(*operands)
        return jax.lax.switch(chosen, [with_recipe(recipe) for recipe in self.recipes], *operands)
