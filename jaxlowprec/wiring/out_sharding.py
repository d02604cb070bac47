"""Shardings in types: how results are to be split in JAX's explicit-sharding mode (`AxisType.Explicit`)."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


def sharding_of(x: jax.Array | None) -> NamedSharding | None:
    """The sharding of x's type, which its gradient has too; None outside of meshes in explicit mode."""
    sharding = None if x is None else jax.typeof(x).sharding
    return sharding if sharding is not None and sharding.mesh.explicit_axes else None


def dimensions_of(x: jax.Array) -> list[tuple[str, ...]]:
    """The mesh axes that each dimension of x is split over in its type."""
    entries = [*jax.typeof(x).sharding.spec, *[None] * x.ndim][: x.ndim]
    return [entry if isinstance(entry, tuple) else () if entry is None else (entry,) for entry in entries]


def sharding_of_product(x: jax.Array, features: tuple[str, ...]) -> NamedSharding | None:
    """The sharding of x [..., K] times a kernel whose features are split over those mesh axes; x's axes come first."""
    sharding = sharding_of(x)
    if sharding is None:
        return None
    *lines, _ = dimensions_of(x)
    used = {axis for axes in lines for axis in axes}
    return sharding.update(spec=PartitionSpec(*lines, tuple(axis for axis in features if axis not in used)))


def spec_of(out_sharding: NamedSharding | PartitionSpec | None) -> PartitionSpec | None:
    """The partition in it: what a `wiring` op takes as `out_spec`."""
    return out_sharding.spec if isinstance(out_sharding, NamedSharding) else out_sharding


def resharded(x: jax.Array, out_sharding: NamedSharding | PartitionSpec | None) -> jax.Array:
    """x, split as `out_sharding` says; x itself where that is None."""
    return x if out_sharding is None else jax.sharding.reshard(x, out_sharding)


def replicated(x: Any) -> Any:
    """x, whole on every device in explicit mode; x itself otherwise, None too."""
    sharding = sharding_of(x)
    return x if sharding is None else jax.sharding.reshard(x, sharding.update(spec=PartitionSpec()))
