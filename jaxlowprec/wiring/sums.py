"""How the partial results of devices are added up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import jax


class Partials(NamedTuple):
    """Where the partial results lie that are added up.

    Attributes:
        scattered: for each dimension of which a device keeps its part of the sum, the mesh axes of the parts.
        reduced: the other mesh axes that are added up over: the sum is on all of their devices.
        elsewhere: the mesh axes whose devices have other parts of the partial results already.
    """

    scattered: Mapping[int, tuple[str, ...]]
    reduced: tuple[str, ...]
    elsewhere: tuple[str, ...]


class Sums(Protocol):
    """How partial results are added up."""

    @property
    def drawn(self) -> bool:
        """Whether it takes random words, uint32 [..., 2]."""

    def add_up(self, partial: jax.Array, where: Partials, words: jax.Array | None) -> jax.Array:
        """The sum of the devices' partial results, or of the own part of it; within the devices' own program."""


class _SumsInTheirDtype:
    drawn = False

    def add_up(self, partial: jax.Array, where: Partials, words: jax.Array | None = None) -> jax.Array:
        del words
        for dim, axes in where.scattered.items():
            partial = jax.lax.psum_scatter(partial, axes, scatter_dimension=dim, tiled=True)
        return jax.lax.psum(partial, where.reduced) if where.reduced else partial


IN_THEIR_DTYPE: Sums = _SumsInTheirDtype()
"""By XLA's reduce-scatter and all-reduce, in the dtype of the partial results."""
