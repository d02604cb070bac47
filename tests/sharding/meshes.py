"""Meshes of the virtual devices, and what travels between them."""

import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlowprec import traffic

PLACEMENTS = [  # sizes of the mesh axes "a" and "b", and where they go
    ((1,), P("a")),
    ((2,), P("a")),
    ((2,), P(None, "a")),
    ((4,), P("a")),
    ((2, 2), P("a", "b")),
    ((8,), P("a")),
    ((8,), P(None, "a")),
    ((2, 4), P()),
    ((2, 4), P("a", "b")),
    ((4, 2), P("b", "a")),
    ((2, 4), P(("a", "b"))),
    ((2, 4), P(None, ("b", "a"))),
]


def name_of(value):
    """The id of a test parameter."""
    return value.name if isinstance(value, AxisType) else str(value)


by_axis_type = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=name_of)


def mesh_of(sizes, axis_type=AxisType.Auto, names="abc", devices=None):
    """A mesh of the first devices, or of the given ones; each axis has a size, a name and a type (one for all, or a
    tuple)."""
    devices = np.array((jax.devices() if devices is None else devices)[: math.prod(sizes)]).reshape(sizes)
    types = axis_type if isinstance(axis_type, tuple) else (axis_type,) * len(sizes)
    return Mesh(devices, tuple(names[: len(sizes)]), axis_types=types)


def place(x, mesh, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def lengthened(spec, ndim):
    """The spec with an entry for each dimension."""
    return P(*spec, *[None] * (ndim - len(spec)))


def collectives(compiled):
    """(kind, elements) of every collective in a compiled function; one that XLA combined from several counts as one."""
    return [(c.kind, c.elements) for c in traffic.collectives(compiled)]


def on_mesh(function, args, specs, mesh):
    """The result of a jitted function, and the collectives it took."""
    with jax.set_mesh(mesh):
        placed = [place(a, mesh, spec) for a, spec in zip(args, specs, strict=True)]
        compiled = jax.jit(function).lower(*placed).compile()
        return jax.device_get(compiled(*placed)), collectives(compiled)


def split(q, mesh, spec):
    """A quantised matrix placed on a mesh: the spec is that of codes and scales, its amax is whole."""
    return jax.tree.map(lambda leaf: place(leaf, mesh, spec if leaf.ndim else P()), q)


def unless_refused(call):
    """What a call inside a partially manual shard_map returns, or None where it says that it cannot serve."""
    try:
        return call()
    except Exception as error:  # XLA wraps what a partitioner raises
        if "make all mesh axes manual" not in str(error):
            raise
        return None


def assert_same_to_rounding(actual, expected):
    """Trees of results and gradients, the latter of cosines: a sum over a split axis is added in another order."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        a, e = np.asarray(a), np.asarray(e)
        largest = max(1, np.abs(e).max())  # of a sum's terms: a bias's gradient adds up cosines, which cancel
        np.testing.assert_allclose(a, e, rtol=0, atol=2e-6 * largest)
