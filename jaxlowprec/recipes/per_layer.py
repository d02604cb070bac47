"""Rules by the layer's name: which recipe each layer of a model follows, or none."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from jaxlowprec.arguments import shown
from jaxlowprec.recipes.roles import Recipe, Roles
from jaxlowprec.recipes.transformer_engine import Calibrating, DelayedScaling


@dataclasses.dataclass(frozen=True)
class PerLayer(Recipe):
    """A recipe for each layer, chosen by the layer's name.

    The first rule whose regular expression matches the whole name decides. A Linen layer's name is its path in the
    model ("block_0/mlp/up"); NNX layers get such names from `jaxlowprec.nnx.name_layers`; functions such as `linear`
    take `name=`. A layer without a name has the name "".

    Arguments:
        rules: pairs of a regular expression and the recipe of the layers that it matches; None: high precision.
        default: the recipe of all other layers; None: high precision.

    Raises:
        TypeError: a rule is not a pair of a text and a recipe or None.
        ValueError: a regular expression is not valid, no layer could have a recipe, or two rules have different
            `DelayedScaling`, whose states could not be told apart.

    >>> import jaxlowprec as jlp
    >>> nvfp4, mxfp8 = jlp.NVFP4BlockScaling(), jlp.MXFP8BlockScaling()
    >>> recipe = jlp.PerLayer(((r"block_[01]/.*|.*head", None), (r".*/out", mxfp8)), default=nvfp4)
    >>> [type(recipe.at(name)).__name__ for name in ("block_0/mlp/up", "block_5/attention/out", "block_5/mlp/up")]
    ['NoneType', 'MXFP8BlockScaling', 'NVFP4BlockScaling']
    >>> print(recipe)
    rule                   recipe
    block_[01]/.*|.*head   high precision
    .*/out                 MXFP8BlockScaling
    all others             NVFP4BlockScaling
    """

    rules: tuple[tuple[str, Recipe | None], ...]
    default: Recipe | None = None
    backward_override = None  # each layer's own recipe has it

    def __post_init__(self):
        given = self.rules
        if not isinstance(given, list | tuple) or not all(isinstance(r, list | tuple) and len(r) == 2 for r in given):
            raise TypeError(
                f'PerLayer: rules={shown(given)}; needs pairs such as ((".*head", None), (".*", NVFP4BlockScaling()))'
            )
        for pattern, recipe in given:
            if not isinstance(pattern, str):
                raise TypeError(f"PerLayer: a rule begins with {shown(pattern)}; needs a regular expression as a text")
            _check_recipe(f"rule {pattern!r}", recipe)
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"PerLayer: {shown(pattern)} is not a valid regular expression: {error}") from None
        _check_recipe("default", self.default)
        object.__setattr__(self, "rules", tuple((pattern, recipe) for pattern, recipe in given))
        if all(recipe is None for recipe in self._recipes()):
            raise ValueError("PerLayer: no rule and no default has a recipe, so nothing would be quantised; give one")
        delayed = {recipe.delayed for recipe in self._recipes() if recipe is not None and recipe.delayed is not None}
        if len(delayed) > 1:
            raise ValueError(
                f"PerLayer: {len(delayed)} rules have different DelayedScaling; layers keep one kind of state: give "
                "all of them the same one"
            )

    def _recipes(self) -> list[Recipe | None]:
        return [*(recipe for _, recipe in self.rules), self.default]

    def at(self, name: str) -> Recipe | None:
        """The recipe of the layer of this name: that of the first rule that matches, else the default."""
        found = next((recipe for pattern, recipe in self.rules if re.fullmatch(pattern, name)), self.default)
        return None if found is None else found.at(name)

    def applies_to(self, name: str) -> bool:
        """Whether the layer of this name has a recipe."""
        return self.at(name) is not None

    def roles(self, module_type: str = "linear", name: str = "") -> Roles:
        """The roles of the layer's own recipe; all None if it has none."""
        found = self.at(name)
        return Roles(None, None, None) if found is None else found.roles(module_type, name)

    @property
    def delayed(self) -> DelayedScaling | None:
        """The `DelayedScaling` of the rules that have one: layers that are made without a name get its state."""
        return next((r.delayed for r in self._recipes() if r is not None and r.delayed is not None), None)

    def __str__(self) -> str:
        rows = [("rule", "recipe"), *((pattern, _named(recipe)) for pattern, recipe in self.rules)]
        rows.append(("all others", _named(self.default)))
        width = max(len(pattern) for pattern, _ in rows)
        return "\n".join(f"{pattern:{width}}   {recipe}" for pattern, recipe in rows)


def _named(recipe: Recipe | None) -> str:
    """A recipe as its class and the fields that differ from their defaults."""
    if recipe is None:
        return "high precision"
    if isinstance(recipe, PerLayer):
        return "PerLayer"
    name, fields = type(recipe).__name__, []
    own: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(recipe) if dataclasses.is_dataclass(recipe) else ()
    for field in own:
        default: Any = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if (value := getattr(recipe, field.name)) != default:
            fields.append(f"{field.name}={shown(value)}")
    return f"{name}({', '.join(fields)})" if fields else name


def _check_recipe(where: str, recipe: object) -> None:
    if isinstance(recipe, Calibrating) or (recipe is not None and not isinstance(recipe, Recipe)):
        raise TypeError(
            f"PerLayer: {where} has {shown(recipe)}; needs a recipe such as NVFP4BlockScaling(), or None for high "
            "precision"
        )
