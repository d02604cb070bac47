"""Inside shard_map an op sees its shard; where only some mesh axes are manual it is right, or says that it cannot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxlowprec.wiring import placement
from jaxlowprec.wiring.defining import ShardingRule
from tests.sharding.meshes import by_axis_type, mesh_of, name_of, place, unless_refused
from tests.wiring.small_ops import RULE, assert_right, block_sums, operands, piece_of


@by_axis_type
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("spec", [P("a", "b"), P(None, ("a", "b"))], ids=str)
def test_manual_over_all_axes(spec, axis_type, check_vma):
    """check_vma=True wants all operands to vary over the same axes; the gain varies over none."""
    mesh, args = mesh_of((2, 4), axis_type), operands((16, 64))
    specs = (spec, P(), P(spec[0]))
    function = jax.shard_map(block_sums, mesh=mesh, in_specs=specs, out_specs=(spec,) * 2, check_vma=check_vma)
    with jax.set_mesh(mesh):
        placed = [place(a, mesh, s) for a, s in zip(args, specs, strict=True)]
        assert_right(jax.jit(function)(*placed), args, piece_of(placed[0]))


def test_a_result_varies_where_any_operand_does():
    """Taken for the same on every device, one shard's numbers would pass for all."""
    x, gain, rows = operands((8, 16))
    shards = rows, 3 * rows

    def sums(out_spec):
        specs = {"in_specs": (P(), P(), P("a")), "out_specs": (out_spec,) * 2}
        function = jax.jit(jax.shard_map(block_sums, mesh=mesh_of((2,)), **specs))
        return function(x, gain, np.concatenate(shards))[0]

    np.testing.assert_array_equal(sums(P("a")), np.concatenate([block_sums(x, gain, shard)[0] for shard in shards]))
    with pytest.raises(ValueError, match="out_specs"):
        sums(P())


def test_vmap_in_a_shard_map():
    mesh, args = mesh_of((2, 4)), operands((4, 8, 32))
    specs = (P("a", None, "b"), P("a"), P())
    mapped = jax.vmap(block_sums, (0, 0, None))
    function = jax.shard_map(mapped, mesh=mesh, in_specs=specs, out_specs=(specs[0],) * 2)
    assert_right(jax.jit(function)(*args), args, (8, 2))


def test_vmap_of_a_shard_map():
    mesh, args, spec = mesh_of((2, 4)), operands((4, 8, 32)), P("a", "b")
    function = jax.shard_map(block_sums, mesh=mesh, in_specs=(spec, P(), P("a")), out_specs=(spec,) * 2)
    assert_right(jax.jit(jax.vmap(function, (0, 0, None)))(*args), args, (4, 2))


@by_axis_type
@pytest.mark.parametrize(
    ("spec", "manual"), [(P("a", "b"), "a"), (P("a", "b"), "b"), (P("b", "a"), "a"), (P(None, "b"), "a")], ids=name_of
)
@pytest.mark.parametrize("check_vma", [True, False])
def test_manual_over_one_axis_and_split_over_the_other(spec, manual, axis_type, check_vma):
    mesh, args = mesh_of((2, 4), axis_type), operands((16, 64))
    specs = (spec, P(), P(spec[0]))
    inner = [P(*[axis if axis == manual else None for axis in s]) for s in specs]
    function = jax.shard_map(
        block_sums, in_specs=tuple(inner), out_specs=(inner[0],) * 2, axis_names={manual}, check_vma=check_vma
    )
    placed = [place(a, mesh, s) for a, s in zip(args, specs, strict=True)]
    with jax.set_mesh(mesh):
        assert_right(jax.jit(function)(*placed), args)


@by_axis_type
@pytest.mark.parametrize(
    ("x_spec", "rows_spec", "result_spec"),
    [
        (P("b"), P("c"), P("b")),  # axes of one size: the pieces fit, but are others
        (P("b", "c"), P("c"), P("b", "c")),
        (P(("b", "c")), P(("c", "b")), P(("b", "c"))),
        (P(None, "b"), P("b"), P()),
        (P("b"), P(), P("b")),
    ],
    ids=str,
)
def test_operands_split_differently_over_the_other_axes(x_spec, rows_spec, result_spec, axis_type):
    mesh, args = mesh_of((2, 2, 2), axis_type), operands((16, 64))

    def constrained(x, gain, rows):
        out = block_sums(x, gain, rows)
        if axis_type == AxisType.Auto:
            out = tuple(jax.lax.with_sharding_constraint(o, result_spec) for o in out)
        return out

    function = jax.shard_map(constrained, in_specs=(P(),) * 3, out_specs=(P(),) * 2, axis_names={"a"})
    with jax.set_mesh(mesh):
        placed = place(args[0], mesh, x_spec), args[1], place(args[2], mesh, rows_spec)
        out = unless_refused(lambda: jax.jit(function)(*placed))
    if out is not None:
        assert_right(out, args)


