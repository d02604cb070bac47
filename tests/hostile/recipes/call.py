"""A public function with arguments that fit it."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Call:
    """Something public.

    Attributes:
        who: what errors call it; others that it calls on the user's behalf follow. "*": anybody, for what is JAX's or
            Flax's own function where there is no recipe.
        function: takes arguments by name.
        fitting: arguments that fit; the names are those of values.
        others: what may be given besides.
        traced: it can be called within `jax.eval_shape`.
    """

    who: tuple[str, ...]
    function: Callable[..., Any]
    fitting: dict[str, Any]
    others: tuple[str, ...] = ()
    traced: bool = True


def call_of(function, /, *who, others=None, name=None, traced=True, **fitting):
    name = name or function.__name__
    parameters = inspect.signature(function).parameters if others is None else others
    return Call((name, *who), function, fitting, tuple(p for p in parameters if p not in fitting), traced)
