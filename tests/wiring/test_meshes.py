"""Each device computes the piece it holds, on meshes of 1 to 8 devices, with Auto and Explicit axes."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.sharding.meshes import PLACEMENTS, by_axis_type, collectives, lengthened, mesh_of, name_of, place
from tests.wiring.small_ops import assert_right, block_sums, integers, operands, piece_of, sums_of_tiles, tiles


@by_axis_type
@pytest.mark.parametrize(("sizes", "spec"), PLACEMENTS, ids=name_of)
def test_each_device_computes_the_piece_it_holds(sizes, spec, axis_type):
    mesh, args = mesh_of(sizes, axis_type), operands((16, 64))
    x = place(args[0], mesh, spec)
    for rows in (args[2], place(args[2], mesh, P(spec[0] if spec else None))):
        out = block_sums(x, args[1], rows)
        assert_right(out, args, piece_of(x))
        assert out[0].sharding.is_equivalent_to(x.sharding, 2)
        if axis_type == AxisType.Explicit:
            assert jax.typeof(out[0]).sharding.spec == lengthened(spec, 2)


@by_axis_type
@pytest.mark.parametrize(("sizes", "spec"), [((2, 2), P("a", "b")), ((2, 4), P(None, ("b", "a")))], ids=name_of)
def test_nothing_travels(sizes, spec, axis_type):
    mesh, args = mesh_of(sizes, axis_type), operands((16, 64))
    x = place(args[0], mesh, spec)
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda *a: block_sums(*a)).lower(x, *args[1:]).compile()
    assert collectives(compiled) == []


@by_axis_type
def test_under_an_ambient_mesh_too(axis_type):
    mesh, args = mesh_of((2, 4), axis_type), operands((16, 64))
    with jax.set_mesh(mesh):
        assert_right(block_sums(place(args[0], mesh, P("a", "b")), *args[1:]), args, (8, 4))


@pytest.mark.parametrize("spec", [P("a", "b"), P("b", "a")], ids=str)
def test_a_mesh_whose_axes_are_explicit_and_auto(spec):
    mesh = mesh_of((2, 4), (AxisType.Explicit, AxisType.Auto))
    args = operands((16, 64))
    x = place(args[0], mesh, spec)
    with jax.set_mesh(mesh):
        out = block_sums(x, *args[1:])
    assert_right(out, args, piece_of(x))


@by_axis_type
@pytest.mark.parametrize(
    ("shape", "sizes", "spec", "piece"),
    [
        ((12, 12), (2,), P(None, "a"), (12, 3)),  # 3 blocks over 2 devices: gathered
        ((12, 24), (4,), P(None, "a"), (12, 3)),  # 6 blocks over 2 x 2: as many parts as there are
        ((12, 24), (2, 4), P("a", "b"), (6, 3)),
        ((12, 24), (3, 2), P("b", "a"), (6, 2)),
        ((12, 24), (6,), P(None, "a"), (12, 1)),
        ((4, 8), (8,), P(None, "a"), (4, 1)),
    ],
    ids=name_of,
)
def test_blocks_are_never_cut(shape, sizes, spec, piece, axis_type):
    mesh, args = mesh_of(sizes, axis_type), operands(shape)
    assert_right(block_sums(place(args[0], mesh, spec), *args[1:]), args, piece)


@pytest.mark.parametrize(
    ("shape", "spec"), [((10, 24), P("b", "a")), ((9, 40), P("a", "b")), ((7, 4), P(("a", "b")))], ids=str
)
def test_dimensions_that_do_not_divide_at_all(shape, spec):
    mesh, args = mesh_of((2, 4)), operands(shape)

    @jax.jit
    def constrained(x, gain, rows):
        return block_sums(jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)), gain, rows)

    assert_right(constrained(*args), args)


@pytest.mark.parametrize("spec", [P("a", "b"), P("b", "a"), P(("b", "a"))], ids=str)
def test_devices_in_any_order(spec):
    order = [jax.devices()[i] for i in (3, 1, 0, 2, 7, 4, 6, 5)]
    mesh, args = mesh_of((2, 4), devices=order), operands((16, 64))
    out = block_sums(place(args[0], mesh, spec), *args[1:])
    assert_right(out, args)
    assert out[0].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


@pytest.mark.parametrize(
    ("before", "sizes", "spec", "shape", "piece"),
    [
        ((64, 16), (8,), P("a"), (4, 256), (1, 32)),  # the rows take 4 of the 8 devices, the columns the other 2
        ((1024,), (8,), P("a"), (16, 64), (2, 16)),
        ((2, 512), (2,), P("a"), (16, 64), (8, 16)),
        ((2, 512), (8,), P(None, "a"), (16, 64), None),  # no split of the result: gathered
    ],
    ids=name_of,
)
def test_a_reshape_may_leave_a_part_of_a_mesh_axis(before, sizes, spec, shape, piece):
    args = operands(shape)
    flat = place(args[0].reshape(before), mesh_of(sizes), spec)
    out = jax.jit(lambda x, *rest: block_sums(x.reshape(shape), *rest))(flat, *args[1:])
    assert_right(out, args, piece)


@by_axis_type
@pytest.mark.parametrize("shape", [(16, 32), (16, 4), (4, 16), (4, 4), (0, 16), (0, 0)], ids=str)
def test_a_dimension_may_hold_one_block_or_none(shape, axis_type):
    """Shardy takes no factor of size 1 in a product, and none that occurs in two dimensions of one array."""
    mesh, x = mesh_of((2, 2), axis_type), integers(shape)
    for actual, wanted in zip(tiles(place(x, mesh, P("a", "b"))), sums_of_tiles(x), strict=True):
        np.testing.assert_array_equal(actual, wanted)


@by_axis_type
@pytest.mark.parametrize(
    ("x_spec", "rows_spec"),
    [
        (P("a", "b"), P("b")),
        (P("a", "b"), P(("a", "b"))),
        (P("b"), P("a")),
        (P(None, "b"), P("b")),
        (P(("b", "a")), P(("a", "b"))),
    ],
    ids=str,
)
def test_operands_that_are_split_differently_are_aligned(x_spec, rows_spec, axis_type):
    """JAX hands the pieces out as they are: passed through they would give wrong numbers in silence."""
    mesh, args = mesh_of((2, 2), axis_type), operands((16, 32))
    x, rows = place(args[0], mesh, x_spec), place(args[2], mesh, rows_spec)
    assert_right(block_sums(x, args[1], rows), args)
    with jax.set_mesh(mesh):
        assert_right(jax.jit(lambda *a: block_sums(*a))(x, args[1], rows), args)


@by_axis_type
@pytest.mark.parametrize(
    ("spec", "piece"),
    [(P("a", "b", "c"), (4, 4)), (P(("a", "b"), None, None, "c"), (8, 2)), (P(None, "c", "b"), (4, 4))],
    ids=name_of,
)
def test_batch_axes_are_split_too(spec, piece, axis_type):
    mesh, args = mesh_of((2, 2, 2), axis_type), operands((4, 2, 8, 16))
    assert_right(block_sums(place(args[0], mesh, spec), *args[1:]), args, piece)


def test_an_operand_on_another_device_stays_there():
    args = operands((8, 16))
    out = block_sums(*jax.device_put(args, jax.devices()[5]))
    assert out[0].devices() == {jax.devices()[5]}
    assert_right(out, args)


class TestExplicitTypes:
    @pytest.mark.parametrize("spec", [P(), P("a", "b"), P(None, ("b", "a"))], ids=str)
    def test_they_are_known_without_running(self, spec):
        mesh = mesh_of((2, 4), AxisType.Explicit)
        x, gain, rows = operands((16, 64))
        with jax.set_mesh(mesh):
            x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
            for result in jax.eval_shape(block_sums, x, gain, rows):
                assert result.sharding.spec == lengthened(spec, 2)

    @pytest.mark.parametrize(
        ("shape", "spec", "result"),
        [
            ((8, 16, 64), P("a", None, "b"), P("a", None, "b")),
            ((8, 16, 64), P(None, "b"), P(None, "b", None)),
            ((16, 24), P("a", "b"), P("a", None)),  # 6 blocks over 4 devices: whole
            ((16, 24), P("b", "a"), P("b", "a")),
            ((8, 12), P(("a", "b"), None), P(("a", "b"), None)),
        ],
        ids=str,
    )
    def test_they_split_batch_axes_and_whole_blocks_only(self, shape, spec, result):
        mesh, args = mesh_of((2, 4), AxisType.Explicit), operands(shape)
        out = block_sums(place(args[0], mesh, spec), *args[1:])
        assert all(jax.typeof(o).sharding.spec == result for o in out)
        assert_right(out, args)