@by_axis_type
def test_an_empty_array_where_some_axes_are_manual(axis_type):
    mesh, spec = mesh_of((2, 4), axis_type), P("a", "b")
    x, rows = np.zeros((0, 64), np.float32), np.zeros(0, np.float32)
    function = jax.shard_map(block_sums, in_specs=(P("a"), P(), P("a")), out_specs=(P("a"),) * 2, axis_names={"a"})
    with jax.set_mesh(mesh):
        sums, _ = jax.jit(function)(place(x, mesh, spec), jnp.float32(1), place(rows, mesh, P("a")))
    assert sums.shape == (0, 16)


class Value:
    """An operand or result as a partitioner sees it, its sharding known by its printed form alone."""

    def __init__(self, shape, printed):
        self.shape, self.sharding, self.printed = shape, self, printed
        self.is_fully_replicated = printed == "{replicated}"

    def __str__(self):
        return f"GSPMDSharding({self.printed}, memory_kind=device)"


class TestPieces:
    """JAX decodes no sharding inside a partially manual shard_map; what is not surely consistent is refused."""

    @pytest.mark.parametrize("axes", [(2, 4), (2, 2, 2), (8,)], ids=str)
    def test_the_printed_form_says_which_device_holds_which_tile(self, monkeypatch, axes):
        """Outside of shard_map the same kind of sharding has a public answer to compare with."""
        seen, original = [], placement._spec_on

        def recording(mesh, sharding, shape):
            seen.append((mesh, sharding, shape))
            return original(mesh, sharding, shape)

        monkeypatch.setattr(placement, "_spec_on", recording)
        names = "abc"[: len(axes)]
        mesh = mesh_of(axes, devices=[jax.devices()[i] for i in (3, 1, 0, 2, 7, 4, 6, 5)])
        args = operands((16, 64))
        for spec in (P(*names[:2]), P(*names[::-1][:2]), P(tuple(names[::-1])), P(None, names[-1])):
            block_sums(place(args[0], mesh, spec), *args[1:])
        assert any(sharding.is_fully_replicated for _, sharding, _ in seen)
        for mesh, sharding, shape in seen:
            where, piece = sharding.devices_indices_map(shape), sharding.shard_shape(shape)
            slices = [where[device] for device in mesh.devices.flat]
            assert placement._tiles(sharding, len(shape)) == [
                tuple((part[dim].start or 0) // m for part in slices) if m < n else ()
                for dim, (n, m) in enumerate(zip(shape, piece, strict=True))
            ]

    CONSISTENT = ("{devices=[2,2]<=[4]}", "{devices=[2,2]<=[4] last_tile_dim_replicate}")
    ANOTHER_ORDER = "{devices=[2,2]0,2,1,3 last_tile_dim_replicate}"

    def check(self, x, rows, result, shape=(16, 64)):
        values = [Value(shape, x), Value((), "{replicated}"), Value(shape[:1], rows)]
        placement.check_pieces("op", RULE, values, [Value((shape[0], shape[1] // 4), result)] * 2)

    def test_pieces_that_agree_are_let_through(self):
        split, rows = self.CONSISTENT
        self.check(split, rows, split)
        self.check(split, rows, split, (0, 64))
        self.check("{replicated}", "{replicated}", "{replicated}")

    @pytest.mark.parametrize(
        ("x", "rows", "result", "shape"),
        [
            (CONSISTENT[0], ANOTHER_ORDER, CONSISTENT[0], (16, 64)),
            (CONSISTENT[0], "{replicated}", CONSISTENT[0], (16, 64)),
            (*CONSISTENT, "{replicated}", (16, 64)),
            (*CONSISTENT, CONSISTENT[0], (16, 4)),  # half a block
            (*CONSISTENT, CONSISTENT[0], (15, 64)),
        ],
    )
    def test_pieces_that_do_not_agree_are_refused(self, x, rows, result, shape):
        with pytest.raises(
            NotImplementedError, match="op: operands are split differently .* make all mesh axes manual"
        ):
            self.check(x, rows, result, shape)

    @pytest.mark.parametrize("option", ["reductions", "whole"])
    def test_a_split_factor_that_must_be_whole_is_refused(self, option):
        """There are no mesh axes here to reduce or gather over."""
        x, result = Value((16, 64), "{devices=[1,4]<=[4]}"), Value((16,), "{replicated}")
        placement.check_pieces("op", ShardingRule("r c -> r"), [x], [result])
        with pytest.raises(NotImplementedError, match="make all mesh axes manual"):
            placement.check_pieces("op", ShardingRule("r c -> r", **{option: ("c",)}), [x], [result])

    @pytest.mark.parametrize(
        "printed",
        [
            "{unknown}",
            "{maximal device=0}",
            "{manual}",
            "{devices=[2,2]<=[4] last_tile_dims={unreduced}}",
            "{mesh['b'=2]}",
        ],
    )
    def test_a_sharding_printed_in_an_unknown_way_is_refused(self, printed):
        with pytest.raises(NotImplementedError, match="make all mesh axes manual"):
            self.check(printed, printed, printed)
