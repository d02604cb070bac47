"""Factors that are reduced away: each device reduces its piece and one collective combines them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.sharding.meshes import by_axis_type, collectives, mesh_of, name_of, place, unless_refused
from tests.wiring.small_ops import biased_total, doubled_with_maximum, integers, maximum, total

SPLITS = [((1,), P("a")), ((4,), P("a")), ((2,), P(None, "a")), ((2, 4), P("b", "a")), ((2, 4), P(None, ("b", "a")))]


@by_axis_type
@pytest.mark.parametrize(("sizes", "spec"), SPLITS, ids=name_of)
def test_one_all_reduce_however_the_operand_is_split(sizes, spec, axis_type):
    mesh, x = mesh_of(sizes, axis_type), integers((16, 64))
    placed = place(x, mesh, spec)
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda x: maximum(x)).lower(placed).compile()
        assert compiled(placed)[0] == x.max()
        assert total(placed)[0] == x.sum()
    whole = placed.sharding.is_fully_replicated
    assert collectives(compiled) == ([] if whole else [("all-reduce", 1)])


@by_axis_type
@pytest.mark.parametrize(
    ("shape", "spec", "found"),
    [
        ((4, 8, 16), P("a", None, "b"), [("all-reduce", 2)]),
        ((4, 8, 16), P(None, "a", "b"), [("all-reduce", 4)]),
        ((8, 4, 4), P(("a", "b")), []),
    ],
    ids=name_of,
)
def test_slices_are_reduced_where_they_are(shape, spec, found, axis_type):
    mesh, x = mesh_of((2, 4), axis_type), integers(shape)
    placed = place(x, mesh, spec)
    batched, mapped = jax.jit(lambda x: maximum(x)[0]), jax.jit(jax.vmap(lambda x: maximum(x)[0]))
    with jax.set_mesh(mesh):
        for function in (batched, mapped):
            compiled = function.lower(placed).compile()
            np.testing.assert_array_equal(compiled(placed), x.max((-2, -1)))
            assert collectives(compiled) == found


@by_axis_type
@pytest.mark.parametrize(("sizes", "spec"), SPLITS, ids=name_of)
def test_results_that_have_the_factor_stay_split(sizes, spec, axis_type):
    mesh, x = mesh_of(sizes, axis_type), integers((16, 64))
    with jax.set_mesh(mesh):
        placed = place(x, mesh, spec)
        doubled, largest, of_rows = jax.jit(doubled_with_maximum)(placed)
    assert doubled.sharding.is_equivalent_to(placed.sharding, 2)
    assert largest.sharding.is_fully_replicated and largest == x.max()
    assert of_rows.sharding.shard_shape((16,)) == placed.sharding.shard_shape(x.shape)[:1]
    np.testing.assert_array_equal(doubled, 2 * x)
    np.testing.assert_array_equal(of_rows, x.max(-1))


@by_axis_type
@pytest.mark.parametrize(("sizes", "spec"), SPLITS[:4], ids=name_of)
def test_when_reduced_replaces_op_and_collective(sizes, spec, axis_type):
    """A bias inside the op would be added once a device."""
    mesh, x = mesh_of(sizes, axis_type), integers((16, 64))
    with jax.set_mesh(mesh):
        assert biased_total(place(x, mesh, spec), jnp.float32(1000))[0] == x.sum() + 1000


def test_reductions_in_a_shard_map_are_the_callers():
    mesh, x = mesh_of((2, 4)), integers((16, 64))

    def local(x):
        return jax.lax.pmax(maximum(x)[0], ("a", "b"))

    assert jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("a", "b"), out_specs=P()))(x) == x.max()


@by_axis_type
def test_partially_manual_and_split_over_the_rest(axis_type):
    mesh, x = mesh_of((2, 4), axis_type), integers((16, 64))
    function = jax.shard_map(
        lambda x: jax.lax.pmax(maximum(x)[0], "a"), in_specs=P("a"), out_specs=P(), axis_names={"a"}
    )
    with jax.set_mesh(mesh):
        out = unless_refused(lambda: jax.jit(function)(place(x, mesh, P("a", "b"))))
    assert out is None or out == x.max()
