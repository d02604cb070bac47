"""The scoped recipe: what `linear`, `dot_general`, `einsum` and the layers use when none is passed to them."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import jax

from jaxlowprec.recipes import Calibrating, DelayedScaling, Recipe

FROM_CONTEXT: Any = ...
"""The default of every `recipe=`: the context's. `recipe=None` is no recipe: high precision."""

_context = jax.make_user_context(None)


@contextlib.contextmanager
def autocast(recipe: Recipe | None = None, *, enabled: bool = True, calibrating: bool = False) -> Iterator[None]:
    """Within the context, layers that are not told otherwise follow `recipe`.

    Contexts nest, are restored after exceptions and are each thread's own. The recipe is part of jit's cache key: under
    another recipe a jitted function is traced anew, and returning to the first hits the cache. It is read when a
    function is traced and kept for its backward pass, wherever that runs.

    Arguments:
        recipe: such as `NVFP4BlockScaling()`.
        enabled: False switches to high precision, whatever the outer context says.
        calibrating: for `DelayedScaling`: compute in high precision, and record amaxes so that scales are known when
            quantisation is switched on.

    Raises:
        TypeError: no recipe, or something that is none.
        ValueError: `calibrating` with a recipe that keeps no amaxes.

    >>> import jaxlowprec as jlp
    >>> with jlp.autocast(jlp.NVFP4BlockScaling()):
    ...     with jlp.autocast(enabled=False):
    ...         print(jlp.current_recipe())
    None
    """
    if enabled and not isinstance(recipe, Recipe):
        raise TypeError(f"autocast: recipe={recipe!r}; needs a recipe such as NVFP4BlockScaling(), or enabled=False")
    if not enabled and recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"autocast: recipe={recipe!r}; needs a recipe such as NVFP4BlockScaling(), or none")
    if calibrating:
        if not isinstance(recipe, DelayedScaling):
            raise ValueError(
                f"autocast: calibrating=True with recipe={recipe!r}; it is for DelayedScaling's amax histories"
            )
        recipe, enabled = Calibrating(recipe), True
    with _context(recipe if enabled else None):
        yield


def current_recipe() -> Recipe | None:
    """The recipe of the innermost `autocast`; None outside of any and where it is disabled."""
    return _context.value


def resolve(who: str, recipe: Any, name: str | None = None) -> Recipe | None:
    """What a `recipe=` argument means here and now; with a name, for the layer of that name."""
    if isinstance(recipe, types.EllipsisType):
        recipe = current_recipe()
    if recipe is None or (isinstance(recipe, Recipe) and (name is None or recipe.applies_to(name))):
        return recipe
    if isinstance(recipe, Recipe):
        return None
    raise TypeError(f"{who}: recipe={recipe!r}; needs a recipe such as NVFP4BlockScaling(), or None for high precision")
