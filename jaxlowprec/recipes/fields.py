"""The common part of recipes' fields: defaults from the environment, and checks."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Any

from jaxlowprec.arguments import is_one_of, shown
from jaxlowprec.recipes.uses import HEADS, ROUTERS, Use


def environment_flag(variable: str, default: bool = False) -> bool:
    """The value of a yes-or-no variable in the environment; the default if it is not set.

    Raises:
        ValueError: the value is neither.
    """
    value = os.environ.get(variable, "").strip().lower()
    if not value:
        return default
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{variable}={value!r}; needs 0 or 1")


def flag(variable: str) -> Any:
    """A boolean field whose default is set by the environment variable JAXLOWPREC_ plus this name."""
    return dataclasses.field(default_factory=lambda: environment_flag(f"JAXLOWPREC_{variable}"))


def backward_override() -> Any:
    """A field whose default is set by JAXLOWPREC_BACKWARD_OVERRIDE."""
    return dataclasses.field(default_factory=lambda: os.environ.get("JAXLOWPREC_BACKWARD_OVERRIDE") or None)


def check_field(recipe: Any, field: str, allowed: tuple[Any, ...]) -> None:
    """Raises ValueError if a field's value, or its type, is not among the allowed ones."""
    value = getattr(recipe, field)
    if not is_one_of(value, allowed):
        needs = " or ".join(f'"{a}"' if isinstance(a, str) else str(a) for a in allowed)
        raise (TypeError if all(isinstance(a, bool) for a in allowed) else ValueError)(
            f"{type(recipe).__name__}: {field}={shown(value)}; needs {needs}"
        )


def check_one_override(recipe: Any) -> None:
    """Raises ValueError for another `forward_override` than there is, or one beside a `backward_override`."""
    check_field(recipe, "forward_override", (None, "high_precision"))
    forward, backward = recipe.forward_override, recipe.backward_override
    if forward is not None and backward is not None:
        raise ValueError(
            f"{type(recipe).__name__}: forward_override={forward!r} and backward_override={backward!r}, so nothing "
            "would be quantised; give one of them, or no recipe (recipe=None, autocast(enabled=False))"
        )


def check_patterns(who: str, field: str, given: Any) -> tuple[str, ...]:
    """Checks a field of regular expressions; returns them as a tuple."""
    patterns = tuple(given) if isinstance(given, list | tuple) else None
    if patterns is None or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f'{who}: {field}={shown(given)}; needs a tuple of regular expressions, such as ("mlp/", "out$")'
        )
    for pattern in patterns:
        check_pattern(f"{who}: {field}", pattern)
    return patterns


def check_pattern(where: str, pattern: str) -> None:
    """Raises ValueError if a text is not a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{where} has {shown(pattern)}, which is not a valid regular expression: {error}") from None


def is_chosen(name: str, include: Sequence[str], exclude: Sequence[str], use: Use = Use.UNKNOWN) -> bool:
    """Whether a pattern of `include` is found in the name and none of `exclude` is.

    Arguments:
        use: what the layer is: of a router or head it is as if its name said so, of a projection as if it did not.
    """
    if (use is Use.ROUTER and ROUTERS in exclude) or (use is Use.HEAD and HEADS in exclude):
        return False
    if use is Use.PROJECTION:
        exclude = [pattern for pattern in exclude if pattern != ROUTERS]
    return any(re.search(p, name) for p in include) and not any(re.search(p, name) for p in exclude)
