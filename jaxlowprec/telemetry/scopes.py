"""Blocks within which layers are watched or steered: telemetry, `debug` and `find_policy`.

A scope has a number that is part of jit's cache key, so traced values can be handed to layers within `jax.jit`.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from jaxlowprec.arguments import shown
from jaxlowprec.recipes.roles import Recipe


class Scope:
    """The settings that a `with` block hands to its layers.

    Attributes:
        place: within `stacked`, the index and the size; otherwise None.
    """

    place: tuple[Any, int] | None = None

    def at(self, index: Any, of: int) -> Self:
        """A copy with a place in a stack."""
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
def stacked(index: Any, *, of: int) -> Iterator[None]:
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


class Choices(Scope):
    """Says which of several recipes each layer follows.

    Attributes:
        first: the recipe of the layers in question. Others stay as they are.
        recipes: what they may follow; None is high precision.
        chosen: by name an index into these, traced or not; None while layers are looked for.
        key: of stochastic rounding, for layers that have none.
        sizes: by name, multiply-adds of fprop and elements of the weight, of the layers that were called.
    """

    def __init__(
        self,
        first: Recipe,
        recipes: tuple[Recipe | None, ...] = (),
        chosen: Mapping[str, Any] | None = None,
        key: jax.Array | None = None,
    ):
        self.first, self.recipes, self.chosen, self.key = first, recipes, chosen, key
        self.sizes: dict[str, tuple[int, int]] = {}

    def concerns(self, recipe: Recipe | None, name: str) -> bool:
        """Whether a layer with this recipe is one of those in question."""
        return recipe == self.first and (self.chosen is None or name in self.chosen)

    def note(self, name: str, macs: int, elements: int) -> None:
        """A layer was called."""
        layers = self.place[1] if self.place else 1
        before = self.sizes.get(name, (0, 0))
        self.sizes[name] = before[0] + layers * macs, max(before[1], layers * elements)

    def key_of(self, name: str) -> jax.Array | None:
        """A layer's own key."""
        return None if self.key is None else jax.random.fold_in(self.key, zlib.crc32(name.encode()))

    def compute(self, name: str, with_recipe: Callable[[Recipe | None], Callable[..., Any]], *operands: Any) -> Any:
        """Computes the layer under the recipe that is chosen for it."""
        chosen = self.chosen[name] if self.chosen is not None else 0
        if isinstance(chosen, int):
            return with_recipe(self.recipes[chosen])(*operands)
        return jax.lax.switch(chosen, [with_recipe(recipe) for recipe in self.recipes], *operands)


class Inputs(NamedTuple):
    """Second moments of a layer's inputs.

    Attributes:
        squares: the sum of x^T x, float32 [K, K]; of rows in groups [E, K, K].
        rows: their number, float32 []; of rows in groups [E].
        amax: the largest magnitude, float32 []; of rows in groups that of all.
    """

    squares: jax.Array
    rows: jax.Array
    amax: jax.Array


class SecondMoments(Scope):
    """Adds up x^T x of each layer's inputs. The function that is called must return what was found, if it is jitted.

    Attributes:
        inputs: by the layer's name.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, Inputs] = {}

    def see(self, name: str, x: jax.Array, sizes: jax.Array | None) -> None:
        """The inputs [..., K] of a layer, or rows [T, K] in groups of these sizes [E]."""
        rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        if sizes is None:
            new = Inputs(_squared(rows), jnp.float32(len(rows)), jnp.abs(rows).max())
        else:
            ends = jnp.cumsum(sizes)
            number = jnp.arange(len(rows))
            rows = jnp.where((number < ends[-1])[:, None], rows, 0)

            def of_group(bounds: tuple[jax.Array, jax.Array]) -> jax.Array:
                inside = (number >= bounds[0]) & (number < bounds[1])
                return _squared(jnp.where(inside[:, None], rows, 0))

            squares = jax.lax.map(of_group, (ends - sizes, ends))
            new = Inputs(squares, sizes.astype(jnp.float32), jnp.abs(rows).max())
        before = self.inputs.get(name)
        self.inputs[name] = new if before is None else added(before, new)


def added(a: Inputs, b: Inputs) -> Inputs:
    """The sum of a layer's inputs of two calls; arrays of JAX or numpy."""
    largest = jnp.maximum(a.amax, b.amax)
    return Inputs(a.squares + b.squares, a.rows + b.rows, largest)


def _squared(rows: jax.Array) -> jax.Array:
    return jnp.matmul(rows.T, rows, precision="highest")
