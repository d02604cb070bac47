"""Collectives that send arrays as bytes, within `jax.shard_map`: XLA would widen 8-bit floats in some of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from jaxlowprec.wiring import as_bytes, from_bytes

Axes = Sequence[Hashable]


def names_of(axis_name: Hashable) -> tuple[Hashable, ...]:
    """The mesh axes of an `axis_name`: one axis, or a tuple of them.

    >>> names_of("data"), names_of(("replica", "data"))
    (('data',), ('replica', 'data'))
    """
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def size_along(axes: Axes) -> int:
    """The number of devices along mesh axes."""
    return math.prod(int(jax.lax.axis_size(axis)) for axis in axes)


def gathered(x: jax.Array, axes: Axes, dim: int = 0) -> jax.Array:
    """The devices' arrays, joined along `dim` in the order of the devices."""
    return _sent(x, lambda data: jax.lax.all_gather(data, tuple(axes), axis=dim % x.ndim, tiled=True))


def exchanged(x: jax.Array, axes: Axes, split: int = 0, together: int = 0) -> jax.Array:
    """Pieces along one axis, each sent to its device; those that came, in the order of their devices along another."""
    return _sent(x, lambda data: jax.lax.all_to_all(data, tuple(axes), split, together, tiled=True))


def passed_on(x: jax.Array, axes: Axes) -> jax.Array:
    """Passes x to the next device of the ring, and returns that of the device before this one."""
    devices = size_along(axes)
    ring = [(device, (device + 1) % devices) for device in range(devices)]
    return _sent(x, lambda data: jax.lax.ppermute(data, tuple(axes), ring))


def _sent(x: jax.Array, collective: Callable[[jax.Array], Any]) -> jax.Array:
    return from_bytes([collective(as_bytes(x))], [x.dtype])[0]
