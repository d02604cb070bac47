"""Blocks within which layers are watched or steered: telemetry, `debug` and `find_policy`.

A scope has a number that is part of jit's cache key, so traced values can be handed to layers within `jax.jit`.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any, Self

import jax

from jaxlowprec.arguments import shown


class Scope:
    """What such a block hands to its layers.

    Attributes:
        place: within `stacked`, the index and the size; otherwise None.
    """

    place: tuple[Any, int] | None = None

    def at(self, index: Any, of: int) -> Self:
        """The same with a place in a stack."""
        other = copy.copy(self)
        other.place = index, of
        return other

    @property
    def stack(self) -> tuple[int, ...]:
        """The leading axis of what a layer here has: () or the size of its stack."""
        return () if self.place is None else (self.place[1],)

    def placed(self, leaf: jax.Array) -> jax.Array:
        """A layer's part of an array that has that axis."""
        return leaf if self.place is None else leaf[self.place[0]]


_numbers = itertools.count(1)
_scopes: dict[int, Scope] = {}
_context = jax.make_user_context(None)


def current() -> Scope | None:
    """The innermost scope."""
    return _scopes.get(_context.value)


@contextlib.contextmanager
def entered(scope: Scope) -> Iterator[None]:
    """Within the block, this is the current scope."""
    number = next(_numbers)
    _scopes[number] = scope
    try:
        with _context(number):
            yield
    finally:
        del _scopes[number]


@contextlib.contextmanager
def stacked(index: Any, of: int) -> Iterator[None]:
    """Within the block, layers are measured as the index-th of a stack: for the body of a `jax.lax.scan` over layers.

    Without it a layer that is called several times has the mean of its calls.

    Arguments:
        index: int, traced or not.
        of: how many layers the stack has.

    Raises:
        ValueError: `of` is not a positive int.
    """
    if isinstance(of, bool) or not isinstance(of, int) or of < 1:
        raise ValueError(f"telemetry.stacked: of={shown(of)}; needs the number of layers, a positive int")
    here = current()
    with contextlib.nullcontext() if here is None else entered(here.at(index, of)):
        yield
