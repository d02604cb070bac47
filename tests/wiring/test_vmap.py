"""A mapped axis is one more batch axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.sharding.meshes import by_axis_type, collectives, mesh_of, place
from tests.wiring.small_ops import assert_right, block_sums, operands

ARGS = operands((3, 5, 8, 16))
SLICES = (ARGS[0][0], ARGS[1][0], ARGS[2])  # [5, 8, 16]


def test_a_mapped_axis_is_a_batch_axis():
    mapped = jax.vmap(block_sums, (0, 0, None))(*ARGS)
    np.testing.assert_array_equal(mapped[0], block_sums(*ARGS)[0])
    assert_right(mapped, ARGS, (8, 4))


def test_vmap_of_vmap_is_two_of_them():
    nested = jax.vmap(jax.vmap(block_sums, (0, 0, None)), (0, 0, None))
    assert_right(nested(*ARGS), ARGS, (8, 4))
    assert_right(jax.jit(nested)(*ARGS), ARGS, (8, 4))


def test_an_operand_that_is_not_mapped_serves_every_slice():
    x, gain, rows = SLICES
    out = jax.vmap(block_sums, (0, None, None))(x, gain[0], rows)
    assert_right(out, (x, np.broadcast_to(gain[0], 5), rows))
    out = jax.vmap(block_sums, (None, 0, None))(x[0], gain, rows)
    assert_right(out, (np.broadcast_to(x[0], x.shape), gain, rows))


@pytest.mark.parametrize(("in_axis", "out_axis"), [(1, 0), (-1, -1), (0, 1)])
def test_any_axis_in_and_out(in_axis, out_axis):
    x, gain, rows = SLICES
    out = jax.vmap(block_sums, (in_axis, 0, None), out_axis)(jnp.moveaxis(x, 0, in_axis), gain, rows)
    assert_right([jnp.moveaxis(o, out_axis, 0) for o in out], SLICES)


def test_vmap_of_an_operand_without_batch_axes_is_refused():
    x, gain, rows = SLICES
    with pytest.raises(NotImplementedError, match="block_sums: operand 2 has no batch axes"):
        jax.vmap(block_sums, (None, None, 0))(x, gain, np.stack([rows, rows]))


@by_axis_type
def test_a_mapped_axis_that_is_split_stays_split(axis_type):
    mesh, args = mesh_of((2, 4), axis_type), operands((4, 8, 32))
    x, gain = place(args[0], mesh, P("a", None, "b")), place(args[1], mesh, P("a"))
    function = jax.jit(jax.vmap(block_sums, (0, 0, None)))
    assert_right(function(x, gain, args[2]), args, (8, 2))
    assert collectives(function.lower(x, gain, args[2]).compile()) == []


def test_spmd_axis_name_places_the_mapped_axis():
    mesh, args = mesh_of((2, 4)), operands((4, 8, 32))
    with jax.set_mesh(mesh):
        out = jax.jit(jax.vmap(block_sums, (0, 0, None), spmd_axis_name="a"))(*args)
    assert_right(out, args)
