"""Where the parts of an array lie on a mesh, as sharding rules need it: read from the shardings that JAX passes on."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxlowprec.wiring.sharding_rule import MeshArray, ShardingRule

_TILED = re.compile(r"{devices=\[([\d,]+)\](?:([\d,]+)|<=\[([\d,]+)\](?:T\(([\d,]+)\))?)(?: last_tile_dim_replicate)?}")


def _primes(n: int) -> list[int]:
    prime = next((p for p in range(2, n + 1) if n % p == 0), None)
    return [prime, *_primes(n // prime)] if prime else []


def refine(mesh: Mesh) -> Mesh:
    """The mesh with every axis factored into primes, devices in the same order: Shardy may use a part of an axis."""
    primes = [p for n in mesh.devices.shape for p in _primes(n)] or [1]
    return Mesh(mesh.devices.reshape(primes), tuple(f"_{i}" for i in range(len(primes))))


def _spec_on(mesh: Mesh, sharding: Any, shape: tuple[int, ...]) -> list[tuple[str, ...]]:
    """A sharding as a spec of a refined mesh, found from the part of the array that each device holds.

    The shape is scaled by the mesh's size, so that every split divides it. The first step along each mesh axis shows
    which dimension the axis splits; the axes with the larger offsets are the major ones.
    """
    where = sharding.devices_indices_map(tuple(n * mesh.size for n in shape))
    steps = []
    for axis, size in enumerate(mesh.devices.shape):
        index = tuple(int(k == axis and size > 1) for k in range(mesh.devices.ndim))
        steps.append([part.start or 0 for part in where[mesh.devices[index]]])
    spec = []
    for dim in range(len(shape)):
        moving = [(-steps[axis][dim], axis) for axis in range(mesh.devices.ndim) if steps[axis][dim]]
        spec.append(tuple(mesh.axis_names[axis] for _, axis in sorted(moving)))
    return spec


def mesh_array(mesh: Mesh, value: Any) -> MeshArray:
    """A value as sharding rules take it: its shape, how it lies on the refined mesh, and its size."""
    return MeshArray(tuple(value.shape), _spec_on(mesh, value.sharding, value.shape), value.dtype.itemsize)


def _tiles(sharding: Any, ndim: int) -> list[tuple[int, ...]] | None:
    """The index of the tile that each device holds, for each dimension; () for a dimension that is not split; None if
    that is not known.

    Read from the printed form: JAX has no public attribute for shardings inside a partially manual shard_map.
    """
    if sharding.is_fully_replicated:
        return [()] * ndim
    found = _TILED.search(str(sharding))
    if not found:
        return None
    sizes, listed, iota, order = ([int(n) for n in (group or "").split(",") if n] for group in found.groups())
    devices = listed or np.arange(math.prod(iota)).reshape(iota).transpose(order or range(len(iota))).ravel()
    held = np.unravel_index(np.argsort(devices), sizes)
    return [tuple(index.tolist()) if n > 1 else () for index, n in zip(held[:ndim], sizes, strict=False)]


def check_pieces(name: str, rule: ShardingRule, args: Sequence[Any], results: Sequence[Any]) -> None:
    """Raises unless the shardings agree: a shard_map that is manual over some axes only passes them through."""
    pieces: dict[str, tuple[int, ...]] = {}

    def agrees(factor: str, rest: int, size: int, held: tuple[int, ...]) -> bool:
        count = 1 + max(held, default=0)
        whole = factor in rule.reductions or factor in rule.whole
        return size % (count * rest) == 0 and not (held and whole) and pieces.setdefault(factor, held) == held

    for tokens, value in zip(rule.operands + rule.results, [*args, *results], strict=True):
        dims, tiles = rule.dims(tokens, len(value.shape)), _tiles(value.sharding, len(value.shape))
        if tiles is None or not all(
            agrees(*dim, size, held) for dim, size, held in zip(dims, value.shape, tiles, strict=True)
        ):
            raise NotImplementedError(
                f"{name}: operands are split differently in a partially manual shard_map; make all mesh axes manual"
            )
