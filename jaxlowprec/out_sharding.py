"""Shardings in types: how results are to be split in JAX's explicit-sharding mode (`AxisType.Explicit`)."""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding, PartitionSpec


def sharding_of(x: jax.Array | None) -> NamedSharding | None:
    """That of x's type, which its gradient has too; None outside of meshes in explicit mode."""
    sharding = None if x is None else jax.typeof(x).sharding
    return sharding if sharding is not None and sharding.mesh.explicit_axes else None


def spec_of(out_sharding: NamedSharding | PartitionSpec | None) -> PartitionSpec | None:
    """How it splits dimensions: what a `wiring` op takes as `out_spec`."""
    return out_sharding.spec if isinstance(out_sharding, NamedSharding) else out_sharding


def resharded(x: jax.Array, out_sharding: NamedSharding | PartitionSpec | None) -> jax.Array:
    """x, split as it was asked for."""
    return x if out_sharding is None else jax.sharding.reshard(x, out_sharding)
